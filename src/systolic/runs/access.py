"""Access to a run: one process at a time writes, others read, and its code is executed where the user owns or trusts it."""

import contextlib
import enum
import errno
import hashlib
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from systolic.core.errors import RunError, SystolicError
from systolic.core.files import cure, others_who_write, write_atomically

LOCK = ".lock"
"""Lock file of a run, held by its writer."""


class Access(enum.Enum):
    """Access of a process to a run or its checkpoints."""

    read = "read"
    """Read, also while another process writes."""
    write = "write"
    """Own the run: clean up after a kill, append, save, drop old checkpoints."""


class Lock:
    """Locks a folder for this process until it is released or the process ends.

    A POSIX record lock: forked data workers do not inherit it, so a worker that outlives its
    trainer does not keep the run. File systems without locks (some network mounts) are not held.

    Raises:
        RunError: another process, or another part of this one, holds the folder.
    """

    _held: set[Path] = set()  # noqa: RUF012 - record locks do not exclude their own process

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve() / LOCK
        if self._path in Lock._held:
            raise RunError(_taken(folder, f"this process (pid {os.getpid()})"))
        self._handle = _acquire(self._path, folder)
        Lock._held.add(self._path)

    def release(self) -> None:
        """Releases the folder and removes the lock file."""
        if self._handle is not None:
            # Removed while it is held: who opened it before sees that it is gone, and makes another.
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._handle)
            self._handle = None
        Lock._held.discard(self._path)


def is_held(folder: Path) -> bool:
    """Whether a process holds a folder; asked without holding it, which would turn away one that begins."""
    path = folder.resolve() / LOCK
    if path in Lock._held:
        return True
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    # struct flock: type, whence, start, length, pid; on other systems than Linux the type is fourth.
    fields, place = ("hhqqi", 0) if sys.platform == "linux" else ("qqihh", 3)
    lock = [0] * 5
    lock[place] = fcntl.F_WRLCK
    try:
        holder = fcntl.fcntl(handle, fcntl.F_GETLK, struct.pack(fields, *lock))
    except OSError:
        return False
    finally:
        os.close(handle)
    return struct.unpack(fields, holder)[place] != fcntl.F_UNLCK


def _acquire(path: Path, folder: Path) -> int | None:
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(
            f"{folder} is not writable ({error.strerror}); choose another folder"
        ) from error
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.read(handle, 64).decode(errors="replace").strip()
            os.close(handle)
            raise RunError(_taken(folder, f"process {holder or 'unknown'}")) from error
        os.close(handle)
        return None
    if not _is_at(handle, path):  # its last owner removed it meanwhile
        os.close(handle)
        return _acquire(path, folder)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
    except OSError:
        pass  # A full disk: the lock holds all the same, only its pid is not told.
    return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _taken(folder: Path, holder: str) -> str:
    return f"{folder} is in use by {holder}; wait for it, stop it, or choose another folder"


class TrustError(RunError):
    """Raised for code that neither belongs to the user nor is trusted."""


def config_home() -> Path:
    """``systolic`` in ``$XDG_CONFIG_HOME``, by default ``~/.config``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systolic"


def require(run: Path, code: Mapping[str, bytes], *, trust: bool) -> None:
    """Checks that the code of a run may be executed.

    A run contains a copy of its recipe's Python file, which anyone with write access can change. The
    code of a run that others can write is therefore executed only after the user has trusted its digest.

    Args:
        run: The run's directory.
        code: Contents of each Python file that would be executed, by path in the run.
        trust: The user trusts this code; its digest is remembered.

    Raises:
        TrustError: a file, or a folder above it, belongs to another user or can be written by
            others, and the code was never trusted.
    """
    if not code:
        return
    name = digest(code)
    if trust:
        _remember(name, run)
        return
    reason = foreign([run, *(run / part for part in _with_folders(code))])
    if reason and name not in _remembered():
        raise TrustError(
            f"{reason}, and its recipe would run with your permissions; read {run / min(code)} and the modules beside it, then add --trust, which is remembered for this code"
        )


def foreign(paths: list[Path]) -> str:
    """Reason why others could have written the files and folders; "" if none could."""
    return next((reason for path in paths if (reason := others_who_write(path))), "")


def digest(code: Mapping[str, bytes]) -> str:
    """SHA-256 of names and contents, in hex."""
    total = hashlib.sha256()
    for name in sorted(code):
        for part in (name.encode(), code[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def _with_folders(code: Mapping[str, bytes]) -> list[Path]:
    """Paths of the files and of the folders between them and the run."""
    files = {Path(name) for name in code}
    return sorted(files | {parent for name in files for parent in name.parents} - {Path(".")})


def _file() -> Path:
    return config_home() / "trusted"


def _remembered() -> set[str]:
    """Digests in the user's list; empty if others can write the list."""
    file = _file()
    if not file.is_file() or foreign([file, file.parent]):
        return set()
    return {line.split(" ", 1)[0] for line in file.read_text().splitlines()}


def _remember(name: str, run: Path) -> None:
    known, line = _remembered(), f"{name} {run.absolute()}\n"
    if not known:
        try:
            write_atomically(_file(), line)
        except SystolicError as error:
            raise RunError(f"{error} with XDG_CONFIG_HOME") from error
    elif name not in known:
        try:
            # Append, since another process may add a line at the same time.
            with _file().open("a") as file:
                file.write(line)
        except OSError as error:
            raise RunError(
                f"{_file()} could not be written ({error.strerror}); {cure(_file(), error)} with XDG_CONFIG_HOME"
            ) from error
