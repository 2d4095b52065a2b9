"""Excerpts of profiles from chips: ``python -m tests.recorded.chips.excerpt FOLDER`` with the files that README.md names.

Events and planes are dropped, and the stack of source lines; what stays is as the profiler wrote it.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from systolic.forecasting.display.xprof import integer, message
from systolic.profile.xplane import _fields

HERE = Path(__file__).parent
V6E = "v6e-8-allreduce-host-offload.xplane.pb"
TPU7X = "tpu7x-1chip-tp2-qwen2.5-32b-bf16-1024tokens.trace.json.gz"
PLANES = ("/device:TPU:0", "/device:TPU:1")
LINES = ("XLA Modules", "XLA Ops", "Async XLA Ops")
WINDOWS = ((5.3, 11.2), (94.77, 96.4))
"""Seconds: the fill and two all-reduces; two steps with their copies."""
FIRST = 40
"""Ops of the TPU7x step, besides the longest of each category."""


def xplane(content: bytes) -> bytes:
    """The XSpace with the planes, lines and events of the excerpt."""
    planes = (value for number, value in _fields(memoryview(content)) if number == 1)
    return b"".join(
        message(1, b"".join(_plane(value)))
        for value in planes
        if bytes(dict(_fields(value)).get(2, b"")).decode() in PLANES
    )


def _plane(plane: Any) -> Iterator[bytes]:
    used: set[int] = set()
    lines = [
        _line(value, used)
        for number, value in _fields(plane)
        if number == 3 and bytes(dict(_fields(value)).get(2, b"")).decode() in LINES
    ]
    for number, value in _fields(plane):
        if number == 3 or (number == 4 and dict(_fields(value)).get(1, 0) not in used):
            continue
        yield integer(number, value) if isinstance(value, int) else message(number, bytes(value))
    yield from lines


def _line(line: Any, used: set[int]) -> bytes:
    began = dict(_fields(line)).get(3, 0) / 1e9
    parts = []
    for number, value in _fields(line):
        if number == 4:
            event = dict(_fields(value))
            at = began + event.get(2, 0) / 1e12
            if not any(low <= at < high for low, high in WINDOWS):
                continue
            used.add(event.get(1, 0))
        parts.append(
            integer(number, value) if isinstance(value, int) else message(number, bytes(value))
        )
    return message(3, b"".join(parts))


def chrome(content: bytes) -> bytes:
    """The trace with its programs and some ops of the two devices."""
    found = json.loads(gzip.decompress(content))
    events = [one for one in found["traceEvents"] if one.get("pid") in (3, 4)]
    names = [one for one in events if one.get("ph") == "M"]
    runs = [one for one in events if one.get("ph") == "X" and one["tid"] == 2]
    ops = [one for one in events if one.get("ph") == "X" and one["tid"] == 3]
    longest: dict[str, str] = {}
    for one in sorted(ops, key=lambda op: op["dur"]):
        longest[one["args"]["hlo_category"]] = one["name"]
    first = {one["name"] for one in ops[:FIRST]}
    kept = [one for one in ops if one["name"] in first | set(longest.values())]
    for one in kept:
        one["args"].pop("source_stack", None)
    packed = json.dumps({**found, "traceEvents": [*names, *runs, *kept]}, separators=(",", ":"))
    return gzip.compress(packed.encode(), 9, mtime=0)


def main(folder: Path) -> None:
    """Writes the excerpts beside this file."""
    made: dict[str, Callable[[bytes], bytes]] = {V6E: xplane, TPU7X: chrome}
    for name, of in made.items():
        (HERE / name).write_bytes(of((folder / name).read_bytes()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
