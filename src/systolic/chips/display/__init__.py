"""Screens of systolic chips."""
