"""Bidirectional transformers over tokens (Devlin et al. 2019)."""
