"""Files that are complete or absent: written under another name, flushed, then renamed; and a content-addressed store of folders."""

import difflib
import errno
import fcntl
import grp
import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.core.units import si

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota or a size limit."""
_KNOWN = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT)
POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of what Git has in place of a large file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
ROOT = 0
_SCRATCH = ".new-"
SUMS = "sha256.json"
"""Digest of each file of an entry, written when the entry is put."""
ROOM_BYTES = 1 << 20
"""A disk with less than this free counts as full."""


def lines_of(text: str) -> list[str]:
    r"""Lines of a user's text that have words, cut at ``\n`` and ``\r\n`` alone: ``str.splitlines`` cuts at what is within a line, too (U+2028, U+0085, form feeds)."""
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


def refuse_pointer(file: Path) -> None:
    """Refuses what Git has in place of a large file; a file that can't be read is none.

    Raises:
        DataError: it is a pointer of Git LFS.
    """
    try:
        with file.open("rb") as opened:
            first = opened.read(len(POINTER))
    except OSError:
        return
    if first == POINTER:
        raise DataError(
            f"{file} is a pointer of Git LFS and not the file itself; run git lfs pull in {file.parent}, or download the folder with hf download"
        )


def nearest_file(path: Path) -> str:
    """``"; did you mean data/train.jsonl?"`` for a path that is not there: the file or folder beside it that has the nearest name, else ``""``; of a folder, that it is one."""
    if path.is_dir():
        return f"; it is a folder, give its files ({path}/*)"
    try:
        names = {sibling.name.lower(): sibling for sibling in path.parent.iterdir()}
    except OSError:
        return ""
    typed, digits = path.name.lower(), re.compile(r"\d+")

    def may_be(name: str) -> bool:
        # A file of another number, as of a shard, is another file; and a suffix alone says nothing.
        other = name == typed or digits.sub("#", name) != digits.sub("#", typed)
        stems = Path(name).stem, [Path(typed).stem]
        return other and name[0] != "." and bool(difflib.get_close_matches(*stems))

    close = difflib.get_close_matches(typed, filter(may_be, names), n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _mode() -> int:
    """Mode that open() gives a new file; a temporary file is private to its owner."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


_MODE = _mode()


def as_paths(record: Any, *names: str) -> None:
    """Turns these fields of a frozen dataclass into paths where they are text; for ``__post_init__``."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, str):
            object.__setattr__(record, name, Path(value))


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replaces ``path`` by ``data``; a crash at any moment leaves the old or the new file.

    Raises:
        RunError: the disk is full or the folder is not writable; ``path`` is untouched.
    """
    payload = data.encode() if isinstance(data, str) else data
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, _MODE)
        os.replace(scratch, path)
    except OSError as error:
        if scratch is not None:
            Path(scratch).unlink(missing_ok=True)
        raise RunError(
            f"{path} could not be written ({error.strerror}); {cure(path, error)}"
        ) from error


def cure(path: Path, error: OSError) -> str:
    """Advice after ``path`` could not be written."""
    if error.errno in FULL:
        return "free some space or choose another folder"
    return f"no file can be made there, in {_nearest(path)}: choose another folder"


def is_full(error: BaseException) -> bool:
    """Whether a full disk, a quota or a size limit is the cause."""
    return _number(error) in FULL


def fault_of(error: BaseException) -> str:
    """Reason of a failed write in one line: the system's message, or the first line of the error."""
    number = _number(error)
    if number is not None:
        return os.strerror(number)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _number(error: BaseException) -> int | None:
    """Error number of the root cause; native code passes it on as text only."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        message = str(cause)
        for number in _KNOWN:
            if os.strerror(number) in message:
                return number
        cause = cause.__cause__ or cause.__context__
    return None


def check_writable(path: Path) -> None:
    """Checks that a file can be written, before hours of work go into its content.

    Raises:
        OptionError: it is a directory, or its parent is a file.
        RunError: the folder is not writable.
    """
    if path.is_dir():
        raise OptionError(f"{path} is a directory; name a file in it, such as {path / 'result'}")
    check_folder_writable(path)


def check_folder_writable(path: Path) -> None:
    """Checks that a file or a folder can be made at a path.

    Raises:
        OptionError: its parent is a file.
        RunError: the folder is not writable.
    """
    folder = _nearest(path)
    if not folder.is_dir():
        raise OptionError(f"{folder} is a file, so {path} cannot be in it; choose another folder")
    try:
        # Permissions alone allow root everything, on read-only and virtual file systems too.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # What /proc says of a new file is that there is none.
        why = (
            "a file can't be made in it" if isinstance(error, FileNotFoundError) else error.strerror
        )
        raise RunError(
            f"{folder} is not writable ({why}); choose another folder for {path.name}"
        ) from error


def check_room(
    path: Path, size: int, cure: str = "free some space or choose another folder"
) -> None:
    """Checks that the disk of a path has room for so many bytes, before they are made; the cure is for the message.

    Raises:
        RunError: it has less.
    """
    folder = _nearest(path)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # a file system that does not say
    if size > free:
        raise RunError(
            f"{path} takes {si(size, 'B')}, and the disk of {folder} has {si(free, 'B')} free; {cure}"
        )


def _nearest(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_given(path: Path, again: str) -> Any:
    """The JSON value in a file that the user named.

    Args:
        path: The file.
        again: How to make such a file, for the message.

    Raises:
        NotFoundError: it cannot be read.
        OptionError: it is of another kind.
        DataError: it begins like a JSON file of this package and is cut short or damaged.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read ({error.strerror}); {again}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not JSON but binary; {again}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip()[:1] in ("", "{"):
            raise DataError(
                f"{path} is not JSON ({error}); it may be cut short: {again}"
            ) from error
        raise OptionError(f"{path} is not JSON ({error}); {again}") from error


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, the text whose digest names a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: Any, length: int = 16) -> str:
    """The first ``length`` hex digits of the SHA-256 of a JSON-like value."""
    return hashlib.sha256(canonical(value)).hexdigest()[:length]


def others_who_write(path: Path) -> str | None:
    """Other users (not root) who can change ``path``, directly or through a folder above it.

    Returns ``/a/b belongs to eve``, ``/a is writable by all (mode 777)`` or ``None``. A folder
    with the sticky bit (``/tmp``) lets others add entries but not replace this user's.
    """
    real = path.resolve()
    for place in (real, *real.parents):
        state = place.stat()
        if state.st_uid not in (os.geteuid(), ROOT):
            return f"{place} belongs to {_user(state.st_uid)}"
        mode = f"(mode {stat.S_IMODE(state.st_mode):o})"
        if stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX and place != real:
            continue
        if state.st_mode & stat.S_IWOTH:
            return f"{place} is writable by all {mode}"
        if state.st_mode & stat.S_IWGRP and not _private(state.st_gid):
            return f"{place} is writable by the group {_group(state.st_gid)} {mode}"
    return None


def _private(group: int) -> bool:
    """Whether a group is root's, or this user's own: of the same name and without other members."""
    if group == ROOT:
        return True
    try:
        known = grp.getgrgid(group)
    except KeyError:
        return False
    own = _user(os.geteuid())
    return known.gr_name == own and set(known.gr_mem) <= {own}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


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
