"""Imports of PyTorch, Keras and TensorFlow models: exported in a child, written as a Bundle, compared in another child."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from systolic.core.errors import (
    DataError,
    MissingExtraError,
    NotFoundError,
    OptionError,
    RunError,
    SystolicError,
)
from systolic.core.files import digest
from systolic.formats.bundle import FILE, MOST_BYTES, PRECISION
from systolic.formats.comparison import check_passed
from systolic.formats.packages import ended, last_line, run_module
from systolic.formats.program.description import PROGRAM, SAMPLE, TOLERANCE, WEIGHTS, Description
from systolic.formats.program.model import ExportedProgram
from systolic.runs.bundle.folder import BundleDraft, draft, model_record
from systolic.runs.bundle.record import ImportedFrom, Recorded
from systolic.runs.bundle.tensors import TensorSpec, read_header

_MISTAKES = {kind.__name__: kind for kind in (OptionError, NotFoundError, DataError, RunError)}
LOG = "log.txt"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How a model of another framework is converted."""

    signature: str | None = None
    """Signature of a SavedModel; by default serving_default."""
    example: Path | None = None
    """An .npz file with example inputs, for a .keras file or SavedModel that leaves sizes open."""
    python: Path | None = None
    """Python of the environment that has the framework; by default this one."""

    def check_unused(self, source: Path | str) -> None:
        """Refuses settings for a source that is not converted.

        Raises:
            OptionError: one is set.
        """
        for name in ("signature", "example", "python"):
            if (value := vars(self)[name]) is not None:
                raise OptionError(
                    f"--{name} is {value}, but {source} is no model of PyTorch, Keras or TensorFlow; leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class ProgramRequest:
    """A model to convert."""

    source: str
    """A path, or ``file.py:function``."""
    read: str
    """``read`` of its :class:`~systolic.formats.registry.FrameworkFormat`."""
    how: Framework = field(default_factory=Framework)

    @property
    def name(self) -> str:
        """The function's name, or the path's without its suffix."""
        path, colon, function = self.source.rpartition(":")
        return function if colon and path.endswith(".py") else Path(self.source).resolve().stem


@dataclass(frozen=True, kw_only=True)
class ProgramParity:
    """Differences between a framework's outputs and those of the program in a process without the framework."""

    framework: str
    """``torch 2.13.0``."""
    rows: int
    """Examples that were compared."""
    max_abs: float
    max_relative: float
    """Largest difference over the largest magnitude of the same output."""
    mean_abs: float
    mean_relative: float
    """Mean difference over the largest magnitude of the same output."""
    tolerance: float
    """Limit of ``max_relative``."""

    @property
    def passed(self) -> bool:
        """Whether the largest relative difference is within the tolerance; not if it is no number."""
        return self.max_relative <= self.tolerance

    def line(self) -> str:
        """The figures on one line."""
        return f"parity with {self.framework} over {self.rows} examples, float32: max {self.max_abs:.2e} (relative {self.max_relative:.2e}, tolerance {self.tolerance:.0e}), mean {self.mean_abs:.2e} (relative {self.mean_relative:.2e})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "passed": self.passed}


def convert(request: ProgramRequest, folder: Path) -> Description:
    """Writes a program, its weights and a sample of outputs into ``folder``; its description.

    Raises:
        SystolicError: the source is missing or can't be converted; names the layer or operation.
        MissingExtraError: its framework is not installed.
        RunError: the converting process died.
    """
    from systolic.formats.program.child import OUTCOME

    message = {
        "source": request.source,
        "read": request.read,
        "folder": str(folder),
        "signature": request.how.signature,
        "example": None if request.how.example is None else str(request.how.example),
    }
    python = str(request.how.python or sys.executable)
    code = run_module(python, "systolic.formats.program.child", [json.dumps(message)], folder / LOG)
    answer = folder / OUTCOME
    if not answer.is_file():
        raise RunError(
            f"the conversion of {request.source} {ended(code)}; {last_line(folder / LOG)}"
        )
    outcome = json.loads(answer.read_bytes())
    if "error" in outcome:
        raise _mistake(outcome)
    return msgspec.convert(outcome["description"], Description)


def compare(bundle: Path, scratch: Path) -> ProgramParity:
    """Runs a Bundle's program on the sample in ``scratch``, in a fresh process without the framework.

    Raises:
        RunError: that process died, or loaded the framework.
    """
    from systolic.formats.program.exported import PARITY

    log = scratch / LOG
    code = run_module(
        sys.executable, "systolic.formats.program.exported", [str(bundle), str(scratch)], log
    )
    answer = scratch / PARITY
    if not answer.is_file():
        raise RunError(f"the comparison of {bundle} {ended(code)}; {last_line(log)}")
    outcome = json.loads(answer.read_bytes())
    if "error" in outcome:
        raise _mistake(outcome)
    return msgspec.convert(outcome, ProgramParity)


def _mistake(outcome: Mapping[str, Any]) -> SystolicError:
    text = outcome["told"]
    if outcome["error"] == MissingExtraError.__name__:
        feature, _, rest = text.partition(" needs packages")
        return MissingExtraError(feature, rest.rpartition("[")[2].rstrip("]'"))
    return _MISTAKES.get(outcome["error"], RunError)(text)


def import_program(
    request: ProgramRequest,
    final: Path,
    *,
    parity: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[ExportedProgram, int, ProgramParity | None]:
    """Writes a model of another framework as a Bundle at ``final``.

    Args:
        request: The model.
        final: The Bundle's folder.
        parity: Compare outputs with the framework's.
        say: Called with each stage.

    Returns:
        The program, the bytes of its weights, and its parity.

    Raises:
        TakenError: there is something at ``final``.
        RunError: the outputs differ by more than the tolerance, or a process died; no Bundle is left.
        SystolicError: the model can't be converted; names the layer or operation.
    """
    from systolic import __version__

    with draft(final) as bundle, tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        say("converting")
        about = convert(request, scratch)
        say("weights")
        size = _fill(bundle, scratch)
        model = ExportedProgram(about=about)
        record: dict[str, Any] = {
            "systolic": __version__,
            "model": model_record(model),
            "source": ImportedFrom(
                kind=about.framework,
                name=Path(request.source).name,
                digest=digest({"program": about.digest}),
            ),
            "dtype": "float32",
        }
        comparison: ProgramParity | None = None
        if parity:
            say("parity")
            bundle.describe(**record)
            comparison = compare(bundle.folder, scratch)
            check_passed(comparison)
            record["recorded"] = _recorded(bundle, scratch / SAMPLE)
        bundle.finish(**record, parity=None if comparison is None else comparison.to_json())
    return replace(model, folder=final), size, comparison


def _recorded(bundle: BundleDraft, sample: Path) -> Recorded | None:
    """The framework's outputs for its example inputs as recorded ones; ``None`` where they are large."""
    if sample.stat().st_size > MOST_BYTES:
        return None
    bundle.add(FILE, sample.read_bytes())
    return Recorded(file=FILE, precision=PRECISION, tolerance=TOLERANCE, platform="cpu")


def _fill(bundle: BundleDraft, scratch: Path) -> int:
    """Writes program and weights; the bytes of the weights."""
    tensors = read_header(scratch / WEIGHTS)[0]
    planned = [
        TensorSpec(name=name, shape=tensor.shape, dtype=tensor.dtype)
        for name, tensor in tensors.items()
    ]

    def pieces(name: str) -> Iterator[np.ndarray]:
        yield tensors[name].read()

    bundle.add(PROGRAM, (scratch / PROGRAM).read_bytes())
    bundle.weights(planned, pieces, lambda _: None)
    return sum(spec.nbytes for spec in planned)
