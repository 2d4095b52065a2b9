"""Whether a run can go on as it is asked to, as far as its own files tell: before jax is imported and anything is compiled."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from systolic.artifact import manifest
from systolic.artifact.run import Run
from systolic.core.errors import DataError, OptionError, SystolicError
from systolic.data.contents import contents_of, difference
from systolic.job import Job, Split
from systolic.job.data import Contents

DATA = "data"
"""The entry of job.json with what tells the run's data from other data, by split."""


def told(job: Job) -> dict[str, dict[str, Any]]:
    """What job.json says about a job's data.

    Raises:
        DataError: a file can't be read.
    """
    return {split: asdict(one) for split, one in contents_of(job.data).items()}


def continues(run: Run, record: Mapping[str, Any], job: Job) -> dict[str, dict[str, Any]]:
    """Refuses what can't go on; returns what job.json is to say about the data.

    Args:
        run: The run.
        record: Its job.json.
        job: What it is to go on with.

    Raises:
        OptionError: an option that a run keeps has changed, or it has more steps than the job.
        DataError: its data has changed, or can't be read.
    """
    plain = json.loads(json.dumps(job.to_json()))
    before = record["job"]
    _same_settings(run, before, plain, job)
    newest = max((int(path.name) for path in _checkpoints(run)), default=0)
    if newest > job.steps:
        raise OptionError(too_few(job.steps, run, newest))
    now = told(job)
    for split in Split:
        old, new = record.get(DATA, {}).get(split.value), now.get(split.value)
        if old is None:
            continue
        # Held-out data from elsewhere may be asked for: what was learned so far does not come from it.
        if split is not Split.train and (new is None or new["where"] != old["where"]):
            continue
        what = "nothing there" if new is None else difference(Contents(**old), Contents(**new))
        if what is not None:
            where = old["where"] if new is None else new["where"]
            raise DataError(
                f"the {split.value} data of {run.path} has changed since it was trained: {where} has {what}; restore it, or train a new run that begins with --init-from {run.path}"
            )
    return now


def too_few(steps: int, run: Run, newest: int) -> str:
    """The message where a job has fewer steps than its run."""
    return f"steps is {steps}, but {run.path} has a checkpoint of step {newest}; give --steps {newest} or more"


def agreed(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a check that all processes of a job make; what one of them refuses all refuse.

    Raises:
        SystolicError: the check of a process raised it.
    """
    from systolic.train import hosts

    if not hosts.joined():
        return check()
    mine: SystolicError | None = None
    found: dict[str, Any] = {}
    try:
        found = check()
    except SystolicError as error:
        mine = error
    for process, text in enumerate(hosts.exchange("" if mine is None else str(mine))):
        if text:
            raise mine or DataError(f"process {process}: {text}")
    return found


def _same_settings(run: Run, before: Mapping[str, Any], now: Mapping[str, Any], job: Job) -> None:
    kept = {
        "model": ("type", *sorted(job.model.lasting())),
        "data": ("type", *sorted(job.data.lasting())),
        "optimizer": ("kind",),
        "dtypes": ("parameters", "moments"),
    }
    pairs = [
        (f"{part}.{name}", before[part][name], now[part].get(name))
        for part, names in kept.items()
        for name in names
        if name in before.get(part, {})  # an earlier version's run has no dtypes
    ]
    pairs.append(("seed", before["seed"], now["seed"]))
    for name, old, new in pairs:
        if old != new:
            raise OptionError(
                f"{name.replace('_', '-')} is {new} and was {old} when {run.path} began, which a run keeps; leave that option out, or train a new run"
            )


def _checkpoints(run: Run) -> list[Any]:
    return [
        path.parent
        for path in run.checkpoints.glob(f"[0-9]*/{manifest.NAME}")
        if path.parent.name.isdigit()
    ]
