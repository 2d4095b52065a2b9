"""One run: the live view, the summary, TensorBoard and the page, all of the same records."""
