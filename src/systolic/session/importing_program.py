"""Imports of PyTorch, Keras and TensorFlow models: exported in a child, written as a Bundle, compared in another child."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.bundle import BundleDraft, draft, model_record
from systolic.artifact.bundle_record import ImportedFrom, Recorded
from systolic.artifact.tensors import TensorSpec, read_header
from systolic.core.digest import digest
from systolic.core.errors import RunError
from systolic.formats.bundle import FILE, MOST_BYTES, PRECISION
from systolic.formats.comparison import Parity
from systolic.formats.program.convert import ProgramParity, ProgramRequest, compare, convert
from systolic.formats.program.description import PROGRAM, SAMPLE, TOLERANCE, WEIGHTS
from systolic.formats.program.model import ExportedProgram


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

    with draft(final) as made, tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        say("converting")
        about = convert(request, scratch)
        say("weights")
        size = _fill(made, scratch)
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
        found: ProgramParity | None = None
        if parity:
            say("parity")
            made.describe(**record)
            found = compare(made.folder, scratch)
            check_passed(found)
            record["recorded"] = _recorded(made, scratch / SAMPLE)
        made.finish(**record, parity=None if found is None else found.to_json())
    return replace(model, folder=final), size, found


def _recorded(made: BundleDraft, sample: Path) -> Recorded | None:
    """The framework's outputs for its example inputs as recorded ones; ``None`` where they are large."""
    if sample.stat().st_size > MOST_BYTES:
        return None
    made.add(FILE, sample.read_bytes())
    return Recorded(file=FILE, precision=PRECISION, tolerance=TOLERANCE, platform="cpu")


def check_passed(found: Parity | ProgramParity) -> None:
    """Ends an import whose model computes something else than its source.

    Raises:
        RunError: so.
    """
    if not found.passed:
        raise RunError(
            f"{found.line()}: the import is not the same model, and no Bundle was written; report it, or import with --no-parity"
        )


def _fill(made: BundleDraft, scratch: Path) -> int:
    """Writes program and weights; the bytes of the weights."""
    tensors = read_header(scratch / WEIGHTS)[0]
    planned = [
        TensorSpec(name=name, shape=one.shape, dtype=one.dtype) for name, one in tensors.items()
    ]

    def pieces(name: str) -> Iterator[np.ndarray]:
        yield tensors[name].read()

    made.add(PROGRAM, (scratch / PROGRAM).read_bytes())
    made.weights(planned, pieces, lambda _: None)
    return sum(one.nbytes for one in planned)
