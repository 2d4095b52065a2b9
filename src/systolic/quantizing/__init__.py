"""Quantization of a model in files: formats of its matrices, their codes, and what they cost in quality (``systolic quantize``)."""
