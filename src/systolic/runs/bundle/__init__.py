"""A Bundle: a portable trained model in a folder."""
