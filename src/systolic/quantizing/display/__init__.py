"""Text of ``systolic quantize``."""
