"""Errors, units, origins, digests and atomic files: the base of every layer."""
