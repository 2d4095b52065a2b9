"""Replaced checkpoints, and damaged ones that are set aside.

A new checkpoint of a step is written beside the old one and replaces it when complete.
Between the two renames of a swap the old one waits under another name; :func:`recover` ends what a
kill cut short.
"""

import contextlib
import shutil
from pathlib import Path

from systolic.runs import manifest as manifests

_NEW, _OLD, _DAMAGED = "replacing", "replaced", "damaged"
FOLDERS = (_NEW, _OLD)
"""Folders of steps that are being replaced."""


def beside(folder: Path) -> Path:
    """Folder where new checkpoints of ``folder`` are written."""
    return folder / _NEW


def find(folder: Path, step: int) -> manifests.Manifest:
    """The manifest of a replaced step, before or after another process swaps the new one in.

    Raises:
        DamagedError: it is absent or damaged.
    """
    try:
        return manifests.read(beside(folder) / str(step))
    except manifests.DamagedError:
        return manifests.read(folder / str(step))


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
                whole = (new / manifests.NAME).exists()
                # Another process of the job may have done the same: no rename goes over what is there.
                with contextlib.suppress(OSError):
                    (new if whole else old).rename(place)
    clear(folder)
