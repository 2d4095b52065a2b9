"""Requests of a file, answered without a server: lines, files, and the run between them."""
