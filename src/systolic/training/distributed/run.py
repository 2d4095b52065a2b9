"""Runs of multi-process jobs: process 0 creates or opens the run for writing, the others read it."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

from systolic.core.errors import RunError, SystolicError
from systolic.runs.remote.sharded_upload import Part
from systolic.runs.remote.store import in_bucket
from systolic.runs.run import Run


def open_together(path: Path | None, begin: Callable[[Part | None], Run], verb: str) -> Run:
    """Opens a run for writing in process 0 and for reading in the others. Collective.

    A run in a bucket has one local copy per cache folder; one process per copy uploads its part.

    Args:
        path: Path of the run, as given by the user.
        begin: Creates or opens the run in process 0.
        verb: Verb for messages about ``begin``.

    Raises:
        RunError: another process failed to open it.
    """
    from systolic.training import distributed

    if not distributed.joined():
        return begin(None)
    part = share_of(path)
    run: Run | None = None
    if distributed.is_first():
        try:
            run = begin(part)
        except Exception:
            distributed.share("")
            raise
    shared = distributed.share("" if run is None else str(run.path))
    if not shared:
        raise RunError(f"process 0 could not {verb} the run; see its error message")
    if part is None:
        return run or Run.open(shared if path is None or in_bucket(path) else path)
    failed = ""
    if run is None and part.leads:
        try:
            run = Run.open(str(path), part=part)
        except SystolicError as error:
            failed = str(error)
    for index, text in enumerate(distributed.exchange(failed)):
        if text:
            if run is not None:
                run.close(waits=False)
            raise RunError(f"process {index} could not open its copy of the run: {text}")
    return run or Run.open(_copy(path), part=part)


def share_of(path: Path | None) -> Part | None:
    """Part that this process holds of a run in a bucket; None if all processes share one local copy."""
    from systolic.training import distributed

    if not distributed.several() or path is None or in_bucket(path) is None:
        return None
    leaders = seen_by(_copy(path).parent, distributed.exchange)
    session = distributed.share(uuid.uuid4().hex)
    if not any(leaders):
        return None
    return Part(index=distributed.peers().index, leaders=tuple(leaders), session=session)


def seen_by(folder: Path, exchange: Callable[[str], list[str]]) -> list[int]:
    """For each process, the first process that shares its folder. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f".seen-{uuid.uuid4().hex}"
    mine.touch()
    try:
        seen = [(folder / name).exists() for name in exchange(mine.name)]
        return [int(text) for text in exchange(json.dumps(seen.index(True)))]
    finally:
        mine.unlink()


def _copy(path: Path | None) -> Path:
    folder = None if path is None else in_bucket(path)
    assert folder is not None
    return folder.copy
