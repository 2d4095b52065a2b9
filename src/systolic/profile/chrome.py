"""XProf's ``trace.json``, the trace viewer's format of a profile, as planes.

Of a device it has the lines and events of the ``xplane.pb``, with the stats of an op in ``args`` (``long_name`` is
its HLO line), and times in microseconds with six decimals. It has neither the device's kind and peaks nor the
compiled modules, and XProf keeps a million events at most.
Format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError
from systolic.profile.files import WANTED
from systolic.profile.planes import Plane
from systolic.profile.trace import Event

MICROSECONDS = 1e6
MOST = 1_000_000
"""Events that XProf writes into one file."""


def read_chrome(path: Path) -> tuple[list[Plane], list[str]]:
    """Planes of a file, and what it lacks.

    Raises:
        DataError: it is damaged, or has no device of XProf's.
    """
    events = _events(path)
    names: dict[int, str] = {}
    lines: dict[tuple[int, int], str] = {}
    by: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    number = 0
    for one in events:
        phase = one.get("ph")
        if phase == "M":
            text = str(one.get("args", {}).get("name", ""))
            if one.get("name") == "process_name":
                names[one["pid"]] = text
            elif one.get("name") == "thread_name":
                lines[one["pid"], one.get("tid", 0)] = text
        elif phase == "X" and "ts" in one:
            number += 1
            by[one.get("pid", 0)][one.get("tid", 0)].append(_event(one))
    planes = [
        Plane(
            name=name,
            lines=[(lines.get((pid, tid), str(tid)), found) for tid, found in by[pid].items()],
        )
        for pid, name in names.items()
    ]
    if not any(plane.name.startswith(("/device:", "/host:")) for plane in planes):
        whose = ", ".join(sorted(filter(None, names.values()))[:3]) or "nobody's processes"
        raise DataError(
            f"{path} is a trace of {whose}, not of XProf: no plane of it is a device's or a host's; {WANTED}"
        )
    cut = [f"events that XProf left out of {path.name}: it keeps {MOST:,}"]
    return planes, cut if number >= MOST else []


def _events(path: Path) -> list[Mapping[str, Any]]:
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        found = json.loads(content)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [one for one in events if isinstance(one, dict)]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no trace of XProf, or damaged ({type(error).__name__}: {error}); copy it again, or {WANTED}"
        ) from error


def _event(one: Mapping[str, Any]) -> Event:
    start = float(one["ts"]) / MICROSECONDS
    return Event(
        name=str(one.get("name", "")),
        start=start,
        end=start + float(one.get("dur", 0.0)) / MICROSECONDS,
        stats=one.get("args") or {},
    )
