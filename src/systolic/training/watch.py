"""Watchers of training: they get the same records that are written to disk."""

from typing import Any, Protocol


class Watcher(Protocol):
    """Watcher of the records of ``metrics.jsonl``; must not raise and must return at once."""

    def see(self, record: dict[str, Any]) -> None:
        """Takes a record; its ``kind`` is start, train, eval, event, sample or end."""
        ...

    def close(self) -> None:
        """Called when the run is over, for any reason."""
        ...
