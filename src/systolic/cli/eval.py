"""``systolic eval RUN``: the task's metrics on held-out data."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.output import print_json
from systolic.cli.parse import parse
from systolic.job import Split


def run(args: Sequence[str]) -> int:
    """The verb."""
    return parse(evaluate, args, "systolic eval")


def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    split: Split | None = None,
    checkpoint: str = "best",
    batches: int = 0,
    trust: bool = False,
    json: bool = False,
) -> int:
    """Evaluates a run on its held-out data.

    Args:
        run: The run's directory.
        split: Which part; by default every held-out part there is.
        checkpoint: best, last or the number of a step.
        batches: Only the first so many batches; 0 is all.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """
    from systolic.cli.trained import load
    from systolic.core.errors import DataError
    from systolic.steps.programs import jit_evaluate
    from systolic.train.evaluate import evaluate as over

    trained = load(run, checkpoint, trust=trust)
    job, steps = trained.setup.job, trained.setup.steps
    splits = (
        [split]
        if split
        else [one for one in (Split.validation, Split.test) if job.data.size(one) != 0]
    )
    if not splits:
        raise DataError(
            f"{job.name} has no held-out data; choose --split train, or give the recipe data for validation"
        )
    program = jit_evaluate(steps)
    metrics = {
        one.value: over(
            job, steps, program, trained.weights.params, trained.weights.rest, one, batches
        )
        for one in splits
    }
    _name_skipped()
    if json:
        print_json(
            {
                "run": str(run),
                "step": trained.weights.step,
                "metrics": metrics,
                "references": dict(job.data.references()),
            }
        )
        return 0
    print(f"{run}, step {trained.weights.step}")
    for name, values in metrics.items():
        print(
            f"  {name:<10}  "
            + "  ".join(f"{key} {value:.4f}" for key, value in sorted(values.items()))
        )
    for key, value in job.data.references().items():
        print(f"  for comparison: {key} {value:.4f}")
    return 0


def _name_skipped() -> None:
    """Damaged files that count in no metric, a line each."""
    from systolic.data.skipped import FILES

    for line in FILES.take():
        print(f"systolic: {line}; it was left out", file=sys.stderr)
