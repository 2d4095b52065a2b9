"""Files that are complete or absent: written under another name, flushed, then renamed.

Also digests of content, which are the same on every machine, and who may write to a file, since a pickle of another
user is not loaded.
"""

import difflib
import errno
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.core.units import si

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota or a size limit."""


POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of what Git has in place of a large file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""


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
    """``"; did you mean data/train.jsonl?"`` for a path that is not there: the file or folder beside it that has the nearest name, else ``""``."""
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
        raise RunError(
            f"{folder} is not writable ({error.strerror}); choose another folder for {path.name}"
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


ROOT = 0


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
