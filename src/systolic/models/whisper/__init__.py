"""Whisper: speech to text."""
