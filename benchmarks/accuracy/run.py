"""Forecast against published: compiles each published result's program and prints the table of errors.

``python benchmarks/accuracy/run.py`` answers from the store what was compiled before and compiles
the rest; ``--fresh`` uses an empty store.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import rows as published

from systolic import recipes
from systolic.aot import Compiled, Compiler, Failed, JobProgram, Rejected
from systolic.aot import compile as compile_program
from systolic.chips import slice
from systolic.core.errors import SystolicError
from systolic.core.files import write_json
from systolic.core.store import cache_home
from systolic.forecasting.run import of_outcome

HERE = Path(__file__).parent


def answer(row: published.Row, compiler: Compiler) -> dict[str, Any]:
    """One row of the table; ``problem`` where there is no forecast."""
    start = time.perf_counter()
    record: dict[str, Any] = {
        "id": row.id,
        "generation": row.generation,
        "kind": row.kind,
        "slice": row.slice,
        "published_seconds": row.published_seconds,
        "flags": list(row.flags),
        "departures": list(row.departures),
    }
    on = slice(row.slice)
    recipe = recipes.find(row.recipe)
    job = recipe(recipes.typed(recipe, row.options))
    try:
        flags, dropped = tuple(row.flags), []
        while True:
            outcome = compile_program(
                JobProgram(job=job), on, replace(compiler, flags=flags), quiet
            )
            unknown = unknown_flag(outcome, flags)
            if unknown is None:
                break
            flags = tuple(flag for flag in flags if flag != unknown)
            dropped.append(unknown)
        if dropped:
            record["departures"].append(f"flags unknown to this libtpu: {' '.join(dropped)}")
        match outcome:
            case Rejected():
                record["problem"] = (
                    f"does not fit: {outcome.need_bytes / 2**30:.2f} of {outcome.have_bytes / 2**30:.2f} GiB"
                )
            case Failed(reason=reason):
                record["problem"] = reason
            case Compiled():
                made = of_outcome(outcome, row.id, on, 0.0)
                assert made.step_seconds is not None
                record |= {
                    "forecast_seconds": made.step_seconds,
                    "error": made.step_seconds / row.published_seconds - 1,
                    "mfu": made.mfu,
                    "hfu": made.hfu,
                    "peak_gib": made.memory.peak_bytes / 2**30 if made.memory else None,
                    "time_by_resource": made.time_by_resource,
                    "program": outcome.digest,
                    "cached": outcome.cached,
                }
    except SystolicError as error:
        record["problem"] = str(error)
    record["seconds"] = round(time.perf_counter() - start, 2)
    return record


def quiet(_: str) -> None:
    pass


def unknown_flag(outcome: Any, flags: Sequence[str]) -> str | None:
    """The flag that a failed compile names as unknown."""
    if not isinstance(outcome, Failed):
        return None
    text = f"{outcome.reason}\n{outcome.log}"
    if "nknown" not in text:
        return None
    return next((f for f in flags if f.partition("=")[0].lstrip("-") in text), None)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each row, then mean and largest error by generation."""
    lines = [
        "| published result | slice | published | forecast | error | largest parts of the step |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        if "error" not in record:
            lines.append(
                f"| {record['id']} | {record['slice']} | {record['published_seconds']:.4g} s | - | - | {record['problem']} |"
            )
            continue
        whole = record["forecast_seconds"]
        parts = sorted(record["time_by_resource"].items(), key=lambda p: -p[1])[:3]
        text = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts)
        lines.append(
            f"| {record['id']} | {record['slice']} | {record['published_seconds']:.4g} s | {whole:.4g} s | {record['error']:+.1%} | {text} |"
        )
    lines += [
        "",
        "| generation | rows | mean absolute error | mean error | largest |",
        "|---|---|---|---|---|",
    ]
    generations = list(dict.fromkeys(r["generation"] for r in records))
    for name in [*generations, "all"]:
        errors = [r["error"] for r in records if "error" in r and name in (r["generation"], "all")]
        if errors:
            lines.append(
                f"| {name} | {len(errors)} | {statistics.mean(map(abs, errors)):.1%} | {statistics.mean(errors):+.1%} | {max(errors, key=abs):+.1%} |"
            )
    return "\n".join(lines)


LEAST = 0.03
"""Of an interval, each way: four results on one side of the truth do not promise the fifth there."""


def intervals(records: Sequence[Mapping[str, Any]]) -> str:
    """``forecasting/errors.toml``: rows, smallest and largest error by generation and of all."""
    lines = []
    generations = dict.fromkeys(r["generation"] for r in records)
    for name in [*generations, "all"]:
        errors = [r["error"] for r in records if "error" in r and name in (r["generation"], "all")]
        if errors:
            low, high = min(-LEAST, *errors), max(LEAST, *errors)
            lines += [
                f"[{name}]",
                f"rows = {len(errors)}",
                f"smallest = {low:.3f}",
                f"largest = {high:.3f}",
                "",
            ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of row names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="with an empty store")
    parser.add_argument("--quick", action="store_true", help="schedules only, cycles estimated")
    parser.add_argument("--table", type=Path, help="print the table of an earlier run's JSON")
    parser.add_argument(
        "--intervals", type=Path, help="print the errors.toml of an earlier run's JSON"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON of all rows")
    asked = parser.parse_args()
    if asked.intervals:
        print(intervals(json.loads(asked.intervals.read_text())))
        return
    if asked.table:
        print(table(json.loads(asked.table.read_text())))
        return
    chosen = [
        row
        for row in published.rows()
        if not asked.only or any(part in row.id for part in asked.only)
    ]
    if asked.only:
        chosen.sort(key=lambda r: min(n for n, part in enumerate(asked.only) if part in r.id))
    with tempfile.TemporaryDirectory() as empty:
        compiler = Compiler(root=Path(empty) if asked.fresh else cache_home())
        if asked.quick:
            compiler = compiler.quick()

        done: dict[str, dict[str, Any]] = {}

        def one(row: published.Row) -> None:
            record = answer(row, compiler)
            told = f"{record['error']:+.1%}" if "error" in record else record["problem"]
            print(f"{row.id}: {told} ({record['seconds']:.0f} s)", file=sys.stderr, flush=True)
            done[row.id] = record
            if asked.out:  # after each, so that an interruption loses nothing
                kept = [done[row.id] for row in chosen if row.id in done]
                write_json(asked.out, kept)

        with ThreadPoolExecutor(asked.workers) as pool:
            list(pool.map(one, chosen))
    print(table([done[row.id] for row in chosen]))


if __name__ == "__main__":
    main()
