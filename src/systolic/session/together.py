"""A run that the processes of a job make or open together: the first one writes it, and each has its files."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

from systolic.artifact.objects import in_bucket
from systolic.artifact.parts import Part
from systolic.artifact.run import Run
from systolic.core.errors import RunError, SystolicError


def open_together(path: Path | None, begin: Callable[[Part | None], Run], verb: str) -> Run:
    """A run, open for writing in the first process of the job and for reading in the others.

    A run in a bucket has a copy wherever processes have a cache of their own, and each copy one process that sends its part.

    Args:
        path: Of the run, as the user gave it.
        begin: Makes or opens the run in the first process.
        verb: What ``begin`` does, for messages.

    Raises:
        RunError: another process could not.
    """
    from systolic.training import hosts

    if not hosts.joined():
        return begin(None)
    part = share_of(path)
    run: Run | None = None
    if hosts.is_first():
        try:
            run = begin(part)
        except Exception:
            hosts.share("")
            raise
    shared = hosts.share("" if run is None else str(run.path))
    if not shared:
        raise RunError(f"the first process could not {verb} the run; see its message")
    if part is None:
        return run or Run.open(shared if path is None or in_bucket(path) else path)
    failed = ""
    if run is None and part.leads:
        try:
            run = Run.open(str(path), part=part)
        except SystolicError as error:
            failed = str(error)
    for index, text in enumerate(hosts.exchange(failed)):
        if text:
            if run is not None:
                run.close(waits=False)
            raise RunError(f"process {index} could not open its copy of the run: {text}")
    return run or Run.open(_copy(path), part=part)


def share_of(path: Path | None) -> Part | None:
    """What this process holds of a run in a bucket that has several copies; None where all see the same folder."""
    from systolic.training import hosts

    if not hosts.several() or path is None or in_bucket(path) is None:
        return None
    leaders = seen_by(_copy(path).parent, hosts.exchange)
    session = hosts.share(uuid.uuid4().hex)
    if not any(leaders):
        return None
    return Part(index=hosts.peers().index, leaders=tuple(leaders), session=session)


def seen_by(folder: Path, exchange: Callable[[str], list[str]]) -> list[int]:
    """By process: the first one that sees the same folder."""
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
