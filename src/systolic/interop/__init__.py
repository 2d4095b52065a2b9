"""Models of other libraries: their files as models, weights and jobs of ours, and back."""
