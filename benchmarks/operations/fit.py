"""Fits ``matrix``, ``memory``, ``vector`` and ``unhidden`` of ``sim/estimates.toml`` to the fit half of rows that ``run.py`` compiled.

``python benchmarks/operations/fit.py --measured ops.json`` prints, for each generation, the slowdowns with
the least mean error, and the errors that they and those in use leave on the fit half. The judge half is not
read, and what else a generation has in that file stays as it is.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import compiling
import rows as measured
import run

from systolic.chips import slice
from systolic.sim.estimate import (
    Parts,
    Slowdown,
    estimated_seconds,
    parts_of,
    seconds_by_cycles,
    slowdown_of,
)
from systolic.sim.rates import rates_of
from systolic.sim.timeline import PricedBy
from systolic.sim.work import work_of

MATRIX = (1.0, 1.06, 1.12, 1.18, 1.24, 1.3)
MEMORY = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3)
VECTOR = (0.8, 1.0, 1.2, 1.5)
UNHIDDEN = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)
MOST = 0.5
"""An error above it counts as it: such a row is another program, or has a cause that no slowdown mends."""
OTHER = ("grouped_matmul", "all-", "collective")
"""Kinds whose time is not of fusions."""

Op = tuple[float, float | None, Parts | None, int]
"""Seconds as priced now, the compiler's own, parts where slowdowns price it, and times."""


def ops_of(row: measured.Row, mode: str) -> list[Op]:
    """Ops of a compiled row on the core."""
    module, report = run.module_of(row, mode), compiling.report_of(row) or {}
    rates = rates_of(slice(report["slice"]))
    where = {op.name: (held, op) for held in module.computations.values() for op in held}
    found: list[Op] = []
    for span, times in run.simulated(row, mode).leaves():
        if span.lane != "core":
            continue
        computation, op = where[span.name]
        slow = slowdown_of(rates.chip.name)
        own = None if op.cycles is None else op.cycles / rates.clock_hz
        parts = None
        if span.priced_by in (
            PricedBy.cycles,
            PricedBy.estimate,
            PricedBy.bytes,
        ) and not span.opcode.startswith("wait"):
            parts = parts_of(module, computation, op, work_of(module, computation, op), rates)
            now = (
                estimated_seconds(parts, slow)
                if own is None
                else seconds_by_cycles(own, parts, slow)
            )
            if abs(now - span.seconds) > 0.01 * span.seconds:
                parts = None  # priced by another rule
        found.append((span.seconds, own, parts, times))
    return found


def forecast(ops: Sequence[Op], slow: Slowdown) -> float:
    """Seconds of a row under these slowdowns."""
    total = 0.0
    for seconds, own, parts, times in ops:
        if parts is not None:
            seconds = (
                estimated_seconds(parts, slow)
                if own is None
                else seconds_by_cycles(own, parts, slow)
            )
        total += seconds * times
    return total


def errors(samples: Sequence[tuple[float, list[Op]]], slow: Slowdown) -> list[float]:
    return [forecast(ops, slow) / seconds - 1 for seconds, ops in samples]


def mean(found: Sequence[float]) -> float:
    return statistics.mean(min(abs(error), MOST) for error in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True, help="rows as ops.json has them")
    asked = parser.parse_args()
    rows = [row for row in measured.unique(measured.read(asked.measured)) if measured.judged(row)]
    rows = [row for row in rows if measured.half_of(row) == "fit"]
    rows = [row for row in rows if not measured.kind_of(row).startswith(OTHER)]
    rows = [row for row in rows if "problem" not in (compiling.report_of(row) or {"problem": ""})]
    for generation in sorted({row["generation"] for row in rows}):
        mine = [row for row in rows if row["generation"] == generation]
        samples = [
            (row["measured_seconds"], ops_of(row, mode)) for row in mine for mode in run.MODES
        ]
        now_used = slowdown_of(generation)
        now = mean(errors(samples, now_used))
        tried = [
            (mean(errors(samples, slow)), slow)
            for a, b, c, d in itertools.product(MATRIX, MEMORY, VECTOR, UNHIDDEN)
            for slow in (replace(now_used, matrix=a, memory=b, vector=c, unhidden=d),)
        ]
        tried.sort(key=lambda one: one[0])
        print(f"[{generation}] {len(mine)} rows, mean error now {now:.1%}")
        for error, slow in tried[:8]:
            print(f"  {error:.1%} {slow}")


if __name__ == "__main__":
    main()
