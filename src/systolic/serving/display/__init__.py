"""Terminal views of servers and of offline batches."""
