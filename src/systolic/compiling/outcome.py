"""Outcomes of a compile; a program that does not fit is one of them, not an error."""

import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from systolic.compiling.report import CompileReport, read_report
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import RunError
from systolic.core.files import others_who_write

HLO, PROTO, EXECUTABLE = "module.hlo.gz", "module.hlo.pb.gz", "executable.jax"
ERROR = "error.json"
"""Files of an entry; the last one only for a rejected program."""


@dataclass(frozen=True)
class Compiled:
    """Scheduled program in the store."""

    folder: Path
    digest: str
    """Digest of the lowered program, its target, the flags and the versions."""
    cached: bool
    facts: ProgramFacts | None = None
    """Facts of this program; another with the same lowered text may have different ones."""

    @cached_property
    def report(self) -> CompileReport:
        """The compiler's report, with the facts of this program."""
        report = read_report(self.folder)
        return report if self.facts is None else replace(report, program=self.facts)

    @property
    def hlo(self) -> str:
        """The scheduled module as text."""
        return read_module(self.folder / HLO)

    @property
    def proto(self) -> bytes | None:
        """The scheduled module and its buffers as a serialized HloProto; None where the compiler wrote none."""
        path = self.folder / PROTO
        return _unpacked(path) if path.is_file() else None

    @property
    def executable(self) -> Path | None:
        """The serialized executable; None unless requested.

        Raises:
            RunError: others could have written it, and it is a pickle, which can run any code.
        """
        path = self.folder / EXECUTABLE
        if not path.is_file():
            return None
        check_owner(path)
        return path


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Allocation named by the compiler."""

    bytes: int
    op: str = ""
    shape: str = ""
    source: str = ""
    label: str = ""
    """The instruction, ``fusion.12 = fusion(…)``."""
    kind: str = ""
    """The compiler's allocation type: ``HLO temp``, ``scoped`` …"""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Outcome of a program that does not fit."""

    space: str
    """``hbm``, ``vmem`` or ``smem``."""
    need_bytes: int
    have_bytes: int
    buffers: Sequence[Buffer] = ()
    """The largest buffers, largest first."""
    digest: str = ""
    cached: bool = False
    report: CompileReport | None = None
    """None of a message alone."""
    folder: Path | None = None
    """Folder of the store's entry."""

    @property
    def hlo(self) -> str | None:
        """The scheduled module that did not fit; None where the compiler had none yet."""
        path = self.folder / HLO if self.folder is not None else None
        return read_module(path) if path is not None and path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Outcome of a compile that was refused or crashed."""

    reason: str
    """Reason in one line."""
    log: str = ""
    """End of its output."""
    unknown_flag: str = ""
    """Flag ``--xla_…`` without a per-program option in XLA, where that is the reason."""


Outcome = Compiled | Rejected | Failed

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_USED = re.compile(r"Used ([\d.]+)([KMGT]?)\w* of ([\d.]+)([KMGT]?)\w* (\w+)", re.IGNORECASE)
_REQUIRED = re.compile(
    r"Ran out of memory on (\w+), the total memory required for [\w ]+ \(([\d.]+)([KMGT]?)\w*\)"
    r" exceeds available \w+ \(([\d.]+)([KMGT]?)\w*\)"
)
"""libtpu 0.0.42's message, which has no buffers; its total includes the arguments."""
_SPACE = re.compile(r"memory space (\w+)")
_LABELS = {
    "op": re.compile(r'op_name="([^"]*)"'),
    "shape": re.compile(r"Shape: (\S+)"),
    "source": re.compile(r"source_file=\"?([^\"\s]+)\"?(?:\s+source_line=(\d+))?"),
    "label": re.compile(r"XLA label: (.+)"),
    "kind": re.compile(r"Allocation type: (.+)"),
}


def rejection(text: str, capacity: int) -> Rejected | None:
    """Parses an out-of-memory message of libtpu; None for other messages."""
    lowered = text.lower()
    if (
        "resource_exhausted" not in lowered
        and "out of memory" not in lowered
        and "vmemoom" not in lowered
    ):
        return None
    if (short := _REQUIRED.search(text)) is not None:
        return Rejected(
            space=short[1].lower(),
            need_bytes=_bytes(short[2], short[3]),
            have_bytes=_bytes(short[4], short[5]),
        )
    used, space = _USED.search(text), _SPACE.search(text)
    if used is None:
        return Rejected(
            space=space[1].lower() if space else "hbm", need_bytes=0, have_bytes=capacity
        )
    return Rejected(
        space=used[5].lower(),
        need_bytes=_bytes(used[1], used[2]),
        have_bytes=_bytes(used[3], used[4]),
        buffers=_buffers(text),
    )


def read_module(path: Path) -> str:
    """The text of a module in the store.

    Raises:
        RunError: the file is absent or damaged.
    """
    try:
        return _unpacked(path).decode()
    except UnicodeDecodeError as error:
        raise _damaged(path, error) from error


def check_owner(path: Path) -> None:
    """Checks that only the user can write to a store, as executables require.

    Raises:
        RunError: others may write there.
    """
    here = next(place for place in (path, *path.absolute().parents) if place.exists())
    if (who := others_who_write(here)) is not None:
        raise RunError(
            f"{who}, and an executable is a pickle, which can run any code; set SYSTOLIC_CACHE to a folder that only you can write to"
        )


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path} is damaged ({error}); run again to compile it anew")


def _buffers(text: str) -> list[Buffer]:
    buffers = []
    for part in re.split(r"^\s*\d+\. ", text, flags=re.MULTILINE)[1:]:
        size = re.match(r"Size: ([\d.]+)([KMGT]?)", part)
        if size is None:
            continue
        labels = {name: _search(pattern, part) for name, pattern in _LABELS.items()}
        buffers.append(Buffer(bytes=_bytes(size[1], size[2]), **labels))
    return sorted(buffers, key=lambda b: -b.bytes)


def _search(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return ":".join(group for group in match.groups() if group).strip() if match else ""


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit.upper()])
