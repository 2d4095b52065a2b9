"""A content-addressed store on disk: one folder an entry, complete or absent, never changed."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from systolic.core.errors import RunError

_SCRATCH = ".new-"
SUMS = "sha256.json"
"""Digest of each file of an entry, written when the entry is put."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, quota or file limit."""
ROOM_BYTES = 1 << 20
"""A disk with less than this free counts as full."""


def cache_home() -> Path:
    """``$SYSTOLIC_CACHE``, or ``systolic`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    folder = os.environ.get("SYSTOLIC_CACHE")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "systolic"


class Store:
    """Entries of one kind under a root: ``root/kind/ab/abcdef…/``."""

    def __init__(self, kind: str, root: Path | None = None) -> None:
        self.root = (root or cache_home()) / kind

    def path(self, digest: str) -> Path:
        """Folder of an entry, which need not exist."""
        return self.root / digest[:2] / digest

    def get(self, digest: str) -> Path | None:
        """The entry's folder; ``None`` if it is absent or its files have changed."""
        folder = self.path(digest)
        return folder if _whole(folder) else None

    @contextmanager
    def scratch(self) -> Generator[Path]:
        """A folder to fill for :meth:`put`; gone afterwards unless it was put.

        Leftovers of a killed process are removed at the next call.

        Raises:
            RunError: the store's disk is not writable.
        """
        folder = self.root / f"{_SCRATCH}{secrets.token_hex(8)}"
        owner = self._locks / folder.name
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # Locked before the folder is there: a folder whose lock is free has lost its owner.
            held = owner.open("w")
            fcntl.flock(held, fcntl.LOCK_EX)
            folder.mkdir()
        except OSError as error:
            raise unwritable(self.root, error) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
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
        """Moves a filled folder into the store, replacing a damaged entry; an intact one stays. Returns its path.

        Raises:
            RunError: the store's disk is full or not writable.
        """
        target = self.path(digest)
        try:
            sums = {path.name: _sum(path) for path in sorted(folder.iterdir())}
            (folder / SUMS).write_text(json.dumps(sums))
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir() and not _whole(target):
                shutil.rmtree(target)
            os.rename(folder, target)
        except OSError as error:
            if not _whole(target):
                raise unwritable(self.root, error) from error
        return target

    @contextmanager
    def lock(self, digest: str, waiting: Callable[[], None] = lambda: None) -> Generator[None]:
        """Admits one process at a time for a digest; calls ``waiting`` before it waits. A dead process holds no lock.

        Raises:
            RunError: the store's disk is not writable.
        """
        path = self._locks / digest
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            file = _locked(path, waiting)
        except OSError as error:
            raise unwritable(self.root, error) from error
        try:
            yield
        finally:
            # Unlinked while held: a waiting process sees that it is gone and makes a new one.
            path.unlink(missing_ok=True)
            file.close()

    def check_room(self) -> None:
        """Checks that the disk has room for another entry.

        Raises:
            RunError: the disk is full.
        """
        folder = next(path for path in (self.root, *self.root.absolute().parents) if path.is_dir())
        if shutil.disk_usage(folder).free < ROOM_BYTES:
            raise unwritable(self.root, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def unwritable(root: Path, error: OSError) -> RunError:
    """Error of one line for a store that cannot be written."""
    return RunError(
        f"{root} could not be written ({error.strerror}); free some space or set SYSTOLIC_CACHE to another folder"
    )


def _locked(path: Path, waiting: Callable[[], None]) -> IO[str]:
    """Opens and locks the file at ``path``; another owner removes it when done."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _whole(entry: Path) -> bool:
    try:
        sums = json.loads((entry / SUMS).read_text())
        return all(_sum(entry / name) == known for name, known in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The JSON in a file of the store.

    Raises:
        RunError: the file is absent or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); run again to compile it anew") from error
