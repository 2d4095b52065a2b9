"""The log: one JSON object a line on stderr."""

import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec


class EventLog:
    """Writes events with their time; fields that are None are left out.

    Args:
        file: Where to; standard error by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()

    def warn(self, line: str) -> None:
        """A warning."""
        self.write("warning", message=line)

    def write(self, event: str, **fields: Any) -> None:
        """One line."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        known = {name: value for name, value in fields.items() if value is not None}
        line = msgspec.json.encode({"time": now, "event": event, **known}).decode()
        with self._lock:
            file = sys.stderr if self._file is None else self._file
            file.write(f"{line}\n")
            file.flush()
