"""The planner against layouts that others chose: the same model, slice and global batch.

``python benchmarks/plan/published.py --out result.json [--only NAME …]`` forecasts the published layout
with its own flags (from its schedule), plans the same job without being told that layout, and writes a
row as each is done; run again, it goes on.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiler, JobProgram
from systolic.compiling import compile as compile_program
from systolic.core.errors import SystolicError
from systolic.core.files import write_json
from systolic.forecasting.run import of_outcome
from systolic.job import Layout
from systolic.planning.analytic import facts_of
from systolic.planning.goal import Goal
from systolic.planning.plan import Trial
from systolic.planning.search import Limits, Search

sys.path.insert(0, str(Path(__file__).parent.parent / "accuracy"))
import rows as published

PROGRAMS = 24


def answer(row: published.Row, workers: int) -> dict[str, Any]:
    on, recipe = slice(row.slice), recipes.find(row.recipe)
    job = recipe(recipes.typed(recipe, row.options))
    record: dict[str, Any] = {"id": row.id, "slice": on.name}
    try:
        compiler = Compiler(flags=tuple(row.flags)).quick()
        theirs = of_outcome(compile_program(JobProgram(job=job), on, compiler), "lm", on, 0.0)
    except SystolicError as error:
        return record | {"problem": str(error)}
    record["theirs_seconds"] = theirs.step_seconds
    order: list[float | None] = []
    begun = time.monotonic()
    search = Search(
        facts=facts_of(replace(job, layout=Layout())),
        slices=[on],
        goal=Goal(units=20e9),
        limits=Limits(programs=PROGRAMS, finalists=0, workers=workers),
    )
    plan = search.run()
    for one in plan.tried:
        order.append(one.forecast.step_seconds if one.forecast is not None else None)
    best = plan.best
    record |= {
        "compiled": len(order),
        "search_seconds": time.monotonic() - begun,
        "bounds_broken": sum(map(broken, plan.tried)),
    }
    if best is None or best.forecast is None or best.forecast.step_seconds is None:
        return record | {"problem": "nothing fits"}
    ours = best.forecast.step_seconds
    return record | {
        "layout": best.candidate.text,
        "ours_seconds": ours,
        "found_at": order.index(ours) + 1,
        "gain": theirs.step_seconds / ours - 1 if theirs.step_seconds else None,
    }


def broken(one: Trial) -> bool:
    """Whether a lower bound of the analytic model is above what the compiler and the simulation say."""
    made = one.forecast
    if made is None:
        return False
    slow = made.step_seconds is not None and one.analysis.seconds_bound > made.step_seconds
    return slow or one.analysis.bytes_bound > made.need_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of row names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    done = json.loads(asked.out.read_text()) if asked.out.exists() else []
    known = {record["id"] for record in done}
    for row in published.rows():
        if row.id in known or (asked.only and not any(part in row.id for part in asked.only)):
            continue
        done.append(answer(row, asked.workers))
        write_json(asked.out, done)
        print(json.dumps(done[-1]), flush=True)


if __name__ == "__main__":
    main()
