"""A plain convolutional network for small images."""
