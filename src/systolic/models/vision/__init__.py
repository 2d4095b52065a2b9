"""Image models: convolutional and residual networks, vision transformers."""
