"""The check of a Bundle's folder: every file is listed and as it was written, and nothing else is there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from systolic.core.errors import DataError, NotFoundError
from systolic.runs.bundle.folder import MANIFEST, Bundle, open_bundle
from systolic.runs.bundle.record import DIGEST, seal
from systolic.runs.bundle.tensors import SUFFIX

PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".joblib", ".dill", ".ckpt")
"""Suffixes of files that execute code when they are read."""
PROTOCOLS = (2, 3, 4, 5)
"""Second byte of a pickle."""


def checked_bundle(folder: Path) -> Bundle:
    """A Bundle whose files are all those that were written, and no others.

    Raises:
        NotFoundError: the folder is no Bundle, or lacks a file.
        DataError: a file was changed, cut or added, is a link out of the folder, or a pickle.
        RunError: it was written by a newer version.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise NotFoundError(f"{folder} {what}; give the folder of a Bundle, with its {MANIFEST}")
    if not (folder / MANIFEST).exists():
        return open_bundle(folder)  # says why it is none
    names = set(_files(folder))
    bundle = open_bundle(folder)
    _check_seal(bundle)
    listed = {*bundle.record.files, MANIFEST}
    if more := sorted(names - listed):
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        raise DataError(
            f"{folder} holds {more[0]}{others}, which its {MANIFEST} does not list; remove what does not belong to it, or copy the Bundle again"
        )
    for name in sorted(listed - {MANIFEST}):
        _refuse_pickle(folder / name)
    bundle.verify()
    return bundle


def _files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, as bundle.json has them.

    Raises:
        DataError: one is a link out of the folder.
    """
    root = folder.resolve()
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(here) / name
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise DataError(
                    f"{path} is a link out of the Bundle, to {os.readlink(path)}; copy the file itself there"
                )
        for name in (*files, *(one for one in folders if (Path(here) / one).is_symlink())):
            yield (Path(here) / name).relative_to(folder).as_posix()


def _check_seal(bundle: Bundle) -> None:
    """Compares bundle.json with its own digest, which versions that record versions write."""
    file = bundle.folder / MANIFEST
    plain = json.loads(file.read_bytes())
    if (DIGEST in plain or bundle.record.versions) and plain.get(DIGEST) != seal(plain):
        raise DataError(
            f"{file} is damaged: its contents are not those that were written; copy it again"
        )


def _refuse_pickle(file: Path) -> None:
    with file.open("rb") as opened:
        first = opened.read(2)
        opened.seek(max(file.stat().st_size - 1, 0))
        last = opened.read(1)
    looks = first[:1] == b"\x80" and first[1:] and first[1] in PROTOCOLS and last == b"."
    if file.suffix in PICKLES or (looks and file.suffix != SUFFIX):
        raise DataError(
            f"{file} is a pickle, which executes code when it is read, and no Bundle holds one; don't use this folder"
        )
