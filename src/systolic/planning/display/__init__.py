"""Views of a plan: progress and result in the terminal, and an HTML page."""
