"""Check that a run's code may be executed: it belongs to the user, or the user has trusted it before."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from systolic.core.errors import RunError, SystolicError
from systolic.core.files import cure, others_who_write, write_atomically


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
