"""Views of a plan: on a terminal while it is made and after, and as a page."""
