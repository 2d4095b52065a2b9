"""``systolic eval RUN``: the task's metrics on held-out data."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.output import print_json
from systolic.cli.parse import parse
from systolic.cli.target import existing
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.ranges import NOT_NEGATIVE
from systolic.job import Job, Split


def run(args: Sequence[str]) -> int:
    """The verb."""
    return parse(evaluate, args, "systolic eval")


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    split: Split | None = None,
    path: Path | None = None,
    checkpoint: str = "best",
    batches: Annotated[int, NOT_NEGATIVE] = 0,
    trust: bool = False,
    json: bool = False,
) -> int:
    """Evaluates a run on its held-out data, or on other data.

    Args:
        run: The run's directory.
        split: Which part; by default every held-out part there is.
        path: Other data for it, such as new.jsonl, read as the run's own was; all of it is evaluated.
        checkpoint: best, last or the number of a step.
        batches: Only the first so many batches; 0 is all.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """
    from systolic.cli.trained import load
    from systolic.steps.programs import jit_evaluate
    from systolic.training.evaluate import evaluate as over

    if path is not None and split is not None:
        raise OptionError(
            f"--split {split.value} is a part of the run's own data and --path is other data; give one of them"
        )
    trained = load(run, checkpoint, trust=trust)
    steps, weights = trained.setup.steps, trained.weights
    job = other(trained.setup.job, path)
    try:
        chosen = splits(job, split)
    except NotFoundError as error:
        gone = str(error).partition("; ")[0]
        raise NotFoundError(f"{gone}; give {run} other data with --path") from error
    program = jit_evaluate(steps)
    metrics = {
        str(path or one.value): over(
            job, steps, program, weights.params, weights.model_state, one, batches
        )
        for one in chosen
    }
    _name_skipped()
    baselines = dict(job.data.baselines())
    if json:
        print_json(
            {"run": str(run), "step": weights.step, "metrics": metrics, "baselines": baselines}
        )
        return 0
    print(f"{run}, step {weights.step}")
    for name, values in metrics.items():
        print(
            f"  {name:<10}  "
            + "  ".join(f"{key} {value:.4f}" for key, value in sorted(values.items()))
        )
    for key, value in baselines.items():
        print(f"  for comparison: {key} {value:.4f}")
    return 0


def _name_skipped() -> None:
    """Damaged files that count in no metric, a line each."""
    from systolic.data.skipped_files import FILES

    for line in FILES.take():
        print(f"systolic: {line}; it was left out", file=sys.stderr)


def other(job: Job, path: Path | None) -> Job:
    """The job on the data at a path, where one is given.

    Raises:
        NotFoundError: nothing is there.
        OptionError: the job's kind of data can't be read from elsewhere.
    """
    if path is None:
        return job
    return replace(job, data=job.data.at(existing(str(path)).absolute()))


def splits(job: Job, asked: Split | None) -> list[Split]:
    """The splits to evaluate: the one asked for, else all that are held out and not empty.

    Raises:
        OptionError: there is none, or the one asked for is empty.
    """
    held_out = [one for one in (Split.validation, Split.test) if job.data.size(one) != 0]
    if asked is None and not held_out:
        raise OptionError(
            f"{job.name} has no held-out data; choose --split train, or give the recipe data for validation"
        )
    if asked is not None and job.data.size(asked) == 0:
        others = " or ".join(one.value for one in (*held_out, Split.train) if one is not asked)
        raise OptionError(f"{job.name} has no {asked.value} data; choose --split {others}")
    return held_out if asked is None else [asked]
