"""Screens of systolic doctor."""
