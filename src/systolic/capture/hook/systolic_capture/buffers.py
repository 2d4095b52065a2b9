"""Memory of a program that is lowered and not compiled."""

import collections
import math


class MemoryStats:
    """Bytes on a device as ``CompiledMemoryStats`` names them: no code and no temporaries are known yet."""

    generated_code_size_in_bytes = host_generated_code_size_in_bytes = 0
    temp_size_in_bytes = host_temp_size_in_bytes = 0
    serialized_buffer_assignment_proto = b""

    def __init__(self, arguments, results):
        """
        Args:
            arguments: Each with its sharding, and whether it is donated.
            results: Each with its sharding.
        """
        sizes, donated = collections.Counter(), collections.Counter()
        for value, where, gone in arguments:
            place, size = _part(value, where)
            sizes[place, "argument"] += size
            donated[place, size, value.dtype] += gone
        for value, where in results:
            place, size = _part(value, where)
            sizes[place, "output"] += size
            if donated[place, size, value.dtype] > 0:
                donated[place, size, value.dtype] -= 1
                sizes[place, "alias"] += size
        for place in ("", "host_"):
            for kind in ("argument", "output", "alias"):
                setattr(self, f"{place}{kind}_size_in_bytes", sizes[place, kind])
        kept = self.argument_size_in_bytes + self.output_size_in_bytes
        self.peak_memory_in_bytes = kept - self.alias_size_in_bytes


def _part(value, where):
    """The memory that an array lies in, and the bytes of a device's part of it."""
    shape = where.shard_shape(value.shape) if hasattr(where, "shard_shape") else value.shape
    host = str(getattr(where, "memory_kind", None)).endswith("host")
    return "host_" if host else "", math.prod(shape) * value.dtype.itemsize
