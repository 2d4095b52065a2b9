"""Models that answer a request at once: images, embeddings, speech and arrays, many requests in a batch."""
