"""Records that a compile exchanges with its child: the request, the lines that it prints, and the report in the store."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from systolic.compiling.host_backend import Built, CpuRates
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import RunError
from systolic.core.store import read_json

REPORT = "report.json"
"""File of a store's entry."""
FAILED = "failed"
"""Stage in which a child reports a failure that is not stored."""
FOUND = "found"
"""Stage in which a child reports that the store has the answer."""


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
    """What a program was compiled for and by, and the compiler's figures; beside a saved executable for users."""

    slice: str
    built: Built | None = None
    """None of a report of an early version."""
    flags: list[str]
    options: dict[str, Any]
    versions: dict[str, str]
    program: ProgramFacts
    """Facts of the first request; answers have their own."""
    places: list[list[int]]
    """(x, y, z, core, slice) of each device in the order of the mesh; empty off TPU."""
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
