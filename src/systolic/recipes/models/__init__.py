"""Models from elsewhere as recipes."""
