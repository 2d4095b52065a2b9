"""Answers of a model for files, texts, recordings and arrays: rows in batches of a few shapes, each compiled once."""
