"""Watchers of a training. One record, many views: the same dict goes to disk and to watchers."""

from typing import Any, Protocol


class Watcher(Protocol):
    """Sees each record as it is written to ``metrics.jsonl``; must not raise and must return at once."""

    def see(self, record: dict[str, Any]) -> None:
        """One record; ``kind`` says which (start, train, eval, event, sample, end)."""
        ...

    def close(self) -> None:
        """The run is over, whatever its end."""
        ...
