"""What a run's records say of its time, where no summary counted it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]
KINDS = ("step", "data_wait", "compile", "eval", "checkpoint")


def steps_of(train: Iterable[Record], resumed_from: int = 0) -> Iterator[tuple[Record, int]]:
    """Each record with the number of steps that it is the mean of.

    Records of earlier versions do not hold it: there it is the steps since the record before.

    Args:
        resumed_from: steps done before the first record's session.
    """
    before = resumed_from
    for record in train:
        yield record, record.get("num_steps", max(record["step"] - before, 0))
        before = record["step"]


def spent(
    train: Iterable[Record],
    evals: Iterable[Record],
    events: Iterable[Record],
    resumed_from: int = 0,
) -> dict[str, float]:
    """Seconds by :data:`KINDS`; the start of the run is in none of them."""
    found = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = "compile" if event["name"] == "recompile" else event["name"]
        if kind in ("compile", "checkpoint"):
            found[kind] += event["seconds"]
    found["eval"] = sum(record["seconds"] for record in evals)
    for record, steps in steps_of(train, resumed_from):
        seconds = record["step_seconds"] * steps
        found["data_wait"] += seconds * record["data_wait"]
        found["step"] += seconds * (1 - record["data_wait"])
    return found
