"""Time of a run by kind, from its records, for runs without a summary."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]
KINDS = ("step", "data_wait", "compile", "eval", "checkpoint")


def steps_of(train: Iterable[Record], resumed_from: int = 0) -> Iterator[tuple[Record, int]]:
    """Pairs each record with the number of steps it averages.

    Records of earlier versions lack the number: it is then the steps since the previous record.

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
    by_kind = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = "compile" if event["name"] == "recompile" else event["name"]
        if kind in ("compile", "checkpoint"):
            by_kind[kind] += event["seconds"]
    by_kind["eval"] = sum(record["seconds"] for record in evals)
    for record, steps in steps_of(train, resumed_from):
        seconds = record["step_seconds"] * steps
        by_kind["data_wait"] += seconds * record["data_wait"]
        by_kind["step"] += seconds * (1 - record["data_wait"])
    return by_kind
