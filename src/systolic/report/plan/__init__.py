"""What a plan looks like: on a terminal while it is made and after, and as a page."""
