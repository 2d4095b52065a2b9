"""Check that a run's code may be executed: it is the user's own, or the user has trusted it once.

A run keeps a copy of a recipe's file, which is Python. Who may write a run decides what it does, so
a run of somebody else is read by the user first and then trusted by the digest of its code.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from systolic.core.errors import RunError, SystolicError
from systolic.core.files import cure, write_atomically
from systolic.core.owner import others_who_write


class TrustError(RunError):
    """Code that is neither the user's own nor trusted."""


def config_home() -> Path:
    """``systolic`` in ``$XDG_CONFIG_HOME``, by default ``~/.config``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systolic"


def require(run: Path, code: Mapping[str, bytes], *, trust: bool) -> None:
    """Checks that the code of a run may be executed.

    Args:
        run: The run's directory.
        code: Path in the run to content of each Python file that would be executed.
        trust: The user trusts this code, now and later: its digest is remembered.

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
            f"{reason}, and its recipe would be executed as you; read {run / min(code)} and the modules beside it, then add --trust, which is remembered for this code"
        )


def foreign(paths: list[Path]) -> str:
    """Reason why files and folders are not safely the user's own; "" if they are."""
    return next((reason for path in paths if (reason := others_who_write(path))), "")


def digest(code: Mapping[str, bytes]) -> str:
    """SHA-256 of names and contents, in hex."""
    total = hashlib.sha256()
    for name in sorted(code):
        for part in (name.encode(), code[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def _with_folders(code: Mapping[str, bytes]) -> list[Path]:
    """The files and the folders between them and the run."""
    found = {Path(name) for name in code}
    return sorted(found | {parent for name in found for parent in name.parents} - {Path(".")})


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
            # Another process may add a line at the same time.
            with _file().open("a") as file:
                file.write(line)
        except OSError as error:
            raise RunError(
                f"{_file()} could not be written ({error.strerror}); {cure(_file(), error)} with XDG_CONFIG_HOME"
            ) from error
