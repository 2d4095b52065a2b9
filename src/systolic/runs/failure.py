"""Reason of a failed write, in the operating system's words."""

import errno
import os
import shlex
from pathlib import Path

from systolic.core.files import FULL

_KNOWN = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT)


def is_full(error: BaseException) -> bool:
    """Whether a full disk, a quota or a size limit is the cause."""
    return _number(error) in FULL


def reason(error: BaseException) -> str:
    """Reason in one line: the system's message, or the first line of the error."""
    number = _number(error)
    if number is not None:
        return os.strerror(number)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def of_save(error: BaseException, step: int | None, intact: int | None, run: Path) -> str:
    """Message of one line for a checkpoint that could not be written.

    Args:
        error: What went wrong.
        step: Of the checkpoint.
        intact: The newest step that is on disk.
        run: The run's directory.
    """
    kept = "there is no earlier checkpoint"
    if intact is not None:
        kept = f"the checkpoint of step {intact} is intact"
    cure = "free space" if is_full(error) else "fix that"
    return f"checkpoint of step {step} failed: {reason(error)}; {kept}; {cure} and continue with --resume {shlex.quote(str(run))}"


def _number(error: BaseException) -> int | None:
    """Error number of the root cause; native code passes it on as text only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno:
            return seen.errno
        message = str(seen)
        for number in _KNOWN:
            if os.strerror(number) in message:
                return number
        seen = seen.__cause__ or seen.__context__
    return None
