"""A content-addressed store on disk: a folder an entry, whole or absent, never changed."""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from systolic.core.errors import RunError

_SCRATCH = ".new-"


def cache_home() -> Path:
    """``$SYSTOLIC_CACHE``, or ``systolic`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    given = os.environ.get("SYSTOLIC_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "systolic"


class Store:
    """Entries of one kind under a root: ``root/kind/ab/abcdef…/``."""

    def __init__(self, kind: str, root: Path | None = None) -> None:
        self.root = (root or cache_home()) / kind

    def path(self, digest: str) -> Path:
        """Where the entry of that digest is, or would be."""
        return self.root / digest[:2] / digest

    def get(self, digest: str) -> Path | None:
        """The entry's folder; None when there is none."""
        found = self.path(digest)
        return found if found.is_dir() else None

    @contextmanager
    def scratch(self) -> Generator[Path]:
        """A folder to fill for :meth:`put`; gone afterwards unless it was put.

        What a process leaves behind that was killed is removed by the next that asks for a folder.

        Raises:
            RunError: the store's disk can't be written.
        """
        made = self.root / f"{_SCRATCH}{secrets.token_hex(8)}"
        owner = self._locks / made.name
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # Locked before the folder is there: a folder whose lock is free has lost its owner.
            held = owner.open("w")
            fcntl.flock(held, fcntl.LOCK_EX)
            made.mkdir()
        except OSError as error:
            raise RunError(
                f"{self.root} could not be written ({error.strerror}); set SYSTOLIC_CACHE to a folder that can"
            ) from error
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)
            owner.unlink(missing_ok=True)
            held.close()

    def _sweep(self) -> None:
        for owner in self._locks.glob(f"{_SCRATCH}*"):
            with suppress(OSError), owner.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.root / owner.name, ignore_errors=True)
                owner.unlink(missing_ok=True)

    @property
    def _locks(self) -> Path:
        return self.root / ".locks"

    def put(self, digest: str, folder: Path) -> Path:
        """Moves a filled folder in; the entry that is there already stays. Returns its place."""
        target = self.path(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(folder, target)
        except OSError as error:
            if not target.is_dir():
                raise RunError(
                    f"{target} could not be written ({error.strerror}); free some space or set SYSTOLIC_CACHE"
                ) from error
        return target

    @contextmanager
    def lock(self, digest: str, waiting: Callable[[], None] = lambda: None) -> Generator[None]:
        """One process at a time for a digest; others wait, told so. A dead process holds nothing."""
        self._locks.mkdir(parents=True, exist_ok=True)
        with open(self._locks / digest, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def read_json(path: Path) -> Any:
    """The JSON in a file of the store.

    Raises:
        RunError: the file is absent or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); delete its folder and run again") from error
