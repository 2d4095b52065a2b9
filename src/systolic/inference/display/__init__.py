"""Terminal views of an opened model's texts, predictions and metrics."""
