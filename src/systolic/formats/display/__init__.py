"""Screens of systolic import and systolic export."""
