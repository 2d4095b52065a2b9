"""``systolic export RUN|BUNDLE --to hf|bundle|gguf|docker --out PATH``: a trained model for another library, for a server, or without its run."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from systolic.cli.output import print_json
from systolic.cli.parse import parse
from systolic.core.units import duration, si
from systolic.report.progress import ProgressLine


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a trained model in the format of another library, a run as a Bundle, or a Bundle as an image's build folder; adapters are merged.

    A model that the format has no options for is refused, with the option's name. A GGUF file is opened again and
    compared with its source on the same inputs before it gets its name.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        out: The new folder, or of gguf the new file.
        to: hf is a folder that transformers opens: config.json, safetensors, tokenizer; bundle is a Bundle of a run's language model; gguf is a file that llama.cpp opens, of a language model; docker is the build folder of an image that serves a Bundle.
        precision: Of the matrices of a gguf file; auto keeps that of the weights.
        for_: Of docker: what the image runs on.
        mount: Of docker: leave the Bundle out of the image; the container mounts it at /srv/model.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Path
    to: Literal["hf", "bundle", "gguf", "docker"] = "hf"
    precision: Literal["auto", "f32", "f16", "bf16", "q8_0"] = "auto"
    for_: Annotated[Literal["cpu", "tpu", "cuda"], tyro.conf.arg(name="for")] = "cpu"
    mount: bool = False
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(ExportOptions, args, "systolic export")
    from systolic.session.docker.folder import ImageOptions
    from systolic.session.exporting import export_model
    from systolic.session.exporting_gguf import GgufOptions

    begun = time.perf_counter()
    with ProgressLine(sys.stderr, f"export {options.run.name}") as progress:
        made = export_model(
            options.run,
            options.out,
            to=options.to,
            gguf=GgufOptions(precision=options.precision),
            image=ImageOptions(platform=options.for_, mount=options.mount),
            checkpoint=options.checkpoint,
            trust=options.trust,
            say=progress.say,
        )
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
