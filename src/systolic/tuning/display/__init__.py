"""Reports of a search: progress, text, page."""
