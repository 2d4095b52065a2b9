"""Models behind addresses: the engine that batches requests, and the server around it."""
