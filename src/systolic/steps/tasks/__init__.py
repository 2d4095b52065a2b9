"""Losses and metrics, one task per file."""
