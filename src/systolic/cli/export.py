"""``systolic export RUN|BUNDLE --to FORMAT --out PATH``: a trained model for another library, as programs, for a server, or without its run."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.shutdown import ends_cleanly
from systolic.core.units import duration, si
from systolic.formats.registry import PROGRAM_WRITERS, ROWS, ExportSettings, LiteQuantization
from systolic.job import Precision
from systolic.report.output import print_json
from systolic.report.progress import ProgressLine

TFLITE = ".tflite"
QUANTIZED = (LiteQuantization.dynamic.value, LiteQuantization.int8.value)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a trained model in the format of another library, as programs, a run as a Bundle, or a Bundle as an image's build folder; adapters are merged, or written alone (peft).

    A model that the format has no options for is refused, with the option's name. What is written is opened
    again and compared with its source on the same inputs before it gets its name.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file. With --edge-tpu also a .tflite file to check.
        out: The new folder; of gguf, litert and onnx the new file. Not needed to check a .tflite file.
        to: hf is a folder that transformers opens: config.json, safetensors, tokenizer; peft is a folder that PEFT opens, with a run's adapters alone; bundle is a Bundle of a run, which needs the run no more; gguf is a file that llama.cpp opens, of a language model; docker is the build folder of an image that serves a Bundle; stablehlo are programs that plain JAX reloads on cpu, tpu and cuda; savedmodel are programs for TensorFlow and TensorFlow Serving; litert is a .tflite file for phones and small devices; onnx is a file for ONNX Runtime.
        precision: Of the matrices of a gguf file, where auto keeps that of the weights; of what programs compute, f32 or bf16, where auto is f32; of litert f32, dynamic (weights in int8) or int8 (all numbers).
        for_: Of docker: what the image runs on.
        mount: Of docker: leave the Bundle out of the image; the container mounts it at /srv/model.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        batch: Of programs: examples of a call; 0 leaves them free, in litert it is 1.
        sequence: Of programs: tokens of a text; 0 leaves them free, in litert it is at most 128.
        inputs: Of programs: files to compare on, as predict takes them; by default rows of the recipe's own evaluation data.
        examples: Of programs: rows of that data.
        function: Of litert and onnx, whose files have one function: which one; by default the model's first.
        data: Of litert: a folder of files, or of folders of classes, to calibrate int8 and to measure on; by default the recipe's training and test data.
        edge_tpu: Of litert, or of a .tflite file: what the Edge TPU takes of it, operation by operation.
        python: Of savedmodel: Python of an environment with tensorflow and jax; by default this one.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Path | None = None
    to: Literal[
        "hf", "peft", "bundle", "gguf", "docker", "savedmodel", "stablehlo", "litert", "onnx"
    ] = "hf"
    precision: Literal["auto", "f32", "f16", "bf16", "q8_0", "dynamic", "int8"] = "auto"
    for_: Annotated[Literal["cpu", "tpu", "cuda"], tyro.conf.arg(name="for")] = "cpu"
    mount: bool = False
    checkpoint: str = "best"
    trust: bool = False
    batch: Annotated[int, NOT_NEGATIVE] = 0
    sequence: Annotated[int, NOT_NEGATIVE] = 0
    inputs: tuple[Path, ...] = ()
    examples: Annotated[int, COUNT] = ROWS
    function: str = ""
    data: Path | None = None
    edge_tpu: bool = False
    python: Path | None = None
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(ExportOptions, args, "systolic export")
    if options.run.suffix == TFLITE and options.edge_tpu:
        return _check_edge_tpu(options)
    if options.out is None:
        raise OptionError(
            "--out is missing; give the new folder, or with gguf, litert and onnx the new file"
        )
    begun = time.perf_counter()
    with ends_cleanly(), ProgressLine(sys.stderr, f"export {options.run.name}") as progress:
        made = _exported(options, options.out, progress.say)
    seconds = time.perf_counter() - begun
    if options.json:
        print_json({**made.to_json(), "seconds": seconds})
        return 0
    print(
        f"{made.path}: {made.kind}, {made.parameters:,} parameters, {si(made.bytes, 'B')}, in {duration(seconds)}"
    )
    for line in made.lines():
        print(line)
    return 0


def _exported(options: ExportOptions, out: Path, say: Callable[[str], None]) -> Any:
    """What was written: programs, or a model's files.

    Raises:
        OptionError: an option is given that the format does not have.
    """
    from systolic.formats.gguf.writer import GgufOptions
    from systolic.serving.docker.folder import ImageOptions
    from systolic.session.exporting import export_model, export_program

    image = ImageOptions(platform=options.for_, mount=options.mount)
    programs = options.to in PROGRAM_WRITERS
    settings = ExportSettings(
        precision=_computed(options.precision) if programs else Precision.f32,
        quantization=_quantization(options.precision) if programs else LiteQuantization.none,
        function=options.function,
        data=options.data,
        edge_tpu=options.edge_tpu,
        batch=options.batch,
        sequence=options.sequence,
        inputs=options.inputs,
        examples=options.examples,
        python=options.python,
    )
    shared = {"checkpoint": options.checkpoint, "trust": options.trust, "say": say}
    if programs:
        if image != ImageOptions():
            raise OptionError(
                f"--for and --mount are for --to docker, not {options.to}; leave them out"
            )
        return export_program(options.run, out, to=options.to, settings=settings, **shared)
    if given := settings.given():
        raise OptionError(
            f"--{next(iter(given)).replace('_', '-')} is for programs, and --to {options.to} writes none; leave it out"
        )
    gguf = GgufOptions(precision=options.precision)
    return export_model(options.run, out, to=options.to, gguf=gguf, image=image, **shared)


def _quantization(precision: str) -> LiteQuantization:
    """How LiteRT stores numbers."""
    return LiteQuantization(precision) if precision in QUANTIZED else LiteQuantization.none


def _check_edge_tpu(options: ExportOptions) -> int:
    """Prints what the Edge TPU takes of a file that is there."""
    from systolic.formats.litert.edge_tpu import edge_tpu_report
    from systolic.formats.litert.graph import read_graph

    report = edge_tpu_report(read_graph(options.run))
    if options.json:
        print_json(report.to_json())
        return 0
    for line in report.lines(str(options.run)):
        print(line)
    return 0


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
