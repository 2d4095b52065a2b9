"""Sources of recordings."""
