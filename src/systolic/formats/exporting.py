"""Exports: a run or a model in files is written in a format of another library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.core.reporter import reporter
from systolic.formats.export import Exported, ExportSource
from systolic.formats.gguf.writer import ExportedGguf, GgufOptions
from systolic.formats.jobs import job_of
from systolic.formats.registry import (
    MODEL_WRITERS,
    PROGRAM_WRITERS,
    ExportSettings,
    function_of,
    in_files,
)
from systolic.formats.source import open_source
from systolic.inference.model import (
    TrainedModel,
    answers,
    from_source,
    keep_programs,
    open_model,
    prepare_model,
)
from systolic.job import Job, Precision
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.runs.bundle.folder import check_free
from systolic.serving.docker import ExportedImage, ImageOptions, export_docker
from systolic.steps.lengths import learned_text

if TYPE_CHECKING:
    from systolic.formats.conversion import ModelExport
    from systolic.formats.litert.writer import LiteExport

DOCKER = "docker"
"""An image's build folder, which is no format of a model but a way to serve one."""
FORMATS = (*MODEL_WRITERS, DOCKER)
"""Formats of :func:`export_model`."""
MOST_NAMES = 20
"""Classes whose names a line has room for."""


def export_model(
    path: Path,
    out: Path,
    *,
    to: str = "hf",
    gguf: GgufOptions = GgufOptions(),  # noqa: B008
    image: ImageOptions = ImageOptions(),  # noqa: B008
    checkpoint: str | int = "best",
    trust: bool = False,
) -> Exported | ExportedGguf | ExportedImage:
    """Writes a run, a Bundle or another model in files for another library, or a run as a Bundle; adapters are merged, but for ``peft``.

    What is written is opened again and its outputs are compared with those of its source before it gets its name.

    Args:
        path: The run's directory, or the model.
        out: The new folder, or for ``gguf`` the new file.
        to: ``hf``, what transformers opens: config.json, safetensors, tokenizer; ``peft``, the adapters of a
            run alone, which PEFT opens beside the model that the run began with; ``bundle``, which this
            library opens without the run; ``gguf``, what llama.cpp
            opens: of a language model; or ``docker``, the build folder of an image that serves a Bundle.
        gguf: For ``gguf``: the precision of the matrices.
        image: For ``docker``: what the image runs on, and whether the Bundle is in it.
        checkpoint: Of a run: ``best``, ``last`` or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field. For a Bundle:
            the path is a model in files already, or a part of the run is code of its recipe. For ``gguf``:
            no architecture of llama.cpp computes it, or there is no tokenizer that GGUF has. For ``docker``: the
            path is no Bundle.
        TakenError: ``out`` exists.
        RunError: the disk is full, the run can't be opened, or the export computes something else;
            nothing is left at ``out``.
    """
    if to not in FORMATS:
        raise OptionError(f"to is {to!r}; it takes {' or '.join(FORMATS)}")
    options = {"gguf": gguf, DOCKER: image}
    _check_used(to, options)
    if to == DOCKER:
        return export_docker(path, out, image, say=reporter().stage)
    source = ExportSource(
        path=path,
        open_run=partial(open_model, path, checkpoint, trust=trust),
        outputs=partial(_outputs, path, checkpoint, trust),
        answers=answers,
    )
    return function_of(MODEL_WRITERS[to].write)(source, out, options.get(to), reporter().stage)


def _check_used(to: str, options: Mapping[str, Any]) -> None:
    """Refuses options that a format does not have.

    Args:
        to: The format.
        options: Format to its options.

    Raises:
        OptionError: options of another format are given.
    """
    for owner, settings in options.items():
        default = type(settings)()
        if settings != default and to != owner:
            names = ", ".join(
                f"{n} {v}" for n, v in vars(settings).items() if v != vars(default)[n]
            )
            raise OptionError(f"{names} is for --to {owner} and given with --to {to}; leave it out")


def _outputs(
    path: Path, checkpoint: str | int, trust: bool, inputs: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Outputs float32[rows, ..., n] of a run or a model in files, opened for this call."""
    from systolic.formats.comparison import outputs_of

    if in_files(path):
        return answers(open_source(path), inputs)[0]
    prepared = prepare_model(path, str(checkpoint), precision=Precision.f32, trust=trust)
    return outputs_of(prepared.setup.steps, prepared.read(), inputs)


def export_program(
    path: Path,
    out: Path,
    *,
    to: str,
    settings: ExportSettings = ExportSettings(),  # noqa: B008
    checkpoint: str | int = "best",
    trust: bool = False,
) -> "ModelExport | LiteExport":
    """Writes a run, a Bundle or another model in files as programs, compared with the source; adapters are merged.

    Args:
        path: The run's directory, or the model.
        out: The new folder, or for litert and onnx the new file.
        to: One of :data:`~systolic.formats.registry.PROGRAM_WRITERS`.
        settings: How.
        checkpoint: Of a run: ``best``, ``last`` or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later.

    Raises:
        OptionError: a setting does not fit the model, or its task names no outputs.
        MissingExtraError: the format's packages are not installed.
        TakenError: ``out`` exists.
        RunError: the run can't be opened, a program can't be written or differs from its source, or the disk is
            full; nothing is left at ``out``.
    """
    from systolic.formats.conversion import class_names, input_notes, with_codes
    from systolic.formats.examples import example_inputs
    from systolic.formats.inference import exportable

    if to not in PROGRAM_WRITERS:
        raise OptionError(f"to is {to!r}; programs are written as {' or '.join(PROGRAM_WRITERS)}")
    check_free(out)
    form = PROGRAM_WRITERS[to]
    if form.suffix and out.suffix != form.suffix:
        raise OptionError(
            f"--out is {out}, and --to {to} writes one file; give a name that ends in {form.suffix}, such as {out}{form.suffix}"
        )
    settings.check_format(to)
    if form.check:
        function_of(form.check)(settings)
    model = _opened(path, checkpoint, settings, trust)
    weights = {name: np.asarray(array) for name, array in model.plain_weights.items()}
    leaving = exportable(model.job, weights, settings.precision, settings.sizes)
    leaving, notes = with_codes(leaving, kept=form.codes)
    notes = (*notes, *_warnings(model.job), *input_notes(model.job))
    notes = (*notes, *_length_note(model.job, settings.sequence))
    examples = example_inputs(leaving, settings.examples, settings.inputs)
    if settings.sizes:
        for name, function in leaving.functions.items():
            leaving.check_memory(name, next(examples.calls(function)))
    exported = function_of(form.write)(leaving, examples, out, settings, reporter().stage)
    return replace(exported, notes=(*notes, *_classes(class_names(model.job), form.labels)))


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
) -> TrainedModel:
    """The model; what it does not have is refused before its weights are read."""
    from systolic.formats.inference import exportable

    def check(job: Job) -> None:
        exportable(job, {}, settings.precision, settings.sizes).function(settings.function or None)
        reporter().stage("reading weights")

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
    """Warnings about what the outputs of an exported model depend on besides its weights."""
    lines = []
    if job.precision.weight_format is not None:
        lines.append(
            f"the matrices are float32, not rounded as in its training ({job.precision.value}), so that its outputs are others than those of systolic eval: export what systolic quantize --to {job.precision.weight_format.value} writes"
        )
    model = job.model
    if isinstance(model, Decoder) and model.experts > 1 and model.dispatch is Dispatch.slots:
        lines.append(
            "the experts have slots for a share of a text's tokens, of which padding takes some: give texts without padding"
        )
    return lines


def _length_note(job: Job, sequence: int) -> list[str]:
    """The warning that a fixed length is beyond what a run was trained on, which rotary embeddings allow."""
    learned = learned_text(job)
    if learned is None or sequence <= learned:
        return []
    return [
        f"texts of {sequence} tokens are longer than the {learned} of a row in training; what lies beyond is worse"
    ]
