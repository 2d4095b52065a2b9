"""A run or a model in files on its way out: its weights under transformers' names, and the files of its text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.run import JOB, TOKENIZER
from systolic.artifact.tensors import TensorSpec
from systolic.core.errors import RunError
from systolic.core.units import si
from systolic.data.audio.recordings import Recordings
from systolic.data.text.text_data import TextData
from systolic.data.text.tokenizer import Around
from systolic.formats.comparison import compare
from systolic.formats.gguf.writer import OF_DTYPES
from systolic.formats.hugging_face.preprocessor import PICTURED, with_pictures
from systolic.formats.hugging_face.writer import Outgoing, outgoing, outgoing_model, with_text
from systolic.formats.probe import probe_of
from systolic.formats.source import OTHER_FILES, TEXT_FILES, known_source, most_common, open_source
from systolic.job import Precision
from systolic.models.families import CONFIG, Config, read_config
from systolic.session.replaying import answers, probe_inputs
from systolic.session.trained import TrainedModel, open_model, prepare_model

TOLERANCES = {"f32": 1e-4, "f16": 0.02, "bf16": 0.1, "q8_0": 0.2}
"""Largest difference over the largest output: what rounding makes is far below, rows in a wrong order far above."""
ROOM = 1.25
"""Memory of float32 weights and of what is computed with them, over the weights alone."""
WIDE = "float32"
"""Dtype that holds what a code stands for as it is."""


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A model with its files."""

    made: Outgoing
    files: dict[str, bytes]
    """Name to content of the files of tokenizer, chat template and preprocessing."""
    starts: bool | None = None
    """Whether a prompt begins with the token that begins a text; ``None`` leaves it to the tokenizer's post-processor."""
    licence: str | None = None
    reads_bytes: bool = False
    """Whether a token is a byte, for which there is no tokenizer's file."""
    restored: tuple[str, ...] = ()
    """Dtypes of the matrices that its files hold quantized; they leave as floats."""


def floats_line(restored: Sequence[str]) -> list[str]:
    """The line about matrices that a model's files hold quantized, by their dtypes; none where it has none."""
    if not restored:
        return []
    line = (
        f"{len(restored)} quantized matrices are written as the floats that their codes stand for"
    )
    narrow = sorted({one for one in restored if one != WIDE})
    if narrow:
        line += f", rounded to {' and '.join(narrow)}: what was measured of the codes is not of them; measure again with systolic eval"
    return [line]


def leaving(path: Path, checkpoint: str | int, *, trust: bool) -> Leaving:
    """A run's model, or one in files.

    Args:
        path: The run's directory, or the model.
        checkpoint: Of a run.
        trust: Execute the run's recipe although it is not yours.

    Raises: as :func:`systolic.session.exporting.export_model`.
    """
    if not in_files(path):
        return leaving_run(open_model(path, checkpoint, trust=trust))
    source = open_source(path)
    source.verify()
    made = outgoing(source)
    files = {name: file.read_bytes() for name, file in source.files().items()}
    if isinstance(source.model, PICTURED) and (job := source.trained_job()) is not None:
        config, files = with_pictures(made.config, files, job)
        made = replace(made, config=config)
    return Leaving(
        made=made,
        files=files,
        licence=source.licence,
        restored=tuple(source.dtypes()[path].name for path, _ in source.quantization.matrices),
    )


def in_files(path: Path) -> bool:
    """Whether a path is a model in files and no run."""
    return known_source(path) and not (path / JOB).is_file()


def leaving_run(model: TrainedModel) -> Leaving:
    """A run's model."""
    made = outgoing_model(model.job.model, model.plain_weights, origin_of(model))
    data, files, starts = model.job.data, text_files(model.job.data), None
    reads_bytes = isinstance(data, TextData) and data.get_tokenizer().file() is None
    if isinstance(model.job.model, PICTURED):
        config, files = with_pictures(made.config, files, model.job)
        made = replace(made, config=config)
    if isinstance(data, TextData):
        config, files = with_text(made.config, files, data)
        made = replace(made, config=config)
        tokenizer = data.get_tokenizer()
        document = tokenizer.around is Around.document and bool(files)
        starts = tokenizer.start is not None if document else None
    return Leaving(made=made, files=files, starts=starts, reads_bytes=reads_bytes)


def origin_of(model: TrainedModel) -> Config:
    """The config.json of the model that a run began with; {} where it began with none."""
    kept = model.path / TOKENIZER / CONFIG
    return read_config(kept) if kept.is_file() else {}


def text_files(data: Any) -> dict[str, bytes]:
    """Files of a job's tokenizer, chat template and preprocessing; a tokenizer of bytes has none."""
    if not isinstance(data, TextData | Recordings) or (file := data.get_tokenizer().file()) is None:
        return {}
    beside = {name: file.parent / name for name in (*TEXT_FILES, *OTHER_FILES)}
    found = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
    return found | data.get_tokenizer().files()


def checked(
    path: Path,
    checkpoint: str | int,
    folder: Path,
    specs: Sequence[TensorSpec],
    *,
    trust: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """``parity`` and ``notes`` of a model that was written: its outputs against those of its source, both computed here in float32.

    Args:
        path: The source: a run or a model in files.
        checkpoint: Of a run.
        folder: What was written.
        specs: Its tensors.
        trust: Execute the run's recipe although it is not yours.
        say: Called with each stage.

    Raises:
        RunError: the outputs are others.
    """
    made = open_source(folder)
    inputs = probe_inputs(made)
    if inputs is None:
        return {
            "notes": (f"not compared with its source: no inputs for a {type(made.model).__name__}",)
        }
    if (why := no_room(elements_of(specs))) is not None:
        return {"notes": (why,)}
    say("comparing")
    ours, _ = answers(made, inputs)
    tolerance = tolerance_of(OF_DTYPES.get(most_common(specs), "f32"), path)
    found = compare(
        ours,
        outputs_of_source(path, checkpoint, trust, inputs),
        "the source",
        tolerance,
        probe_of(made),
    )
    if not found.passed:
        raise RunError(
            f"what was written of {path} computes something else: {found.line()}; please report it, nothing was kept"
        )
    return {"parity": found}


def tolerance_of(precision: str, path: Path) -> float:
    """Largest difference of what is written in a precision from its source; that of 8 bits where the source rounds activations, which no float does."""
    if in_files(path):
        formats = [how.format for _, how in open_source(path).quantization.matrices]
        if any(one.activations for one in formats):
            return TOLERANCES["q8_0"]
    return TOLERANCES[precision]


def outputs_of_source(
    path: Path, checkpoint: str | int, trust: bool, inputs: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Outputs float32[rows, ..., n] of a run or a model in files."""
    from systolic.formats.probe import outputs_of

    if in_files(path):
        return answers(open_source(path), inputs)[0]
    made = prepare_model(path, str(checkpoint), precision=Precision.f32, trust=trust)
    return outputs_of(made.setup.steps, made.read(), inputs)


def elements_of(specs: Sequence[TensorSpec]) -> int:
    """Elements of all tensors."""
    return sum(int(np.prod(one.shape)) for one in specs)


def no_room(elements: int) -> str | None:
    """Why a model of so many parameters can't be compared here; ``None`` where it can."""
    import psutil

    wanted = 4 * ROOM * elements
    free = psutil.virtual_memory().available
    if wanted <= free:
        return None
    return f"not compared with its source: float32 weights need {si(wanted, 'B')} of memory, {si(free, 'B')} free"
