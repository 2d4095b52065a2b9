"""Layouts that a plan did not compile, compiled: does one of them beat the answer by more than the margin that it states?

``python -m benchmarks.plan.pruned --sample 200 --out pruned.json`` plans a 1B decoder on v5e-16 with 24 compiles, then
compiles 200 layouts at random of those that the search left out by estimates, up to their schedules (a few seconds
of CPU each; what is in the store is not compiled again). ``--model mixtral-8x7b --on v5e-256 --batch 1024`` takes a
published model.
"""

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from benchmarks.plan.exhaustive import job as decoder_job
from systolic.chips import slice
from systolic.compiling import Compiler, JobProgram
from systolic.compiling.compile import Pool
from systolic.core.files import write_json
from systolic.forecasting import Forecast
from systolic.forecasting.run import of_outcome
from systolic.job import Job
from systolic.planning.analytic import facts_of
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Goal
from systolic.planning.search import Limits, Search
from systolic.recipes.jobs import source_of


def row(base: Job, one: Candidate, made: Forecast) -> dict[str, Any]:
    """A compiled candidate."""
    return {
        "layout": one.text,
        "settings": one.settings(base),
        "flags": one.flags.name,
        "fits": made.fits,
        "step_seconds": made.step_seconds,
        "peak_bytes": made.need_bytes,
    }


def compiled(
    base: Job, drawn: Sequence[Candidate], flags: Sequence[str], workers: int
) -> list[dict[str, Any]]:
    """Rows of candidates, compiled up to their schedules."""
    rows: list[dict[str, Any]] = []
    compiler = Compiler(flags=flags).quick()
    with Pool(workers) as pool:
        futures = {
            pool.submit(JobProgram(job=one.job(base)), one.on, compiler): one for one in drawn
        }
        for future in as_completed(futures):
            one = futures[future]
            rows.append(row(base, one, of_outcome(future.result(), base.name, one.on, 0.0)))
            seconds = rows[-1]["step_seconds"]
            print(f"{len(rows)} of {len(drawn)} {one.text} {seconds}", flush=True)
    return rows


def asked_for() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--on", default="v5e-16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--programs", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", type=Path, help="layouts of an earlier draw, a line each")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    asked = asked_for()
    base = (
        source_of(asked.model, {"batch": asked.batch}).job
        if asked.model is not None
        else decoder_job()
    )
    on = slice(asked.on)
    search = Search(
        facts=facts_of(base),
        slices=[on],
        goal=Goal(units=1e9),
        limits=Limits(programs=asked.programs, finalists=0, workers=asked.workers),
    )
    plan = search.run()
    best, margin = plan.best, plan.margin
    assert best is not None
    assert best.forecast is not None
    assert best.forecast.step_seconds is not None
    assert margin is not None
    print(f"{best.candidate.text}: {best.forecast.step_seconds:.4g} s; {margin}", flush=True)
    left = sorted(search.not_compiled, key=lambda one: one.candidate.text)
    before = set(asked.drawn.read_text().splitlines()) if asked.drawn is not None else set()
    drawn = [one for one in left if one.candidate.text in before][: asked.sample]
    others = [one for one in left if one.candidate.text not in before]
    more = min(asked.sample - len(drawn), len(others))
    drawn += random.Random(asked.seed).sample(others, more)
    sampled = compiled(base, [one.candidate for one in drawn], best.candidate.base, asked.workers)
    faster = [
        1 - one["step_seconds"] / best.forecast.step_seconds
        for one in sampled
        if one["step_seconds"] is not None
    ]
    write_json(
        asked.out,
        {
            "model": asked.model or "lm",
            "slice": on.name,
            "batch": asked.batch,
            "not_compiled": len(left),
            "best": row(base, best.candidate, best.forecast),
            "margin": margin.to_json(),
            "fits": len(faster),
            "largest_gain": max(faster, default=None),
            "compiled": [
                row(base, one.candidate, one.forecast) for one in plan.tried if one.forecast
            ],
            "sampled": sorted(sampled, key=lambda one: one["layout"]),
        },
    )
    print(
        f"of {len(sampled)} sampled {len(faster)} fit; the best of them is {max(faster, default=0):+.1%} faster than the answer, stated: {margin.share:.1%}"
    )


if __name__ == "__main__":
    main()
