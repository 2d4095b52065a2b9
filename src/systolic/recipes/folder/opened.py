"""Files of a recipe's folder that its own code opens, for the copies in a run."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from systolic.core.units import gibibytes

KEPT_BYTES = 1 << 26
"""Limit for all files together, so that data sets are not copied into every run."""

_CODE = frozenset((".py", ".pyc", ".so"))


class OpenedFiles:
    """Files below a folder that code in the same folder opens, until :meth:`close`.

    Files that other code opens, such as a corpus that Systolic reads, do not count.
    """

    def __init__(self, folder: Path) -> None:
        self._prefix = str(folder) + os.sep
        self._opened: dict[str, None] = {}
        self._open = True
        if not _watching:
            _watching.append(self)
            # Audit hooks can't be removed, so there is only one.
            sys.addaudithook(_hook)
        _watching[0] = self

    def close(self) -> None:
        """Ends the watch."""
        self._open = False

    def kept(self, others: Sequence[Path]) -> tuple[dict[str, bytes], list[str]]:
        """Relative POSIX path to content, and a line for each file that is too large to keep.

        Args:
            others: Files and folders named by options, which are not copied.
        """
        found: dict[str, bytes] = {}
        too_large: list[str] = []
        room = KEPT_BYTES
        for name in self._opened:
            path = Path(name)
            if not path.is_file() or any(path.is_relative_to(other) for other in others):
                continue
            size = path.stat().st_size
            if size > room:
                too_large.append(
                    f"the recipe reads {path} ({gibibytes(size)}), and a run copies up to {gibibytes(KEPT_BYTES)} in all; keep the file where it is"
                )
                continue
            room -= size
            found[name.removeprefix(self._prefix).replace(os.sep, "/")] = path.read_bytes()
        return found, too_large

    def see(self, path: Any, mode: Any) -> None:
        """Records an ``open`` of this process."""
        if not self._open or not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        if not name.startswith(self._prefix) or Path(name).suffix in _CODE:
            return
        if isinstance(mode, str) and not mode.startswith("r"):
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if os.path.abspath(frame.f_code.co_filename).startswith(self._prefix):
                self._opened[name] = None
                return
            frame = frame.f_back


_watching: list[OpenedFiles] = []
"""List with the newest watch only."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _watching[0].see(arguments[0], arguments[1])
