"""Text: documents of any kind, tokenizers, rows of tokens, packed files."""
