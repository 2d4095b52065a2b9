"""``systolic import SOURCE``: a model of another library as a Bundle."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from systolic.cli.parse import parse
from systolic.core.shutdown import ends_cleanly
from systolic.core.units import duration, si
from systolic.report.output import print_json, warn
from systolic.report.progress import ProgressLine


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Writes a model of another library as a Bundle, and compares its outputs with those of that library.

    Weights are read and written one tensor at a time. Nothing is left at --out if the import fails, is
    interrupted, or computes something else than the source.

    Args:
        source: A Hugging Face folder (config.json, safetensors, tokenizer), a GGUF file, a Bundle, or a PEFT folder, which
            is merged into its base; a PyTorch
            module or Keras model as file.py:function (a function that returns the module with example
            inputs, or the Keras model), a .pt2 program of torch.export, a .keras file, or a SavedModel's
            folder.
        out: The Bundle's folder; by default bundles/NAME.
        dtype: Round the weights to f32 or bf16; auto stores each as it is.
        parity: Compare outputs with those of the other library, where it is installed.
        signature: Signature of a SavedModel; by default serving_default.
        base: Of a PEFT folder: its base, in place of the one that it names.
        example: An .npz file with example inputs, for a .keras file or SavedModel that leaves sizes open.
        python: Python of the environment that has the framework, such as TensorFlow's; by default this one.
        json: Print one JSON object.
    """

    source: Annotated[Path, tyro.conf.Positional]
    out: Path | None = None
    dtype: Literal["auto", "f32", "bf16"] = "auto"
    parity: bool = True
    signature: str | None = None
    base: Path | None = None
    example: Path | None = None
    python: Path | None = None
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(ImportOptions, args, "systolic import")
    from systolic.formats.program.convert import Framework
    from systolic.formats.importing import import_model

    begun = time.perf_counter()
    with ends_cleanly(), ProgressLine(sys.stderr, f"import {options.source.name}") as progress:
        made = import_model(
            options.source,
            options.out,
            dtype=options.dtype,
            parity=options.parity,
            framework=Framework(
                signature=options.signature, example=options.example, python=options.python
            ),
            base=options.base,
            say=progress.say,
        )
    seconds = time.perf_counter() - begun
    if options.json:
        print_json({**made.to_json(), "seconds": seconds})
        return 0
    print(
        f"{made.path}: {made.parameters:,} parameters in {made.dtype}, {si(made.bytes, 'B')}, in {duration(seconds)}"
    )
    if made.parity is not None:
        print(made.parity.line())
    elif options.parity:
        warn(made.unchecked or "")
    for line in made.notes:
        warn(line)
    if made.unusable is None:
        print(f"next: systolic {made.use.format(shlex.quote(str(made.path)))}")
    else:
        warn(
            f"{made.unusable}, then import it again: without it the Bundle computes and reads no text"
        )
    return 0
