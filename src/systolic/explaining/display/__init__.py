"""Views of an explanation."""
