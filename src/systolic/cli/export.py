"""``systolic export RUN|BUNDLE --to hf|bundle --out DIR``: a trained model for another library, or without its run."""

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
    """Writes a trained model in the format of another library, or a run as a Bundle; adapters are merged.

    A model that transformers has no options for is refused, with the option's name.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        out: The new folder.
        to: hf is a folder that transformers opens: config.json, safetensors, tokenizer; bundle is a Bundle of a run's language model.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Path
    to: Literal["hf", "bundle"] = "hf"
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(ExportOptions, args, "systolic export")
    from systolic.session.exporting import export_model

    begun = time.perf_counter()
    with ProgressLine(sys.stderr, f"export {options.run.name}") as progress:
        made = export_model(
            options.run,
            options.out,
            to=options.to,
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
    return 0
