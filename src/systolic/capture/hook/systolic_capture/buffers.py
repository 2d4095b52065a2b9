"""Memory of a scheduled program, of the buffers that the compiler dumps before it generates code."""

import glob
import os
import re

from systolic_capture import calls

DUMPS = "*after_optimizations-buffer-assignment.txt"
HOST = 5
"""XLA's number of the host's memory; the device's is 0."""
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?(.*)")


class MemoryStats:
    """Bytes of a program as ``CompiledMemoryStats`` names them; no code is generated yet, so that it has none."""

    generated_code_size_in_bytes = host_generated_code_size_in_bytes = 0
    serialized_buffer_assignment_proto = b""

    def __init__(self, sizes):
        for place in ("", "host_"):
            for kind in ("argument", "output", "alias", "temp"):
                setattr(self, f"{place}{kind}_size_in_bytes", sizes.get(place + kind, 0))
        kept = self.argument_size_in_bytes + self.output_size_in_bytes - self.alias_size_in_bytes
        self.peak_memory_in_bytes = kept + self.temp_size_in_bytes

    def __repr__(self):
        sizes = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"MemoryStats({sizes})"


def memory_stats(folder):
    """Memory of the program whose dump lies in a folder; None of a compiler that writes no buffers with its schedule."""
    dumps = sorted(glob.glob(os.path.join(glob.escape(folder), DUMPS)), key=os.path.getsize)
    if not dumps:
        calls.note(
            "the program asked for its memory and was given none: this libtpu dumps no buffers"
        )
        return None
    with open(dumps[-1]) as file:
        return MemoryStats(sizes_of(file))


def sizes_of(lines):
    """Bytes by kind, as XLA adds them up, of the lines of a dump of buffers."""
    sizes = {}
    for line in lines:
        found = _ALLOCATION.match(line)
        color = int(found[2] or 0) if found else None
        if color not in (0, HOST):
            continue
        place = "host_" if color == HOST else ""
        argument, output = ", parameter " in found[3], "maybe-live-out" in found[3]
        kinds = {"argument": argument, "output": output, "alias": argument and output}
        kinds["temp"] = "preallocated-temp" in found[3]
        for kind in (kind for kind, holds in kinds.items() if holds):
            sizes[place + kind] = sizes.get(place + kind, 0) + int(found[1])
    return sizes
