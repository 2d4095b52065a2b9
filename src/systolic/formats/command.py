"""``systolic import`` and ``systolic export``: :func:`systolic.import_model` and :func:`systolic.export`, and what they print."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from systolic.core.arguments import OptionWords, command_of
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.reporter import working
from systolic.core.shutdown import ends_cleanly
from systolic.core.units import duration, si
from systolic.formats.registry import PROGRAM_WRITERS, ROWS, ExportSettings, LiteQuantization
from systolic.job import Precision
from systolic.report.output import or_json, warn

if TYPE_CHECKING:
    from systolic.formats.conversion import ModelExport
    from systolic.formats.export import Exported
    from systolic.formats.gguf.writer import ExportedGguf
    from systolic.formats.importing import Imported
    from systolic.formats.litert.edge_tpu import EdgeTpuReport
    from systolic.formats.litert.writer import LiteExport
    from systolic.serving.docker import ExportedImage


TFLITE = ".tflite"
QUANTIZED = (LiteQuantization.dynamic.value, LiteQuantization.int8.value)
"""Precisions of LiteRT that quantize."""


@command_of
def import_model(
    source: Path | str,
    out: Annotated[Path | str | None, OptionWords(Path | None)] = None,
    *,
    dtype: Literal["auto", "f32", "bf16"] = "auto",
    parity: bool = True,
    signature: str | None = None,
    base: Path | str | None = None,
    example: Path | str | None = None,
    python: Path | str | None = None,
) -> "Imported":
    """Writes a model of another library as a Bundle, and compares its outputs with those of that library.

    Weights are read and written one tensor at a time. Nothing is left at --out if the import fails, is
    interrupted, or computes something different from the source.

    Args:
        source: A Hugging Face folder (config.json, safetensors, tokenizer), a GGUF file, a Bundle, a PEFT folder (merged into its base), a .pt2 program of torch.export, a .keras file, a SavedModel's folder, or a PyTorch module or Keras model as file.py:function. The function returns the module with example inputs, or the Keras model.
        out: The Bundle's folder; by default bundles/NAME.
        dtype: Round the weights to f32 or bf16; auto stores each as it is.
        parity: Compare outputs with those of the other library, if it is installed.
        signature: Signature of a SavedModel; by default serving_default.
        base: Base of a PEFT folder, in place of the one that it names.
        example: An .npz file with example inputs, for a .keras file or SavedModel that leaves sizes open.
        python: Python of the environment that has the framework, such as TensorFlow's; by default this one.

    Raises:
        NotFoundError: there is no such source, or a file of it is missing.
        OptionError: the model's family, or a field of its configuration, is unknown.
        DataError: files are damaged, or tensors are missing or unknown.
        RunError: the disk is full, or the outputs differ by more than the tolerance; no Bundle is left.
        TakenError: ``out`` exists.
    """
    from systolic.formats import importing
    from systolic.formats.program.convert import Framework

    began = time.perf_counter()
    framework = Framework(signature=signature, example=_path(example), python=_path(python))
    with ends_cleanly(), working(f"import {Path(source).name}"):
        imported = importing.import_source(
            source, _path(out), dtype=dtype, parity=parity, framework=framework, base=_path(base)
        )
    return replace(imported, seconds=time.perf_counter() - began)


@command_of
def export(  # noqa: PLR0913  the options of systolic export
    run: Path | str,
    out: Annotated[Path | str | None, OptionWords(Path | None)] = None,
    *,
    to: Literal[
        "hf", "peft", "bundle", "gguf", "docker", "savedmodel", "stablehlo", "litert", "onnx"
    ] = "hf",
    precision: Literal["auto", "f32", "f16", "bf16", "q8_0", "dynamic", "int8"] = "auto",
    for_: Literal["cpu", "tpu", "cuda"] = "cpu",
    mount: bool = False,
    checkpoint: str | int = "best",
    trust: bool = False,
    batch: Annotated[int, NOT_NEGATIVE] = 0,
    sequence: Annotated[int, NOT_NEGATIVE] = 0,
    inputs: tuple[Path, ...] = (),
    examples: Annotated[int, COUNT] = ROWS,
    function: str = "",
    data: Path | str | None = None,
    edge_tpu: bool = False,
    python: Path | str | None = None,
) -> "Exported | ExportedGguf | ExportedImage | ModelExport | LiteExport | EdgeTpuReport":
    """Writes a trained model in the format of another library, as programs, as a Bundle, or as an image's build folder; adapters are merged, or written separately (peft).

    A model that the format cannot express is refused, with the name of the option. The export is opened
    again and compared with its source on the same inputs before it gets its name.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file. With --edge-tpu also a .tflite file to check.
        out: The new folder, or the new file for gguf, litert and onnx. Not needed to check a .tflite file.
        to: Format. hf: folder for transformers (config.json, safetensors, tokenizer). peft: folder for PEFT with only a run's adapters. bundle: a Bundle, which does not need the run. gguf: file of a language model for llama.cpp. docker: build folder of an image that serves a Bundle. stablehlo: programs that plain JAX loads on cpu, tpu and cuda. savedmodel: programs for TensorFlow and TensorFlow Serving. litert: .tflite file for phones and small devices. onnx: file for ONNX Runtime.
        precision: gguf: format of the matrices; auto keeps that of the weights. Programs: f32 (auto) or bf16. litert: f32, dynamic (weights in int8) or int8 (all numbers).
        for_: docker: platform of the image.
        mount: docker: leave the Bundle out of the image; the container mounts it at /srv/model.
        checkpoint: Checkpoint of a run: best, last or the number of a step.
        trust: Execute the run's recipe even if it is another user's; its digest is remembered for later commands.
        batch: Programs: examples of a call; 0 leaves the size free, and is 1 for litert.
        sequence: Programs: tokens of a text; 0 leaves the size free, and is at most 128 for litert.
        inputs: Programs: files to compare on, as for predict; by default rows of the recipe's own evaluation data.
        examples: Programs: number of rows to compare on.
        function: litert, onnx: the function of the file; by default the model's first.
        data: litert: file, folder of files, or folder for each class, to calibrate int8 and to measure on; by default the recipe's training and test data.
        edge_tpu: litert, or a .tflite file: list which operations the Edge TPU takes.
        python: savedmodel: Python of an environment with tensorflow and jax; by default this one.

    Raises:
        OptionError: the format cannot express the model (the message names the field) or has no such option; or for
            ``docker`` the path is no Bundle.
        MissingExtraError: the format's packages are not installed.
        TakenError: ``out`` exists.
        RunError: the disk is full, the run can't be opened, or the export computes something else;
            nothing is left at ``out``.
    """
    run, out = Path(run), _path(out)
    if run.suffix == TFLITE and edge_tpu:
        return _edge_tpu_report(run)
    if out is None:
        raise OptionError(
            "--out is missing; give the new folder, or with gguf, litert and onnx the new file"
        )
    programs = to in PROGRAM_WRITERS
    settings = ExportSettings(
        precision=_computed(precision) if programs else Precision.f32,
        quantization=_quantization(precision) if programs else LiteQuantization.none,
        function=function,
        data=_path(data),
        edge_tpu=edge_tpu,
        batch=batch,
        sequence=sequence,
        inputs=inputs,
        examples=examples,
        python=_path(python),
    )
    if programs and (for_ != "cpu" or mount):
        raise OptionError(f"--for and --mount are for --to docker, not {to}; leave them out")
    if not programs and (unfit := settings.given()):
        raise OptionError(
            f"--{next(iter(unfit)).replace('_', '-')} is for programs, and --to {to} writes none; leave it out"
        )
    began = time.perf_counter()
    with ends_cleanly(), working(f"export {run.name}"):
        from systolic.formats.exporting import export_model, export_program
        from systolic.formats.gguf.writer import GgufOptions
        from systolic.serving.docker import ImageOptions

        if programs:
            exported = export_program(
                run, out, to=to, settings=settings, checkpoint=checkpoint, trust=trust
            )
        else:
            exported = export_model(
                run,
                out,
                to=to,
                gguf=GgufOptions(precision=precision),
                image=ImageOptions(platform=for_, mount=mount),
                checkpoint=checkpoint,
                trust=trust,
            )
    return replace(exported, seconds=time.perf_counter() - began)


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


def _quantization(precision: str) -> LiteQuantization:
    """Quantization of LiteRT that a precision stands for."""
    return LiteQuantization(precision) if precision in QUANTIZED else LiteQuantization.none


def _computed(precision: str) -> Precision:
    """The precision that programs compute in.

    Raises:
        OptionError: they compute in no such precision.
    """
    if _quantization(precision) is not LiteQuantization.none:
        return Precision.f32
    if precision not in ("auto", "f32", "bf16"):
        raise OptionError(
            f"--precision is {precision}, which is for gguf files; programs compute in f32 or bf16"
        )
    return Precision.bf16 if precision == "bf16" else Precision.f32


def _edge_tpu_report(file: Path) -> "EdgeTpuReport":
    """Placements of the operations of a file, on the Edge TPU or the CPU."""
    from systolic.formats.litert.edge_tpu import edge_tpu_report
    from systolic.formats.litert.graph import read_graph

    return replace(edge_tpu_report(read_graph(file)), file=file)


@or_json
def show_import(imported: "Imported") -> None:
    """Prints what was imported."""
    from systolic.formats.importing import NOT_ASKED

    print(
        f"{imported.path}: {imported.parameters:,} parameters in {imported.dtype}, {si(imported.bytes, 'B')}, in {duration(imported.seconds)}"
    )
    if imported.parity is not None:
        print(imported.parity.line())
    elif imported.unchecked != NOT_ASKED:
        warn(imported.unchecked or "")
    for line in imported.notes:
        warn(line)
    if imported.unusable is None:
        print(f"next: systolic {imported.use.format(shlex.quote(str(imported.path)))}")
    else:
        warn(
            f"{imported.unusable}, then import it again: without it the Bundle computes and reads no text"
        )


@or_json
def show_export(
    exported: "Exported | ExportedGguf | ExportedImage | ModelExport | LiteExport | EdgeTpuReport",
) -> None:
    """Prints what was exported, or what the Edge TPU takes of a file."""
    from systolic.formats.litert.edge_tpu import EdgeTpuReport

    if not isinstance(exported, EdgeTpuReport):
        print(
            f"{exported.path}: {exported.kind}, {exported.parameters:,} parameters, {si(exported.bytes, 'B')}, in {duration(exported.seconds)}"
        )
    for line in exported.lines():
        print(line)
