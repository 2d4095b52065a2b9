"""Folders of Hugging Face transformers: reading, writing, and comparing outputs with that library."""
