"""Decoders of Hugging Face's transformers: configuration and weights in both directions."""
