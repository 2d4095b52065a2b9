"""Screens of systolic data."""
