"""What a run's records say of its time, where no summary counted it."""

from collections.abc import Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]
KINDS = ("step", "data_wait", "compile", "eval", "checkpoint")


def spent(
    train: Iterable[Record], evals: Iterable[Record], events: Iterable[Record]
) -> dict[str, float]:
    """Seconds by :data:`KINDS`; the start of the run is in none of them."""
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = "compile" if event["name"] == "recompile" else event["name"]
        if kind in ("compile", "checkpoint"):
            found[kind] += event["seconds"]
    found["eval"] = sum(record["seconds"] for record in evals)
    before = 0
    for record in train:
        seconds = record["step_seconds"] * (record["step"] - before)
        before = record["step"]
        found["data_wait"] += seconds * record["data_wait"]
        found["step"] += seconds * (1 - record["data_wait"])
    return found
