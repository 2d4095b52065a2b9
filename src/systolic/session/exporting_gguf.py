"""A run or a model in files as a GGUF file, opened again and compared before it gets its name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.bundle import BundleDraft, check_free, draft
from systolic.core.errors import OptionError, RunError
from systolic.formats.comparison import Parity, compare
from systolic.formats.gguf.tokenizer import Words, words_of
from systolic.formats.gguf.writer import (
    OF_DTYPES,
    PRECISIONS,
    Described,
    GgufSpec,
    describe,
    plan,
    write_gguf,
)
from systolic.formats.probe import probe_of
from systolic.formats.source import GGUF as SUFFIX
from systolic.formats.source import most_common, open_source
from systolic.session.outgoing import (
    Leaving,
    elements_of,
    floats_line,
    leaving,
    no_room,
    outputs_of_source,
    tolerance_of,
)
from systolic.session.written import written

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class GgufOptions:
    """A GGUF file to write.

    Raises:
        OptionError: the precision is unknown.
    """

    precision: str = AUTO
    """Of the matrices, one of :data:`PRECISIONS`; ``auto`` keeps that of the weights. Vectors are f32."""

    def __post_init__(self) -> None:
        if self.precision not in (AUTO, *PRECISIONS):
            raise OptionError(
                f"precision is {self.precision!r}; a GGUF file takes {AUTO}, {', '.join(PRECISIONS)}"
            )


@dataclass(frozen=True, kw_only=True)
class ExportedGguf:
    """A GGUF file that was written."""

    path: Path
    architecture: str
    """llama.cpp's name of it."""
    precision: str
    """Of the matrices."""
    parameters: int
    """Elements of all tensors."""
    bytes: int
    """Of the file."""
    parity: Parity | None
    """Differences between the logits of the file and those of the source."""
    notes: tuple[str, ...]
    """What GGUF can't say of the model, and why there is no parity."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "precision": self.precision,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "parity": None if self.parity is None else self.parity.to_json(),
            "notes": list(self.notes),
        }

    @property
    def kind(self) -> str:
        """What it is in words."""
        return f"{self.architecture} in {self.precision}"

    def lines(self) -> list[str]:
        """The comparison, and notes."""
        return [*([self.parity.line()] if self.parity else []), *self.notes]


def export_gguf(
    path: Path,
    out: Path,
    options: GgufOptions,
    *,
    checkpoint: str | int = "best",
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> ExportedGguf:
    """Writes a language model as a GGUF file; arguments as :func:`systolic.session.exporting.export_model`.

    Args:
        path: The run's directory, or the model.
        out: The new file.
        options: How.
        checkpoint: Of a run.
        trust: Execute the run's recipe although it is not yours.
        say: Called with each stage.

    Raises:
        OptionError: no architecture of llama.cpp computes what the model does, or GGUF has no tokenizer of its kind.
        TakenError: there is something at ``out``.
        DataError: a weight is no number.
        RunError: the disk is full, or the logits of the file are others; nothing is left at ``out``.
    """
    if out.suffix != SUFFIX:
        raise OptionError(f"{out} is no name of a GGUF file; give --out {out}{SUFFIX}")
    check_free(out)
    found = leaving(path, checkpoint, trust=trust)
    described = describe(found.made.config, str(path))
    precision = options.precision
    if precision == AUTO:
        precision = OF_DTYPES.get(most_common(found.made.specs), "f32")
    tensors = plan(found.made, described, precision)
    unchecked, parity = no_room(elements_of([one.source for one in tensors])), None
    with draft(out) as made:
        file = made.folder / out.name
        words = _write(made, file, path, found, described, tensors, precision, say)
        restored = floats_line(found.restored)
        del found
        if unchecked is None:
            say("comparing")
            parity = _compared(file, path, checkpoint, trust, precision)
        size = file.stat().st_size
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        os.replace(file, out)
    return ExportedGguf(
        path=out,
        architecture=described.architecture,
        precision=precision,
        parameters=sum(int(np.prod(one.source.shape)) for one in tensors),
        bytes=size,
        parity=parity,
        notes=(*_notes(words, tensors, precision, unchecked), *restored),
    )


def _write(
    made: BundleDraft,
    file: Path,
    path: Path,
    found: Leaving,
    described: Described,
    tensors: list[GgufSpec],
    precision: str,
    say: Callable[[str], None],
) -> Words:
    """Writes the draft of the file; returns its tokenizer."""
    say("tokenizer")
    for name, content in found.files.items():
        made.add(name, content)
    words = words_of(
        made.folder,
        found.made.config,
        described.model.vocab,
        starts=found.starts,
        source=str(path),
    )
    fields = {**_general(path, found, precision), **words.fields}
    progress = written(sum(one.nbytes for one in tensors), say)
    write_gguf(file, described, fields, tensors, found.made.pieces, progress)
    return words


def _general(path: Path, found: Leaving, precision: str) -> dict[str, Any]:
    """Metadata about the file."""
    made = {
        "general.type": "model",
        "general.name": path.resolve().name.removesuffix(SUFFIX),
        "general.license": found.licence,
        "general.file_type": PRECISIONS[precision],
        "general.quantization_version": 2,
    }
    return {name: value for name, value in made.items() if value is not None}


def _notes(
    words: Words, tensors: list[GgufSpec], precision: str, unchecked: str | None
) -> tuple[str, ...]:
    other = [one for one in tensors if one.kind.name == "F16"] if precision != "f16" else []
    notes = list(words.notes)
    if other:
        notes.append(
            f"{len(other)} matrices are f16: {precision} takes rows of a multiple of 32 numbers"
        )
    if unchecked is not None:
        notes.append(unchecked)
    return tuple(notes)


def _compared(file: Path, path: Path, checkpoint: str | int, trust: bool, precision: str) -> Parity:
    """Logits of a written file against those of its source, both computed here in float32.

    Raises:
        RunError: they are others.
    """
    probe = probe_of(open_source(file))
    ours = outputs_of_source(file, "best", False, probe.ours)
    theirs = outputs_of_source(path, checkpoint, trust, probe.ours)
    found = compare(ours, theirs, "the source", tolerance_of(precision, path))
    if not found.passed:
        raise RunError(
            f"the GGUF file of {path} computes something else: {found.line()}; please report it, nothing was kept"
        )
    return found
