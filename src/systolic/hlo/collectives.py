"""Opcodes of ops in which devices talk to each other."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
"""Opcodes without the suffixes ``-start`` and ``-done`` of their asynchronous halves."""
