"""Exports of a model as programs: opened, made pure functions, written in a format and compared with the source."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from systolic.artifact.bundle import check_free
from systolic.core.arguments import with_types
from systolic.core.errors import OptionError
from systolic.formats.jobs import job_of
from systolic.formats.registry import LITERT, ExportSettings
from systolic.formats.source import open_source
from systolic.job import Job, Precision
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.session.trained import (
    TrainedModel,
    from_source,
    in_files,
    keep_programs,
    prepare_model,
)
from systolic.steps.lengths import learned_text

if TYPE_CHECKING:
    from systolic.formats.conversion import ModelExport
    from systolic.formats.litert.writer import LiteExport


class ProgramFormat(NamedTuple):
    """Where a format is written: names in a module that is imported when it is asked for."""

    module: str
    write: str
    """Function of (model, example inputs, out, settings, say) to a ModelExport."""
    check: str = ""
    """Function of the settings that refuses an environment without its packages, before a model is opened."""
    suffix: str = ""
    """Of the one file that it writes; "" for a folder."""
    codes: bool = False
    """Whether quantized matrices stay in codes of 8 bits."""
    labels: str = ""
    """Where the names of classes are."""


WRITERS = {
    LITERT: ProgramFormat(
        "systolic.formats.litert.writer",
        "export_litert",
        "check_litert",
        ".tflite",
        labels="labels.txt inside, which unzip -p shows",
    ),
    "onnx": ProgramFormat(
        "systolic.formats.onnx",
        "export_onnx",
        "check_onnx",
        ".onnx",
        labels="labels of its metadata, a JSON list",
    ),
    "savedmodel": ProgramFormat(
        "systolic.formats.tensorflow.writer",
        "export_saved_model",
        "check_tensorflow",
        codes=True,
        labels="1/assets.extra/labels.txt",
    ),
    "stablehlo": ProgramFormat(
        "systolic.formats.stablehlo",
        "export_stablehlo",
        codes=True,
        labels="labels of manifest.json",
    ),
}
"""Formats of programs."""
MOST_NAMES = 20
"""Classes whose names a line has room for."""


@with_types
def export_program(
    path: Path | str,
    out: Path | str,
    *,
    to: str,
    settings: ExportSettings = ExportSettings(),  # noqa: B008
    checkpoint: str | int = "best",
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> "ModelExport | LiteExport":
    """Writes a run, a Bundle or another model in files as programs, compared with the source; adapters are merged.

    Args:
        path: The run's directory, or the model.
        out: The new folder, or for litert and onnx the new file.
        to: One of :data:`WRITERS`.
        settings: How.
        checkpoint: Of a run: ``best``, ``last`` or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later.
        say: Called with each stage.

    Raises:
        OptionError: a setting does not fit the model, or its task names no outputs.
        MissingExtraError: the format's packages are not installed.
        TakenError: there is something at ``out``.
        RunError: the run can't be opened, a program can't be written or differs from its source, or the disk is
            full; nothing is left at ``out``.
    """
    from systolic.formats.conversion import class_names, text_notes, with_codes
    from systolic.formats.examples import example_inputs
    from systolic.formats.inference import exportable

    if to not in WRITERS:
        raise OptionError(f"to is {to!r}; programs are written as {' or '.join(WRITERS)}")
    path, out = Path(path), Path(out)
    check_free(out)
    form = WRITERS[to]
    if form.suffix and out.suffix != form.suffix:
        raise OptionError(
            f"--out is {out}, and --to {to} writes one file; give a name that ends in {form.suffix}, such as {out}{form.suffix}"
        )
    settings.check_format(to)
    functions = vars(import_module(form.module))
    if form.check:
        functions[form.check](settings)
    model = _opened(path, checkpoint, settings, trust, say)
    weights = {name: np.asarray(array) for name, array in model.plain_weights.items()}
    leaving = exportable(model.job, weights, settings.precision, settings.sizes)
    leaving, notes = with_codes(leaving, kept=form.codes)
    notes = (*notes, *_warnings(model.job), *text_notes(model.job))
    notes = (*notes, *_length_note(model.job, settings.sequence))
    examples = example_inputs(leaving, settings.examples, settings.inputs)
    if settings.sizes:
        for name, function in leaving.functions.items():
            leaving.check_memory(name, next(examples.calls(function)))
    made = functions[form.write](leaving, examples, out, settings, say)
    return replace(made, notes=(*notes, *_classes(class_names(model.job), form.labels)))


def _classes(names: Sequence[str], where: str) -> list[str]:
    """The line that says the classes in the order of the outputs; none where they have no names."""
    if not names:
        return []
    shown = ", ".join(names)
    if len(names) > MOST_NAMES:
        shown = f"{names[0]} to {names[-1]} ({len(names)})"
    return [f"classes in the order of its outputs: {shown}; their names are in {where}"]


def _opened(
    path: Path,
    checkpoint: str | int,
    settings: ExportSettings,
    trust: bool,
    say: Callable[[str], None],
) -> TrainedModel:
    """The model; what it does not have is refused before its weights are read."""
    from systolic.formats.inference import exportable

    def check(job: Job) -> None:
        exportable(job, {}, settings.precision, settings.sizes).function(settings.function or None)
        say("reading weights")

    # A model in files computes without its tokenizer too.
    if in_files(path):
        source = open_source(path)
        check(job_of(source, texts=False))
        return from_source(source, Precision.f32, texts=False)
    keep_programs()
    prepared = prepare_model(path, str(checkpoint), trust=trust)
    check(prepared.setup.job)
    return TrainedModel(path, prepared.setup, prepared.read(), None)


def _warnings(job: Job) -> list[str]:
    """What the outputs of an exported model depend on, beside what it was compared with."""
    found = []
    if job.precision.weight_format is not None:
        found.append(
            f"the matrices are float32, not rounded as in its training ({job.precision.value}), so that its outputs are others than those of systolic eval: export what systolic quantize --to {job.precision.weight_format.value} writes"
        )
    model = job.model
    if isinstance(model, Decoder) and model.experts > 1 and model.dispatch is Dispatch.slots:
        found.append(
            "the experts have slots for a share of a text's tokens, of which padding takes some: give texts without padding"
        )
    return found


def _length_note(job: Job, sequence: int) -> list[str]:
    """That a fixed length is beyond what a run was trained on, which rotary embeddings allow."""
    learned = learned_text(job)
    if learned is None or sequence <= learned:
        return []
    return [
        f"texts of {sequence} tokens are longer than the {learned} of a row in training; what lies beyond is worse"
    ]
