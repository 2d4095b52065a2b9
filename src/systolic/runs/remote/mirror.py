"""Runs, Bundles and data in buckets (``s3://``, ``gs://``), through local copies.

Copies are below ``cache_home()/buckets``. A copy is updated before it is read, and a run's files are uploaded while it
trains. A run's checkpoints are downloaded lazily: manifests at once, arrays when the checkpoint is read. A checkpoint
in the bucket is complete if its manifest exists: the manifest is uploaded last and deleted first.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from systolic.core.errors import NotFoundError, RunError
from systolic.core.files import write_atomically, write_json
from systolic.runs import manifest
from systolic.runs.access import Lock
from systolic.runs.remote import store
from systolic.runs.remote.store import BucketFolder, Objects, copies, in_bucket, origin
from systolic.runs.remote.upload import (
    CHECKPOINTS,
    claim,
    files_of,
    in_parallel,
    is_array,
    is_manifest,
    send_rest,
    stamp_of,
)

RUN = "job.json"
"""File that only a run has."""


def _quietly(text: str) -> None:
    """Ignores messages; the default of ``tell``."""


def pull(path: Path | str, tell: store.Tell = _quietly) -> Path:
    """Updates and returns the local copy of a path in a bucket; a local path is returned unchanged.

    The copy of a run that a process on this machine is writing is newer than the bucket and stays unchanged. Only one
    process of a machine downloads; the others wait for it.

    Args:
        path: Local path, or path in a bucket.
        tell: Called with the size of the download, and before waiting for another process.

    Raises:
        NotFoundError: nothing exists at the path.
        RunError: the bucket does not answer or refuses access, or the disk has no room.
    """
    folder = in_bucket(path)
    if folder is None:
        return Path(path)
    with store.alone(folder.copy, tell):
        return _pulled(Objects(folder), tell)


def _pulled(objects: Objects, tell: store.Tell) -> Path:
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
    """Whether a folder, local or in a bucket, contains a file."""
    remote = in_bucket(folder)
    return (folder / name).is_file() if remote is None else Objects(remote).exists(name)


def bring(
    objects: Objects, tell: store.Tell = _quietly, *, sends: bool = True, claims: bool = False
) -> None:
    """Updates a copy from the bucket, except the arrays of checkpoints; first uploads files that never were.

    Args:
        objects: Objects of the folder.
        tell: Called with the files uploaded, and with the size of the download.
        sends: False if another process writes the run now; files never uploaded are then moved to another folder.
        claims: Whether this process will write the run, which other machines then see.

    Raises:
        NotFoundError: the folder is empty or doesn't exist.
        RunError: the disk has no room, or the upload failed.
    """
    send_rest(objects, tell, sends=sends)
    names = objects.names()
    if not names:
        raise NotFoundError(f"{objects.folder.url} is empty or does not exist; check the path")
    copy = objects.folder.copy
    if claims and RUN in names:
        # Before the checkpoints are listed, so that none that another machine still sends is missed.
        claim(copy, objects)
        names = objects.names()
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
    # For a run, only small files are downloaded.
    _download(objects, wanted, None if RUN in wanted else tell)
    for step, file in manifests.items():
        if before[step] != _content(file):  # Local arrays belong to another checkpoint.
            for array in files_of(file.parent):
                if array != manifest.NAME:
                    (file.parent / array).unlink()


def complete(step: Path) -> None:
    """Downloads the arrays of a checkpoint in a copy; does nothing for other folders.

    Raises:
        DamagedError: arrays are missing in the bucket.
    """
    folder = origin(step)
    if folder is None or not step.is_relative_to(copies().resolve()):
        return
    run = origin(step.parent.parent)
    if run is None:
        return
    with store.alone(run.copy, _quietly):
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
        store.require(run.url, sum(sizes[name] for name in absent), run.copy.parent)
        below = f"{CHECKPOINTS}/{step.name}/"
        changing = [n for n in objects.names(below) if n.removeprefix(below) not in sizes]
        try:
            _download(objects, [*(below + name for name in absent), *changing])
        except NotFoundError as error:
            raise manifest.DamagedError(str(error)) from error


def again(path: Path) -> Path:
    """Returns the path; downloads it again if it is a copy that no longer exists."""
    folder = None if path.exists() else origin(path)
    return path if folder is None else pull(folder.url)


def _download(objects: Objects, names: Sequence[str], tell: store.Tell | None = None) -> None:
    """Downloads objects that are missing here or have changed; with ``tell``, checks and reports their size first."""
    copy = objects.folder.copy
    record = copy.with_name(f".{copy.name}.versions.json")
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text())
    new = [name for name in names if name not in known or not (copy / name).exists()]
    if tell is not None:
        store.check(objects.folder.url, new, objects.reaches, copy.parent, tell)

    def download(name: str) -> None:
        file = copy / name
        stored = objects.read(name, known.get(name, "") if file.exists() else "")
        if stored is None:
            raise NotFoundError(
                f"{objects.folder.url}/{name} was deleted while it was being read; try again"
            )
        content, version = stored
        if not file.exists() or not version or known.get(name) != version:
            store.require(objects.folder.url, len(content), copy.parent)
            write_atomically(file, content)
            known[name] = version

    try:
        in_parallel(download, names)
    finally:
        write_json(record, known)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _size(file: Path) -> int | None:
    stamp = stamp_of(file)
    return None if stamp is None else stamp[0]
