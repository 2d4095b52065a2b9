"""The vision transformer (Dosovitskiy et al. 2021)."""
