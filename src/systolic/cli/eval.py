"""``systolic eval RUN``: the task's metrics on held-out data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.core.ranges import NOT_NEGATIVE
from systolic.job import Split
from systolic.report.output import print_json, warn


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluates a run on its held-out data, or on other data.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        split: Which part; by default every held-out part there is.
        path: Other data for it, such as new.jsonl, read as the run's own was; all of it is evaluated.
        checkpoint: Of a run: best, last or the number of a step.
        batches: Only the first so many batches; 0 is all.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional]
    split: Split | None = None
    path: Path | None = None
    checkpoint: str = "best"
    batches: Annotated[int, NOT_NEGATIVE] = 0
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(EvalOptions, args, "systolic eval")
    from systolic.inference.evaluation import check_data
    from systolic.inference.model import open_model

    check_data(options.split, options.path)
    model = open_model(options.run, options.checkpoint, trust=options.trust, warn=warn)
    metrics = model.evaluate(options.split, path=options.path, batches=options.batches)
    baselines = model.baselines_of(options.path)
    if options.json:
        found = {"run": str(options.run), "step": model.step}
        print_json({**found, "metrics": metrics, "baselines": baselines})
        return 0
    print(f"{options.run}, step {model.step}" if model.step else options.run)
    for name, values in metrics.items():
        told = "  ".join(f"{key} {value:.4f}" for key, value in sorted(values.items()))
        print(f"  {name:<10}  {told}")
    for key, value in baselines.items():
        print(f"  for comparison: {key} {value:.4f}")
    return 0
