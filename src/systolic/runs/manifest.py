"""The manifest of a checkpoint: every leaf and every file with size and CRC-32, one digest over all; and the swap of a checkpoint for a new one.

It is written inside the checkpoint before the rename that commits it, so a committed checkpoint
always has one, and what the disk gives back later can be compared with what was written.

A new checkpoint of a step is written beside the old one and replaces it when complete.
Between the two renames of a swap the old one waits under another name; :func:`recover` ends what a
kill cut short.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.files import digest, write_json

NAME = "manifest.json"
PART = "part.json"
"""In place of it where a host has only its part of a checkpoint; see :mod:`systolic.runs.remote.upload`."""
ALONE, IN_PARTS = (NAME,), (PART, NAME)
"""Names of the manifest, where one folder has all and where hosts have parts."""
FORMAT = 1
_CHUNK_BYTES = 1 << 22
_READERS = 8
_NEW, _OLD, _DAMAGED = "replacing", "replaced", "damaged"
FOLDERS = (_NEW, _OLD)
"""Folders of steps that are being replaced."""


class DamagedError(Exception):
    """A checkpoint that differs from what was written; the message names the place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One array of a state."""

    dtype: str
    """The dtype's name; ``uint32`` for the data of a PRNG key."""
    shape: tuple[int, ...]
    """The global shape; for a PRNG key without the dimension of its data."""
    key: str | None = None
    """The PRNG implementation of a typed key, e.g. ``threefry2x32``."""

    def __str__(self) -> str:
        kind = f"key<{self.key}>" if self.key else self.dtype
        return f"{kind}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a checkpoint."""

    step: int
    leaves: Mapping[tuple[str, ...], Leaf]
    """Leaves by path, e.g. ``("params", "layers", "0", "kernel")``."""
    metrics: Mapping[str, float]
    files: Mapping[str, tuple[int, int]]
    """Size in bytes and CRC-32 by path relative to the checkpoint, with ``/``."""

    @property
    def digest(self) -> str:
        """Digest of the whole manifest."""
        return digest(_plain(self))

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(size for size, _ in self.files.values())


def is_at(folder: Path, names: Sequence[str] = ALONE) -> bool:
    """Whether a folder has a manifest: is a checkpoint, or a part of one."""
    return any((folder / name).exists() for name in names)


def crc32_of(content: bytes) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file's content."""
    return len(content), zlib.crc32(content)


def crc32(path: Path, *, sync: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file; ``sync`` flushes the file to disk."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
        if sync:
            os.fsync(file.fileno())
    return size, crc


def seal(
    folder: Path,
    *,
    step: int,
    leaves: Mapping[tuple[str, ...], Leaf],
    metrics: Mapping[str, float],
    ignore: Iterable[str],
    name: str = NAME,
) -> Manifest:
    """Reads back every file below ``folder``, flushes it to disk and writes the manifest.

    Args:
        folder: a checkpoint that is written but not yet committed.
        step: its step.
        leaves: what it holds.
        metrics: finite numbers by name.
        ignore: names of files directly in ``folder`` that still change.
        name: of the manifest: ``PART`` where other hosts have other files of the checkpoint.

    Raises:
        OSError: a file does not read.
        RunError: the manifest does not write.
    """
    ignored = {*ignore, name}
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    names = [name for name in names if name not in ignored]
    with ThreadPoolExecutor(_READERS) as pool:
        sums = list(pool.map(lambda name: crc32(folder / name, sync=True), names))
    manifest = Manifest(
        step=step,
        leaves=dict(leaves),
        metrics=dict(metrics),
        files=dict(zip(names, sums, strict=True)),
    )
    write(folder, manifest, name)
    return manifest


def write(folder: Path, manifest: Manifest, name: str = NAME) -> None:
    """Writes or replaces the manifest of a checkpoint, atomically.

    Raises:
        RunError: it does not write.
    """
    plain = _plain(manifest)
    write_json(folder / name, plain | {"digest": digest(plain)})


def read(folder: Path, names: Sequence[str] = ALONE) -> Manifest:
    """The manifest of a checkpoint: the first that is there of ``names``.

    Raises:
        DamagedError: it is absent or damaged.
    """
    try:
        plain = json.loads(_content(folder, names))
        claimed = plain.pop("digest")
        if claimed != digest(plain) or plain["format"] != FORMAT:
            raise ValueError
        return Manifest(
            step=plain["step"],
            leaves={
                tuple(path): Leaf(dtype=dtype, shape=tuple(shape), key=key)
                for path, dtype, shape, key in plain["leaves"]
            },
            metrics=plain["metrics"],
            files={name: (size, crc) for name, (size, crc) in plain["files"].items()},
        )
    except OSError as error:
        raise DamagedError(f"{NAME} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{NAME} is damaged") from error


def _content(folder: Path, names: Sequence[str]) -> bytes:
    for name in names[:-1]:
        with contextlib.suppress(FileNotFoundError):
            return (folder / name).read_bytes()
    return (folder / names[-1]).read_bytes()


def verify(
    folder: Path, manifest: Manifest, items: Iterable[str], part: tuple[int, int] = (0, 1)
) -> None:
    """Compares the files of ``items`` (folders in the checkpoint) with the manifest, byte by byte.

    Args:
        folder: The checkpoint.
        manifest: What it should hold.
        items: Folders in it.
        part: (i, n): of all files the sizes are compared, of the i-th of n equal shares the bytes.

    Raises:
        DamagedError: a file is missing, has another size or other content.
    """
    wanted = set(items)
    files = {name: file for name, file in manifest.files.items() if name.split("/")[0] in wanted}
    for name, (size, _) in files.items():
        try:
            stored = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name} is missing") from error
        if stored != size:
            raise DamagedError(f"{name} has {stored} bytes, {size} were written")

    def check(name: str) -> str | None:
        try:
            return None if crc32(folder / name) == files[name] else f"{name} has other content"
        except OSError as error:
            return f"{name} does not read ({error.strerror})"

    # The largest first, one to each in turn, so that shares are about equal in bytes.
    index, count = part
    mine = sorted(files, key=lambda name: (-files[name][0], name))[index::count]
    with ThreadPoolExecutor(_READERS) as pool:
        for reason in pool.map(check, mine):
            if reason is not None:
                raise DamagedError(reason)


def _plain(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": manifest.step,
        "metrics": dict(manifest.metrics),
        "leaves": [
            [list(path), leaf.dtype, list(leaf.shape), leaf.key]
            for path, leaf in manifest.leaves.items()
        ],
        "files": {name: list(file) for name, file in manifest.files.items()},
    }


def beside(folder: Path) -> Path:
    """Folder where new checkpoints of ``folder`` are written."""
    return folder / _NEW


def read_replaced(folder: Path, step: int) -> Manifest:
    """The manifest of a replaced step, before or after another process swaps the new one in.

    Raises:
        DamagedError: it is absent or damaged.
    """
    try:
        return read(beside(folder) / str(step))
    except DamagedError:
        return read(folder / str(step))


def swap(folder: Path, step: int) -> None:
    """Replaces the old checkpoint of a step by the new one.

    Raises:
        OSError: a rename failed.
    """
    old = folder / _OLD / str(step)
    old.parent.mkdir(exist_ok=True)
    (folder / str(step)).rename(old)
    (beside(folder) / str(step)).rename(folder / str(step))
    clear(folder)


def clear(folder: Path) -> None:
    """Removes leftovers of finished swaps."""
    shutil.rmtree(folder / _OLD, ignore_errors=True)
    shutil.rmtree(beside(folder), ignore_errors=True)


def set_aside(folder: Path, step: int) -> None:
    """Sets a damaged checkpoint aside, replacing an earlier one of its step."""
    aside = folder / _DAMAGED / str(step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    (folder / str(step)).rename(aside)


def recover(folder: Path) -> None:
    """Completes swaps that a kill interrupted: with the new checkpoint if complete, else with the old one."""
    if (folder / _OLD).is_dir():
        for old in (folder / _OLD).iterdir():
            place, new = folder / old.name, beside(folder) / old.name
            if not place.exists():
                whole = (new / NAME).exists()
                # Another process of the job may have done the same: no rename goes over what is there.
                with contextlib.suppress(OSError):
                    (new if whole else old).rename(place)
    clear(folder)
