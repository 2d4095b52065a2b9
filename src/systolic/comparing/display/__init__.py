"""Terminal views of a comparison."""
