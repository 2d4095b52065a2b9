"""Time of a run by kind, from its records, for runs without a summary."""

from collections.abc import Iterable, Iterator

from systolic.runs.metrics import EvalRecord, EventRecord, TrainRecord

KINDS = ("step", "data_wait", "compile", "eval", "checkpoint")


def steps_of(
    train: Iterable[TrainRecord], resumed_from: int = 0
) -> Iterator[tuple[TrainRecord, int]]:
    """Pairs each record with the number of steps it averages.

    Records of earlier versions lack the number: it is then the steps since the previous record.

    Args:
        resumed_from: steps done before the first record's session.
    """
    before = resumed_from
    for record in train:
        steps = max(record.step - before, 0) if record.num_steps is None else record.num_steps
        yield record, steps
        before = record.step


def spent(
    train: Iterable[TrainRecord],
    evals: Iterable[EvalRecord],
    events: Iterable[EventRecord],
    resumed_from: int = 0,
) -> dict[str, float]:
    """Seconds by :data:`KINDS`; the start of the run is in none of them."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for event in events:
        kind = "compile" if event.name == "recompile" else event.name
        if kind in ("compile", "checkpoint"):
            by_kind[kind] += event.seconds
    by_kind["eval"] = sum(record.seconds or 0.0 for record in evals)
    for record, steps in steps_of(train, resumed_from):
        seconds, waited = (record.step_seconds or 0.0) * steps, record.data_wait or 0.0
        by_kind["data_wait"] += seconds * waited
        by_kind["step"] += seconds * (1 - waited)
    return by_kind
