"""Exports of a run or of a model in files: what a writer reads, what it wrote, and how both compare.

A format's writer takes an :class:`ExportSource`, opens of it what the format holds, writes a draft, and compares
the draft's outputs with those of the source before the draft gets its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from systolic.core.errors import RunError
from systolic.core.units import si
from systolic.data.audio import Recordings
from systolic.data.text.text_data import TextData
from systolic.data.text.tokenizer import BYTES_START, Around
from systolic.formats.comparison import Parity, compare, probe_inputs, probe_of
from systolic.formats.hugging_face.preprocessor import PICTURED, with_pictures
from systolic.formats.registry import in_files
from systolic.formats.source import OTHER_FILES, TEXT_FILES, Source, most_common, open_source
from systolic.job import Job
from systolic.models.families import CONFIG, Config, read_config
from systolic.runs.bundle.tensors import TensorSpec
from systolic.runs.run import TOKENIZER
from systolic.runs.weights import Weights
from systolic.steps.step_functions import StepFunctions

if TYPE_CHECKING:
    from systolic.formats.hugging_face.writer import Outgoing

OF_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Precision that keeps weights of a dtype as they are."""
TOLERANCES = {"f32": 1e-4, "f16": 0.02, "bf16": 0.1, "q8_0": 0.2}
"""Largest difference over the largest output: rounding is far below it, rows in a wrong order are far above it."""
ROOM = 1.25
"""Memory of float32 weights and of what is computed with them, over the weights alone."""
WIDE = "float32"
"""Dtype that represents a code's value exactly."""


class ExportableRun(Protocol):
    """A run with the weights of a checkpoint in memory."""

    path: Path
    weights: Weights
    """Parameters and other variables as the checkpoint has them: adapters stand beside their matrices."""

    @property
    def job(self) -> Job:
        """The job that it was trained under."""
        ...

    @property
    def step(self) -> int:
        """Training step of the checkpoint."""
        ...

    @property
    def steps(self) -> StepFunctions:
        """Programs of the job on this machine."""
        ...

    @property
    def plain_weights(self) -> dict[str, Any]:
        """Parameters and other variables of the job's model by path; adapters are merged."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A run or a model in files that is to be exported; opened when a writer asks, so that its memory is free afterwards."""

    path: Path
    """The run's directory, or the model."""
    open_run: Callable[[], ExportableRun]
    """Opens the run; for a path that is one."""
    outputs: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    """Outputs float32[rows, ..., n] of the source for inputs by name."""
    answers: Callable[[Source, Mapping[str, np.ndarray]], tuple[np.ndarray, str]]
    """The same of a model in files, as its user opens it, and the platform that computed them."""


@dataclass(frozen=True, kw_only=True)
class ExportPayload:
    """A model under transformers' names, with the files of its text."""

    model: "Outgoing"
    files: dict[str, bytes]
    """Name to content of the files of tokenizer, chat template and preprocessing."""
    starts: bool | None = None
    """Whether a prompt begins with the token that begins a text; ``None`` leaves it to the tokenizer's post-processor."""
    licence: str | None = None
    reads_bytes: bool = False
    """Whether a token is a byte, for which there is no tokenizer's file."""
    restored: tuple[str, ...] = ()
    """Dtypes of the matrices that its files hold quantized; they are written as floats."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written."""

    path: Path
    kind: str
    """``model_type`` of its config.json; ``bundle`` for a Bundle."""
    parameters: int
    """Elements of all tensors."""
    bytes: int
    """Size of the tensors."""
    restored: tuple[str, ...] = ()
    """Dtypes of the matrices that were quantized, now floats."""
    reads_bytes: bool = False
    """Whether a token is a byte, so that no tokenizer was written."""
    parity: Parity | None = None
    """Differences between the outputs of what was written and those of its source."""
    notes: tuple[str, ...] = ()
    """Why there is no parity, and what the folder does not hold."""
    seconds: float = 0.0
    """Time that the export took."""

    @classmethod
    def of(cls, out: Path, kind: str, specs: Sequence[TensorSpec], **more: Any) -> "Exported":
        """The record of a folder with these tensors."""
        size = sum(spec.nbytes for spec in specs)
        return cls(path=out, kind=kind, parameters=elements_of(specs), bytes=size, **more)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "model_type": self.kind,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "restored": len(self.restored),
            "parity": None if self.parity is None else self.parity.to_json(),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def lines(self) -> list[str]:
        """The comparison, notes, and what became of quantized matrices and of bytes."""
        sentences = [*([self.parity.line()] if self.parity else []), *self.notes]
        sentences += floats_line(self.restored)
        if self.reads_bytes:
            sentences.append(
                f"no tokenizer is in it: the model reads bytes, a token is the value of a byte of UTF-8, and {BYTES_START} begins and ends a text"
            )
        return sentences


def floats_line(restored: Sequence[str]) -> list[str]:
    """The line about matrices that a model's files hold quantized, by their dtypes; none without such matrices."""
    if not restored:
        return []
    line = (
        f"{len(restored)} quantized matrices are written as the floats that their codes stand for"
    )
    narrow = sorted({dtype for dtype in restored if dtype != WIDE})
    if narrow:
        line += f", rounded to {' and '.join(narrow)}: what was measured of the codes is not of them; measure again with systolic eval"
    return [line]


def payload_of(source: ExportSource) -> ExportPayload:
    """The model of a run, or of files, under transformers' names.

    Raises: as ``source.open_run`` and :func:`systolic.formats.source.open_source`, and
        OptionError: no family of transformers computes what the model does; names the field.
    """
    return (
        file_payload(open_source(source.path))
        if in_files(source.path)
        else _run_payload(source.open_run())
    )


def file_payload(source: Source) -> ExportPayload:
    """The model of files; raises as :func:`payload_of`."""
    from systolic.formats.hugging_face.writer import outgoing

    source.verify()
    weights = outgoing(source)
    files = {name: file.read_bytes() for name, file in source.files().items()}
    if isinstance(source.model, PICTURED) and (job := source.trained_job()) is not None:
        config, files = with_pictures(weights.config, files, job)
        weights = replace(weights, config=config)
    return ExportPayload(
        model=weights,
        files=files,
        licence=source.licence,
        restored=tuple(source.dtypes()[path].name for path, _ in source.quantization.matrices),
    )


def _run_payload(run: ExportableRun) -> ExportPayload:
    from systolic.formats.hugging_face.writer import outgoing_model, with_text

    weights = outgoing_model(run.job.model, run.plain_weights, kept_config(run.path))
    data, files, starts = run.job.data, text_files(run.job.data), None
    reads_bytes = isinstance(data, TextData) and data.get_tokenizer().file() is None
    if isinstance(run.job.model, PICTURED):
        config, files = with_pictures(weights.config, files, run.job)
        weights = replace(weights, config=config)
    if isinstance(data, TextData):
        config, files = with_text(weights.config, files, data)
        weights = replace(weights, config=config)
        tokenizer = data.get_tokenizer()
        document = tokenizer.around is Around.document and bool(files)
        starts = tokenizer.start is not None if document else None
    return ExportPayload(model=weights, files=files, starts=starts, reads_bytes=reads_bytes)


def kept_config(run: Path) -> Config:
    """The config.json of the model that a run began with; {} where it began with none."""
    kept = run / TOKENIZER / CONFIG
    return read_config(kept) if kept.is_file() else {}


def text_files(data: Any) -> dict[str, bytes]:
    """Files of a job's tokenizer, chat template and preprocessing; a tokenizer of bytes has none."""
    if not isinstance(data, TextData | Recordings) or (file := data.get_tokenizer().file()) is None:
        return {}
    beside = {name: file.parent / name for name in (*TEXT_FILES, *OTHER_FILES)}
    held = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
    return held | data.get_tokenizer().files()


def compared(
    source: ExportSource,
    folder: Path,
    specs: Sequence[TensorSpec],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """``parity`` and ``notes`` of a written model: its outputs against those of its source, both computed here in float32.

    Args:
        source: The source.
        folder: The written model.
        specs: Its tensors.
        say: Called with each stage.

    Raises:
        RunError: the outputs differ by more than the tolerance.
    """
    written = open_source(folder)
    inputs = probe_inputs(written)
    if inputs is None:
        return {
            "notes": (
                f"not compared with its source: no inputs for a {type(written.model).__name__}",
            )
        }
    if (why := no_room(elements_of(specs))) is not None:
        return {"notes": (why,)}
    say("comparing")
    ours, _ = source.answers(written, inputs)
    tolerance = tolerance_of(OF_DTYPES.get(most_common(specs), "f32"), source.path)
    parity = compare(ours, source.outputs(inputs), "the source", tolerance, probe_of(written))
    if not parity.passed:
        raise RunError(
            f"what was written of {source.path} computes something else: {parity.line()}; please report it, nothing was kept"
        )
    return {"parity": parity}


def tolerance_of(precision: str, path: Path) -> float:
    """Largest difference from the source of a model written in a precision.

    It is that of 8 bits where the source rounds activations, which no float does.
    """
    if in_files(path):
        formats = [how.format for _, how in open_source(path).quantization.matrices]
        if any(each.activations for each in formats):
            return TOLERANCES["q8_0"]
    return TOLERANCES[precision]


def elements_of(specs: Sequence[TensorSpec]) -> int:
    """Elements of all tensors."""
    return sum(int(np.prod(spec.shape)) for spec in specs)


def no_room(elements: int) -> str | None:
    """Why a model of so many parameters can't be compared here; ``None`` where it can."""
    import psutil

    wanted = 4 * ROOM * elements
    free = psutil.virtual_memory().available
    if wanted <= free:
        return None
    return f"not compared with its source: float32 weights need {si(wanted, 'B')} of memory, {si(free, 'B')} free"
