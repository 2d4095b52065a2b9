"""Outcomes of a compile, of which a program that does not fit is one, and the records that a compile exchanges with its child: request, printed lines and stored report."""

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from systolic.compiling.host_backend import Built, CpuRates
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import RunError
from systolic.core.files import others_who_write, read_json

HLO, PROTO, REPORT, EXECUTABLE = (
    "module.hlo.gz",
    "module.hlo.pb.gz",
    "report.json",
    "executable.jax",
)
ERROR = "error.json"
"""Files of an entry; the last one only for a rejected program."""
FAILED = "failed"
"""Stage in which a child reports a failure that is not stored."""
FOUND = "found"
"""Stage in which a child reports that the store has the answer."""
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


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """Request that the child reads."""

    program: bytes
    """Unpickled after the settings apply, otherwise 64-bit arrays would be narrowed."""
    slice: str
    flags: Sequence[str]
    runtime: Sequence[str]
    """Flags that the child has in its environment."""
    options: Mapping[str, Any]
    save: bool
    store: str
    """Root of the stores."""
    settings: Mapping[str, Any]


class ChildLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line that the child prints: a stage, with the answer or the failure that ends it."""

    stage: str
    digest: str = ""
    """Digest of the store's entry with the answer."""
    facts: ProgramFacts | None = None
    who: str = ""
    """Origin of a failure: ``user``, ``program`` or ``compiler``."""
    text: str = ""
    kind: str = ""
    """Class of a user's mistake."""
    where: str = ""
    """``file.py:14`` of the user's."""

    def to_json(self) -> dict[str, Any]:
        """Plain values of the fields that it has."""
        return msgspec.to_builtins(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Everything a compiled program depends on, made in the same way for compiling and loading."""

    platform: str
    """``tpu``, ``gpu`` or ``cpu``."""
    kind: str
    """JAX's device kind; for a CPU the processor's name."""
    devices: int
    """Number of devices in the mesh of the program."""
    versions: Mapping[str, str]
    """Versions of jax, jaxlib and, for a TPU, libtpu."""
    build: str
    """Number of libtpu's source revision; empty off TPU."""
    flags: Sequence[str]
    """Compiler flags of the program and the environment, sorted."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this compile alone."""
    ids: Sequence[int]
    """JAX's device ids in mesh order."""
    places: Sequence[Sequence[int]]
    """(x, y, z, core, slice) of each device; empty off TPU."""
    program: str
    """Digest of the lowered program; see :func:`systolic.compiling.executable.program_digest`."""


class FileSignature(msgspec.Struct, frozen=True, kw_only=True):
    """Size and digest of an executable's file."""

    bytes: int
    sha256: str


class CompiledMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of one device by the compiler; None for figures that it does not give."""

    used_in_bytes: int | None = None
    """Arguments, results and temporaries, which the compiler compares with the chip's memory."""
    peak_memory_in_bytes: int | None = None
    argument_size_in_bytes: int | None = None
    output_size_in_bytes: int | None = None
    alias_size_in_bytes: int | None = None
    temp_size_in_bytes: int | None = None
    generated_code_size_in_bytes: int | None = None
    host_temp_size_in_bytes: int | None = None


class CompileReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report of a compile: its target, its compiler and the figures of that; beside a saved executable for users."""

    slice: str
    built: Built | None = None
    """None of a report of an early version."""
    flags: list[str]
    options: dict[str, Any]
    versions: dict[str, str]
    program: ProgramFacts
    """Facts of the first request; answers have their own."""
    places: list[list[int]]
    """(x, y, z, core, slice) of each device in the order of the mesh, of a GPU its number; empty for a CPU."""
    seconds: dict[str, float]
    """Seconds by stage."""
    stamp: Fingerprint | None = None
    """None of a report of an early version."""
    memory: CompiledMemory | None = None
    """None of a program that was refused before it had a schedule."""
    rates: CpuRates | None = None
    """Rates of this machine's CPU, of a program for it."""
    flops: float | None = None
    executable: FileSignature | None = None
    """None unless the executable was kept."""

    def to_json(self) -> dict[str, Any]:
        """Plain values of the fields that it has."""
        return {**msgspec.to_builtins(self), "program": self.program.to_json()}

    def write(self, folder: Path) -> None:
        """Writes it to an entry's folder."""
        (folder / REPORT).write_text(json.dumps(self.to_json()))


def read_report(folder: Path) -> CompileReport:
    """Report of a store's entry.

    Raises:
        RunError: the file is absent or damaged.
    """
    path = folder / REPORT
    try:
        return msgspec.convert(read_json(path), CompileReport)
    except msgspec.ValidationError as error:
        raise RunError(f"{path} is damaged ({error}); run again to compile it anew") from error


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
