"""``systolic predict RUN|BUNDLE|DIR FILES...``: the model's answer for each file or text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from systolic.cli.output import print_json, warn
from systolic.cli.parse import parse
from systolic.core.errors import NotFoundError, OptionError

SHOWN = 4
"""Numbers of a vector that are printed."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Labels files with a trained model; a language model scores texts in bits per byte, a model of embeddings turns them into vectors, Whisper writes down sound files.

    A file that can't be read is named, the others are answered, and the exit code is 1.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        files: Images or arrays for an image model, files of text for a language model, recordings for Whisper; for a model of embeddings texts, or their files.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    files: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(PredictOptions, args, "systolic predict")
    files = options.files
    if not files:
        raise OptionError(
            f"systolic predict {options.run} needs files; name one or more after the run"
        )
    from systolic.interop.source import known_source
    from systolic.session.trained import open_model

    if not known_source(options.run):
        _check(files)
    model = open_model(options.run, options.checkpoint, trust=options.trust, warn=warn)
    if not model.takes_texts:
        _check(files)
    found: list[dict[str, Any]] = []
    for file, answer in model.predictions(files):
        found.append({"file": str(file), **answer})
        if "error" in answer:
            warn(answer["error"])
        elif not options.json:
            told = "  ".join(f"{name} {_text(value)}" for name, value in answer.items())
            print(f"{file}  {told}")
    if options.json:
        print_json({"run": str(options.run), "step": model.step, "predictions": found})
    failed = sum("error" in answer for answer in found)
    if failed:
        warn(f"no answer for {failed} of {len(found)} files; see the lines above")
    return 1 if failed else 0


def _check(files: Sequence[str]) -> None:
    if not any(Path(file).is_file() for file in files):
        raise NotFoundError(f"{files[0]} is not a file; check the path")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list) and len(value) > SHOWN and isinstance(value[0], float):
        return (
            f"{' '.join(map(_text, value[:SHOWN]))} ... ({len(value)} numbers, --json prints all)"
        )
    return str(value)
