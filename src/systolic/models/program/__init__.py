"""Models of other frameworks: weights by name, and a pure function of arrays."""
