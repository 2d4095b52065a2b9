"""Imports: a model of another library is written as a Bundle and compared with where it came from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.core.files import check_room
from systolic.core.reporter import reporter
from systolic.formats.bundle import BundleSource, few_outputs, record, record_answers
from systolic.formats.comparison import Parity, ParityInputs, check_passed, few
from systolic.formats.hugging_face.reader import check, impossible
from systolic.formats.jobs import job_of
from systolic.formats.program.convert import (
    Framework,
    ProgramParity,
    ProgramRequest,
    import_program,
)
from systolic.formats.registry import framework_format
from systolic.formats.source import Source, most_common, open_source
from systolic.formats.weights import planned, weight_progress, write_weights
from systolic.inference.model import answers
from systolic.runs.bundle.folder import (
    ORIGIN,
    BundleDraft,
    check_free,
    draft,
    model_record,
)
from systolic.runs.bundle.record import ImportedFrom, carried

if TYPE_CHECKING:
    from systolic.runs.bundle.tensors import TensorSpec

FOLDER = Path("bundles")
"""Default folder of Bundles."""
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
"""Dtypes of stored weights by their names in options; ``auto`` keeps the source's."""
AUTO = "auto"
NOT_ASKED = "not asked for"
"""Reason of an import without a comparison."""
PICTURE = "predict {} picture.jpg"
USES = {
    "CNN": PICTURE,
    "Decoder": 'generate {} "…"',
    "Encoder": 'predict {} "…"',
    "ExportedProgram": "predict {} inputs.npz",
    "MobileNetV2": PICTURE,
    "ResNet": PICTURE,
    "ViT": PICTURE,
    "Whisper": "predict {} speech.wav",
}
"""Class of a model to the command that uses its Bundle."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A Bundle that was made from a source."""

    path: Path
    parameters: int
    """Elements of all weights."""
    bytes: int
    """Size of the weights."""
    dtype: str
    parity: Parity | ProgramParity | None
    unchecked: str | None
    """Why there is no parity; ``None`` where there is."""
    unusable: str | None = None
    """The file that the Bundle lacks for the command that uses it, in words; ``None`` for a complete Bundle."""
    notes: tuple[str, ...] = ()
    """Warnings about the source's files, or about the batches of an exported program."""
    use: str
    """Verb and arguments of the command that uses it, with {} for the Bundle."""
    seconds: float = 0.0
    """Time that the import took."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bundle": str(self.path),
            "parameters": self.parameters,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "parity": None if self.parity is None else self.parity.to_json(),
            "unchecked": self.unchecked,
            "unusable": self.unusable,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def import_source(
    source: Path | str,
    out: Path | None,
    *,
    dtype: str,
    parity: bool,
    framework: Framework,
    base: Path | None,
) -> Imported:
    """Writes a model of another library as a Bundle, one tensor in memory at a time.

    Arguments and errors are those of :func:`systolic.import_model`; ``framework`` says how a model that is code or
    a program is converted.
    """
    if (form := framework_format(str(source))) is not None:
        request = ProgramRequest(source=str(source), read=form.read, how=framework)
        return _program(request, out, dtype, parity)
    framework.check_unused(source)
    opened = _sound(source, base)
    final = FOLDER / opened.path.resolve().stem if out is None else out
    reporter().stage("read descriptions")
    tensors = planned(opened, np.dtype(DTYPES[dtype]) if dtype != AUTO else None)
    size = sum(tensor.nbytes for tensor in tensors)
    _check_room(opened, final, size)
    rounded = _rounded_to(opened, tensors)
    with draft(final) as bundle_draft:
        _fill(opened, bundle_draft, tensors, size)
        about = _about(opened, tensors)
        unchecked = impossible(opened) if parity else NOT_ASKED
        checked = None if unchecked else _compared(opened, bundle_draft, about, rounded)
        _keep(opened, bundle_draft, about, rounded)
        bundle = bundle_draft.finish(**about)
    return Imported(
        path=bundle.folder,
        parameters=sum(int(np.prod(tensor.shape)) for tensor in tensors),
        bytes=size,
        dtype=bundle.record.dtype,
        parity=checked,
        unchecked=unchecked,
        unusable=_unusable(opened),
        notes=(*opened.notes, *_floats(opened)),
        use=USES[type(opened.model).__name__],
    )


def _sound(path: Path | str, base: Path | None = None) -> Source:
    """An opened source whose files do not contradict each other and are those that were written.

    Raises:
        OptionError: as :func:`systolic.formats.source.open_source`.
    """
    opened = open_source(path) if base is None else open_source(path, base)
    job_of(opened, texts=False)
    opened.verify()
    return opened


def _unusable(source: Source) -> str | None:
    """Why a model can't be used without another file; ``None`` where it can."""
    try:
        job_of(source)
    except OptionError as error:
        return str(error)
    return None


def _program(
    request: ProgramRequest,
    out: Path | None,
    dtype: str,
    parity: bool,
) -> Imported:
    """A model of PyTorch, Keras or TensorFlow."""
    if dtype != AUTO:
        raise OptionError(
            f"dtype is {dtype}, but {request.source} is exported as it computes; convert it before, with module.bfloat16() or Keras' policy"
        )
    final = FOLDER / request.name if out is None else out
    model, size, checked = import_program(request, final, parity=parity, say=reporter().stage)
    return Imported(
        path=final,
        parameters=model.about.parameters,
        bytes=size,
        dtype="float32",
        parity=checked,
        unchecked=None if parity else NOT_ASKED,
        use=USES[type(model).__name__],
        notes=model.about.notes,
    )


def _compared(
    source: Source,
    bundle: BundleDraft,
    about: dict[str, Any],
    rounded: str | None,
) -> Parity:
    """Parity of a Bundle with its source; notes it in ``about``, with what the Bundle answered.

    Raises:
        RunError: it computes something else.
    """
    reporter().stage("parity")
    bundle.describe(**about)
    held: list[tuple[ParityInputs, np.ndarray, str]] = []

    def ours(probe: ParityInputs) -> np.ndarray:
        # As a user opens it.
        outputs, platform = answers(open_source(bundle.folder), probe.ours)
        held.append((probe, outputs, platform))
        return outputs

    parity = check(source, ours, rounded=rounded)
    check_passed(parity)
    probe, outputs, platform = held[0]
    inputs, outputs = few(probe.ours), few_outputs(outputs)
    kept = record(bundle, inputs, outputs, platform)
    about |= {"parity": parity.to_json(), "recorded": kept}
    return parity


def _keep(source: Source, bundle: BundleDraft, about: dict[str, Any], rounded: str | None) -> None:
    """Notes in ``about`` what a copy of a Bundle keeps: its job and origin, and its evaluations where the weights are the same.

    The floats of a quantized matrix are rounded to its dtype, and their products to that of the computation: no such model was evaluated.
    """
    if isinstance(source, BundleSource):
        own, same = source.bundle.record, rounded is None and not source.quantization
        about |= carried(own) | {"evaluations": own.evaluations if same else []}
        if own.recorded is not None:
            about["recorded"] = record_answers(bundle, about, answers)


def _floats(source: Source) -> list[str]:
    """Notes on quantized matrices, and on evaluations of them."""
    if not isinstance(source, BundleSource) or not source.quantization:
        return []
    line = f"{len(source.quantization.matrices)} quantized matrices are now the floats that their codes stand for, in the dtype that they had"
    if source.bundle.record.evaluations:
        line += "; evaluations of the codes are not of them and were left out, measure again with systolic eval"
    return [line]


def _fill(
    source: Source,
    bundle: BundleDraft,
    tensors: "list[TensorSpec]",
    size: int,
) -> None:
    """Writes weights and other files."""
    write_weights(source, bundle, tensors, weight_progress(size, reporter().stage))
    for name, file in source.files().items():
        bundle.add(name, file.read_bytes())
    if source.config:
        bundle.add(ORIGIN, source.config_bytes())


def _rounded_to(source: Source, tensors: "list[TensorSpec]") -> str | None:
    """Dtype of the first tensor that is stored in another than the source's."""
    own = source.dtypes()
    return next((str(tensor.dtype) for tensor in tensors if tensor.dtype != own[tensor.name]), None)


def _about(source: Source, tensors: "list[TensorSpec]") -> dict[str, Any]:
    from systolic import __version__

    return {
        "systolic": __version__,
        "model": model_record(source.model),
        "source": ImportedFrom(
            kind=source.kind,
            name=source.path.resolve().name,
            digest=source.fingerprint(),
            licence=source.licence,
        ),
        "dtype": most_common(tensors),
    }


def _check_room(opened: Source, final: Path, size: int) -> None:
    """Whether there is nothing at a path yet, and room on its disk, before minutes of writing.

    Raises:
        TakenError: there is something.
        OptionError: it is in the source's folder.
        RunError: there is no room.
    """
    check_free(final)
    if opened.path.is_dir() and final.resolve().is_relative_to(opened.path.resolve()):
        raise OptionError(f"{final} lies in the source {opened.path}; choose another --out")
    check_room(final, size, "free some space, choose another --out, or give --dtype bf16")
