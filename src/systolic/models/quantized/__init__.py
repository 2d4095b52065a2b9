"""Arithmetic of quantized models: codes with scales, rounding by least error, products in int8, and statistics of inputs."""
