"""Runs, Bundles and data in buckets (``s3://``, ``gs://``), by way of copies here.

A copy is below ``cache_home()/buckets`` and follows the bucket: what is read is brought up to date first, and what a
run writes is sent while it trains. Of a run's checkpoints only the manifests come at once; arrays come when one is
read. A checkpoint is complete in the bucket when its manifest is there, which is sent last and goes first.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from systolic.artifact import manifest, room
from systolic.artifact.access import Lock
from systolic.artifact.objects import BucketFolder, Objects, copies, in_bucket, origin
from systolic.artifact.sending import (
    CHECKPOINTS,
    files_of,
    in_parallel,
    is_array,
    is_manifest,
    send_rest,
    stamp_of,
)
from systolic.core.errors import NotFoundError, RunError
from systolic.core.files import write_atomically, write_json

RUN = "job.json"
"""File that only a run has."""


def _quietly(text: str) -> None:
    """Says nothing; the default of ``tell``."""


def pull(path: Path | str, tell: room.Tell = _quietly) -> Path:
    """The copy of what a path in a bucket names, brought up to date; a path here is returned as it is.

    A run that a process here is writing is newer in its copy, which then stays as it is. Of several processes
    of a machine one copies and the others wait.

    Args:
        path: The path.
        tell: Called with the size of what is copied, and where another process is waited for.

    Raises:
        NotFoundError: there is nothing.
        RunError: the bucket does not answer, or refuses, or the disk has no room.
    """
    folder = in_bucket(path)
    if folder is None:
        return Path(path)
    with room.alone(folder.copy, tell):
        return _pulled(Objects(folder), tell)


def _pulled(objects: Objects, tell: room.Tell) -> Path:
    copy = objects.folder.copy
    if objects.exists(""):
        _download(objects, [""], tell)
        return copy
    copy.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(copy)
    except RunError:
        return copy
    try:
        bring(objects, tell)
    finally:
        lock.release()
    return copy


def has(folder: Path, name: str) -> bool:
    """Whether a folder, in a bucket or here, holds a file."""
    remote = in_bucket(folder)
    if remote is None:
        return (folder / name).is_file()
    return Objects(remote).exists(name)


def bring(objects: Objects, tell: room.Tell = _quietly, *, sends: bool = True) -> None:
    """Makes a copy what the bucket holds, but for the arrays of checkpoints; what was never sent goes there first.

    Args:
        objects: The folder's.
        tell: Called with what is sent, and with the size of what is copied.
        sends: False where another process writes the run now, so that what was never sent is set aside.

    Raises:
        NotFoundError: there is nothing.
        RunError: the disk has no room, or what was never sent cannot be sent.
    """
    send_rest(objects, tell, sends=sends)
    names = objects.names()
    if not names:
        raise NotFoundError(f"{objects.folder.url} holds nothing; check the path")
    copy = objects.folder.copy
    wanted = [name for name in names if not is_array(name)]
    steps = {name.split("/")[1] for name in wanted if is_manifest(name)}
    for step in (copy / CHECKPOINTS).glob("[0-9]*"):
        if step.name not in steps:
            shutil.rmtree(step)
    for file in files_of(copy):
        if file not in names:
            (copy / file).unlink()
    manifests = {step: copy / CHECKPOINTS / step / manifest.NAME for step in steps}
    before = {step: _content(file) for step, file in manifests.items()}
    # Of a run only small files come.
    _download(objects, wanted, None if RUN in wanted else tell)
    for step, file in manifests.items():
        if before[step] != _content(file):  # Arrays that are here are of another checkpoint.
            for array in files_of(file.parent):
                if array != manifest.NAME:
                    (file.parent / array).unlink()


def complete(step: Path) -> None:
    """Brings the arrays of a checkpoint whose run is a copy; nothing for other folders.

    Raises:
        DamagedError: the bucket lacks some.
    """
    folder = origin(step)
    if folder is None or not step.is_relative_to(copies().resolve()):
        return
    run = origin(step.parent.parent)
    if run is None:
        return
    with room.alone(run.copy, _quietly):
        _complete(step, run)


def _complete(step: Path, run: BucketFolder) -> None:
    try:
        written = manifest.read(step).files
    except manifest.DamagedError:
        return
    sizes = {name: size for name, (size, _) in written.items()}
    absent = [name for name, size in sizes.items() if _size(step / name) != size]
    if absent:
        objects = Objects(run)
        room.require(run.url, sum(sizes[name] for name in absent), run.copy.parent)
        below = f"{CHECKPOINTS}/{step.name}/"
        changing = [n for n in objects.names(below) if n.removeprefix(below) not in sizes]
        try:
            _download(objects, [*(below + name for name in absent), *changing])
        except NotFoundError as error:
            raise manifest.DamagedError(str(error)) from error


def again(path: Path) -> Path:
    """The path, fetched once more where it was a copy that is gone."""
    folder = None if path.exists() else origin(path)
    return path if folder is None else pull(folder.url)


def _download(objects: Objects, names: Sequence[str], tell: room.Tell | None = None) -> None:
    """Copies objects that are not here, or changed; with ``tell`` their size is asked for and said before."""
    copy = objects.folder.copy
    record = copy.with_name(f".{copy.name}.versions.json")
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text())
    new = [name for name in names if name not in known or not (copy / name).exists()]
    if tell is not None:
        room.check(objects.folder.url, new, objects.reaches, copy.parent, tell)

    def one(name: str) -> None:
        file = copy / name
        found = objects.read(name, known.get(name, "") if file.exists() else "")
        if found is None:
            raise NotFoundError(f"{objects.folder.url}/{name} went while it was read; try again")
        content, version = found
        if not file.exists() or not version or known.get(name) != version:
            room.require(objects.folder.url, len(content), copy.parent)
            write_atomically(file, content)
            known[name] = version

    try:
        in_parallel(one, names)
    finally:
        write_json(record, known)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _size(file: Path) -> int | None:
    stamp = stamp_of(file)
    return None if stamp is None else stamp[0]
