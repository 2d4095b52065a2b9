"""Language models: continuous batching over a key-value cache in pages."""
