"""Views of one run: live view, summary, TensorBoard and page, all from the same records."""
