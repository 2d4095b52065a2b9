"""``systolic predict RUN FILES...``: the model's answer for each file."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from systolic.cli.output import print_json
from systolic.cli.parse import parse
from systolic.core.errors import NotFoundError, OptionError


def run(args: Sequence[str]) -> int:
    """The verb."""
    return parse(predict, args, "systolic predict")


def predict(
    run: Annotated[Path, tyro.conf.Positional],
    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    checkpoint: str = "best",
    trust: bool = False,
    json: bool = False,
) -> int:
    """Labels files with a trained model; a language model scores texts in bits per byte.

    A file that can't be read is named, the others are answered, and the exit code is 1.

    Args:
        run: The run's directory.
        files: Images or arrays for an image model, texts for a language model.
        checkpoint: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """
    if not files:
        raise OptionError(f"systolic predict {run} needs files; name one or more after the run")
    if not any(file.is_file() for file in files):
        raise NotFoundError(f"{files[0]} is not a file; check the path")
    from systolic.cli.trained import load
    from systolic.training.predict import predictions

    trained = load(run, checkpoint, trust=trust)
    found: list[dict[str, Any]] = []
    for file, answer in predictions(trained.setup, trained.weights, files):
        found.append({"file": str(file), **answer})
        if "error" in answer:
            print(f"systolic: {answer['error']}", file=sys.stderr)
        elif not json:
            print(
                f"{file}  " + "  ".join(f"{name} {_text(value)}" for name, value in answer.items())
            )
    if json:
        print_json({"run": str(run), "step": trained.weights.step, "predictions": found})
    failed = sum("error" in answer for answer in found)
    if failed:
        print(
            f"systolic: no answer for {failed} of {len(found)} files; see the lines above",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
