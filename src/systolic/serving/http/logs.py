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
        """One event."""
        now = datetime.now(UTC)
        known = {name: value for name, value in fields.items() if value is not None}
        with self._lock:
            text = self.render(event, known, now)
            self.file.write(text)
            self.file.flush()

    @property
    def file(self) -> TextIO:
        """Where to."""
        return sys.stderr if self._file is None else self._file

    def render(self, event: str, fields: dict[str, Any], now: datetime) -> str:
        """The text of an event."""
        record = {"time": now.isoformat(timespec="milliseconds"), "event": event, **fields}
        return msgspec.json.encode(record).decode() + "\n"
