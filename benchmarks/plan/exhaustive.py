"""Every layout of a small space compiled, and the search on the same space: does it find the best, with how few?

``python benchmarks/plan/exhaustive.py --out result.json`` compiles 60 layouts of a 1B decoder on
v5e-16 up to their schedules (about 10 s of CPU each; what is in the store is not compiled again), then
lets the planner search them with a quarter as many compiles.
"""

import argparse
import json
import time
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiler, JobProgram
from systolic.compiling.compile import Pool
from systolic.core.files import write_json
from systolic.forecasting.run import of_outcome
from systolic.job import Job, Layout, Precision, Remat
from systolic.planning.analytic import analyse, facts_of
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Goal
from systolic.planning.search import Limits, Search
from systolic.planning.space import NAMED, check

MODEL = {
    "layers": 16,
    "d_model": 2048,
    "d_ff": 8192,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 32768,
}
MESHES = (
    (1, 16, 1),
    (2, 8, 1),
    (4, 4, 1),
    (8, 2, 1),
    (1, 8, 2),
    (2, 4, 2),
    (4, 2, 2),
    (1, 4, 4),
    (4, 1, 4),
    (16, 1, 1),
)
"""data, fsdp, tensor."""
PASSES = (
    (Remat.full, 1),
    (Remat.full, 4),
    (Remat.minimal, 4),
    (Remat.minimal, 8),
    (Remat.save_names, 4),
    (Remat.none, 8),
)
"""Rematerialisation and accumulation."""


def job() -> Job:
    recipe = recipes.find("lm")
    return recipe(recipes.typed(recipe, {"model": MODEL, "sequence": 2048, "batch": 256}))


def space(base: Job) -> list[Candidate]:
    """All of them, in no order that means anything."""
    found = []
    for data, fsdp, tensor in MESHES:
        for remat, accumulate in PASSES:
            names = NAMED[0] if remat is Remat.save_names else Layout().remat_names
            layout = Layout(
                data=data,
                fsdp=fsdp,
                tensor=tensor,
                remat=remat,
                remat_names=names,
                accumulate=accumulate,
            )
            one = Candidate(on=slice("v5e-16"), layout=layout, batch=256, precision=Precision.bf16)
            if check(base, one) is None:
                found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    base = job()
    facts, all_of_them = facts_of(base), space(base)
    compiler = Compiler().quick()
    rows: list[dict[str, Any]] = []
    with Pool(asked.workers) as pool:
        futures = {
            pool.submit(JobProgram(job=one.job(base)), one.on, compiler): one for one in all_of_them
        }
        for future in as_completed(futures):
            one = futures[future]
            made = of_outcome(future.result(), "lm", one.on, 0.0)
            found = analyse(facts, one)
            rows.append(
                {
                    "layout": one.text,
                    "settings": one.settings(base),
                    "fits": made.fits,
                    "step_seconds": made.step_seconds,
                    "peak_bytes": made.need_bytes,
                    "seconds_bound": found.seconds_bound,
                    "seconds_estimate": found.seconds_estimate,
                    "bytes_bound": found.bytes_bound,
                    "bytes_estimate": found.bytes_estimate,
                }
            )
            print(f"{len(rows)} of {len(all_of_them)} {one.text} {made.step_seconds}", flush=True)
    best = min((row for row in rows if row["fits"]), key=lambda row: row["step_seconds"])
    begun = time.monotonic()
    search = Search(
        facts=facts,
        slices=[slice("v5e-16")],
        goal=Goal(units=20e9),
        limits=Limits(programs=len(all_of_them) // 4, finalists=0, workers=asked.workers),
        only=all_of_them,
    )
    plan = search.run()
    assert plan.best is not None
    assert plan.best.forecast is not None
    found_seconds = plan.best.forecast.step_seconds
    assert found_seconds is not None
    order = [one.forecast.step_seconds for one in plan.tried if one.forecast is not None]
    answer = {
        "layouts": len(all_of_them),
        "best": best,
        "found": plan.best.candidate.text,
        "found_seconds": found_seconds,
        "behind": found_seconds / best["step_seconds"] - 1,
        "compiled": len(plan.tried),
        "compiled_until_found": order.index(found_seconds) + 1,
        "search_seconds_from_store": time.monotonic() - begun,
    }
    write_json(asked.out, {"answer": answer, "rows": sorted(rows, key=lambda row: row["layout"])})
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
