"""Answers of the compiler that an explanation, a search for a fit and a plan ask for, kept for tests.

``python -m benchmarks.plan.answers --out answers.json`` explains a slow step, makes one fit that does not, and plans a
mixture, each with the compiler, and writes step times and memory of every candidate that was compiled
(tests/recorded/plan/answers.json). A file that exists keeps its rows.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plan.pruned import row
from systolic import recipes
from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.core.files import write_json
from systolic.explaining.explainer import StepExplainer
from systolic.forecasting import Forecast
from systolic.job import Job
from systolic.planning.analytic import facts_of
from systolic.planning.candidate import Candidate
from systolic.planning.fit_ladder import find_fit
from systolic.planning.goal import Goal
from systolic.planning.search import (
    CandidateEvaluator,
    CompilingEvaluator,
    Limits,
    PendingForecast,
    Search,
)
from systolic.recipes.jobs import source_of

DENSE = {"layers": 16, "d_model": 2048, "d_ff": 8192, "heads": 16, "kv_heads": 16, "head_dim": 128}
CASES: dict[str, dict[str, Any]] = {
    "slow": {
        "target": "lm",
        "slice": "v5e-16",
        "options": {
            "model": {**DENSE, "vocab": 32768},
            "sequence": 2048,
            "batch": 16,
            "precision": "f32",
            "layout": {"fsdp": 1, "tensor": 16},
        },
    },
    "unfit": {
        "target": "llama-3.1-8b",
        "slice": "v5e-16",
        "options": {"batch": 64, "sequence": 8192},
    },
    "mixture": {"target": "mixtral-8x7b", "slice": "v5e-256", "options": {"batch": 1024}},
}


def job_of(case: dict[str, Any]) -> Job:
    """The job of a case."""
    if case["target"] == "lm":
        recipe = recipes.find("lm")
        return recipe(recipes.typed(recipe, case["options"]))
    return source_of(case["target"], case["options"]).job


class Recording(CandidateEvaluator):
    """Compiles, and keeps every answer in ``rows``."""

    def __init__(self, workers: int, rows: dict[str, Any]) -> None:
        self._inner, self._rows = CompilingEvaluator(workers), rows

    def submit(self, job: Job, candidate: Candidate, *, full: bool) -> PendingForecast:
        pending = self._inner.submit(job, candidate, full=full)
        return _Kept(pending, job, candidate, self._rows)

    def __exit__(self, *why: Any) -> None:
        self._inner.__exit__(*why)


class _Kept:
    def __init__(
        self, pending: PendingForecast, job: Job, candidate: Candidate, rows: dict[str, Any]
    ) -> None:
        self._pending, self._job, self._candidate, self._rows = pending, job, candidate, rows

    def wait(self, seconds: float) -> bool:
        return self._pending.wait(seconds)

    def result(self) -> Forecast:
        made = self._pending.result()
        self._rows[key(self._candidate)] = answer(row(self._job, self._candidate, made))
        return made


def key(one: Candidate) -> str:
    """A candidate as text, with its batch and precision."""
    return f"{one.text} batch {one.batch} {one.precision.value}"


def answer(found: dict[str, Any]) -> list[Any]:
    """Step seconds (None where it does not fit) and bytes."""
    return [found["step_seconds"], found["peak_bytes"]]


def run(name: str, case: dict[str, Any], evaluator: Callable[[int], Recording]) -> None:
    """Explains, fits or plans a case."""
    job, on = job_of(case), slice(case["slice"])
    flags = resolved("", on.chip)
    if name == "slow":
        StepExplainer(job=job, on=on, flags=flags, workers=1, evaluator=evaluator).explain()
    elif name == "unfit":
        find_fit(facts_of(job), on, lambda _: flags, 1, evaluator=evaluator)
    else:
        limits = Limits(programs=24, finalists=0, workers=1)
        goal = Goal(units=1e11)
        Search(
            facts=facts_of(job), slices=[on], goal=goal, limits=limits, evaluator=evaluator
        ).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    made = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for name, case in CASES.items():
        rows: dict[str, Any] = made.get(name, {}).get("rows", {})
        try:
            run(name, case, lambda workers, rows=rows: Recording(workers, rows))
        finally:
            made[name] = {**case, "rows": dict(sorted(rows.items()))}
            write_json(asked.out, made)
        print(f"{name}: {len(rows)} rows", flush=True)


if __name__ == "__main__":
    main()
