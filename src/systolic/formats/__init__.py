"""Formats of models: which module reads and writes each, and what they share."""
