"""Twenty steps that do not fit: does explain end with one that compiles, and after how many compiles?

``python benchmarks/plan/out_of_memory.py --out result.json`` writes a row as each is done; run again, it
goes on.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiler, JobProgram
from systolic.compiling import compile as compile_program
from systolic.core.files import write_json
from systolic.forecasting.run import of_outcome
from systolic.planning.analytic import facts_of
from systolic.planning.fit_ladder import find_fit
from systolic.planning.search import shared

SMALL = {
    "layers": 8,
    "d_model": 2048,
    "d_ff": 8192,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 32768,
}
WIDE = {**SMALL, "layers": 4, "d_model": 4096, "d_ff": 16384, "heads": 32}
DEEP = {**SMALL, "layers": 32}
MIXTURE = {**SMALL, "layers": 4, "experts": 8, "experts_per_token": 2, "d_ff": 4096}
VOCAB = {**SMALL, "layers": 4, "vocab": 262144}
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("batch too large", "v5e-4", {"model": SMALL, "sequence": 2048, "batch": 128}),
    ("batch too large", "v5e-16", {"model": SMALL, "sequence": 2048, "batch": 512}),
    ("batch too large", "v6e-8", {"model": DEEP, "sequence": 2048, "batch": 512}),
    ("batch too large", "v4-8", {"model": WIDE, "sequence": 2048, "batch": 256}),
    ("batch too large", "v3-8", {"model": SMALL, "sequence": 2048, "batch": 128}),
    ("long sequence", "v5e-8", {"model": SMALL, "sequence": 32768, "batch": 8}),
    ("long sequence", "v5p-8", {"model": DEEP, "sequence": 65536, "batch": 8}),
    (
        "long sequence, two rows",
        "v5e-8",
        {"model": DEEP, "sequence": 65536, "batch": 2, "layout": {"context": 8, "fsdp": 1}},
    ),
    (
        "copies of the weights",
        "v5e-16",
        {"model": DEEP, "sequence": 1024, "batch": 16, "layout": {"data": 16, "fsdp": 1}},
    ),
    (
        "copies of the weights",
        "v6e-4",
        {
            "model": {**WIDE, "layers": 8},
            "sequence": 1024,
            "batch": 4,
            "layout": {"data": 4, "fsdp": 1},
        },
    ),
    (
        "pipeline alone",
        "v5e-4",
        {"model": DEEP, "sequence": 1024, "batch": 16, "layout": {"pipeline": 4, "fsdp": 1}},
    ),
    ("no rematerialisation", "v5e-8", {"model": DEEP, "sequence": 4096, "batch": 16}),
    (
        "everything kept in int8",
        "v5e-8",
        {"model": DEEP, "sequence": 4096, "batch": 16, "precision": "int8"},
    ),
    ("vocabulary", "v5e-4", {"model": VOCAB, "sequence": 4096, "batch": 16}),
    ("vocabulary", "v6e-4", {"model": VOCAB, "sequence": 8192, "batch": 32}),
    ("mixture", "v5e-8", {"model": MIXTURE, "sequence": 4096, "batch": 32}),
    (
        "mixture on the wrong axis",
        "v6e-8",
        {
            "model": {**MIXTURE, "experts": 32},
            "sequence": 2048,
            "batch": 64,
            "layout": {"data": 8, "fsdp": 1},
        },
    ),
    (
        "model larger than the slice",
        "v5e-4",
        {
            "model": {**DEEP, "d_model": 4096, "d_ff": 16384, "heads": 32},
            "sequence": 1024,
            "batch": 16,
        },
    ),
    (
        "model larger than the slice",
        "v4-8",
        {
            "model": {**DEEP, "d_model": 8192, "d_ff": 28672, "heads": 64},
            "sequence": 1024,
            "batch": 32,
        },
    ),
    (
        "two slices",
        "2xv5e-4",
        {"model": DEEP, "sequence": 2048, "batch": 64, "layout": {"data": 2, "fsdp": 4}},
    ),
)
"""What is wrong, where, and the recipe's options."""


def answer(index: int, workers: int) -> dict[str, Any]:
    what, name, options = CASES[index]
    on, recipe = slice(name), recipes.find("lm")
    job = recipe(recipes.typed(recipe, options))
    compiler = Compiler(flags=shared(on))
    made = of_outcome(compile_program(JobProgram(job=job), on, compiler.quick()), "lm", on, 0.0)
    record: dict[str, Any] = {"case": index, "what": what, "slice": name, "options": options}
    if made.rejected is None:
        return record | {"problem": "it fits as it is"}
    record["need_bytes"] = made.rejected.need_bytes
    record["have_bytes"] = made.rejected.have_bytes
    begun = time.monotonic()
    attempts = find_fit(facts_of(job), on, shared, workers)
    compiled = [one for attempt in attempts for one in attempt.tried]
    first = next((n for n, one in enumerate(compiled, 1) if one.total is not None), None)
    best = attempts[-1].best
    return record | {
        "attempts": [attempt.text for attempt in attempts],
        "compiled": len(compiled),
        "first_that_fits": first,
        "seconds": time.monotonic() - begun,
        "fits": None if best is None else best.candidate.name,
        "same_result": attempts[-1].same_result,
        "step_seconds": best.forecast.step_seconds if best is not None and best.forecast else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    done = json.loads(asked.out.read_text()) if asked.out.exists() else []
    known = {record["case"] for record in done}
    for index in range(len(CASES)):
        if index not in known:
            done.append(answer(index, asked.workers))
            write_json(asked.out, done)
            print(json.dumps(done[-1]), flush=True)


if __name__ == "__main__":
    main()
