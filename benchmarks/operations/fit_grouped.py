"""Fits ``sim/grouped.toml`` to the fit half of the grouped matmuls that ``run.py`` compiled.

``python benchmarks/operations/fit_grouped.py --measured ops.json`` prints, for each generation, the constants with the
least mean error and the errors that they and those in use leave; ``--judge`` those in use on the judge half alone.
Times hold what is around a kernel, priced as other ops are.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import compiling
import rows as measured
import run

from systolic.chips import slice
from systolic.sim.grouped import Grouped, GroupedPace, grouped_of, pace_of, seconds_of
from systolic.sim.rates import Rates, rates_of

STEPS = tuple(n * 1e-7 for n in range(9))
WAITS = tuple(n * 1e-7 for n in range(0, 11, 2))
SHARES = (0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
UNHIDDEN = (0.0, 0.1, 0.2, 0.3, 0.4)
MOST = 0.5
"""An error above it counts as it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured program with one kernel."""

    id: str
    kind: str
    measured_seconds: float
    other_seconds: float
    """Simulated, of what is not the kernel."""
    grouped: Grouped
    rates: Rates

    def error(self, pace: GroupedPace) -> float:
        """Of the forecast with these constants."""
        kernel = seconds_of(self.grouped, self.rates, pace)
        return (self.other_seconds + kernel) / self.measured_seconds - 1


def sample(row: measured.Row) -> Sample | None:
    """A compiled row; None where it holds no kernel, or ran another program."""
    module, report = run.module_of(row, "quick"), compiling.report_of(row) or {}
    if run.other_program(row, module):
        return None
    empty = row["shapes"]["groups"].get("zeros", 0)
    for computation in module.computations.values():
        for op in computation:
            counted = op.config.get("custom_call_config", {}).get("counted") or {}
            found = op.target == "tpu_custom_call" and grouped_of(computation, op, counted)
            if found:
                timeline = run.simulated(row, "quick")
                rates = rates_of(slice(report["slice"]))
                return Sample(
                    id=row["id"],
                    kind=measured.kind_of(row),
                    measured_seconds=row["measured_seconds"],
                    other_seconds=timeline.seconds - seconds_of(found, rates),
                    # What is fitted knows the empty groups, where a forecast takes all to have rows.
                    grouped=replace(found, groups=found.groups - (0 if found.known else empty)),
                    rates=rates,
                )
    return None


def mean(samples: Sequence[Sample], pace: GroupedPace) -> float:
    """Mean error, with the largest cut."""
    return statistics.mean(min(abs(one.error(pace)), MOST) for one in samples)


def line(name: str, samples: Sequence[Sample], pace: GroupedPace) -> str:
    """Median and 90th percentile of the absolute errors, each kind apart."""
    parts = []
    for kind in sorted({one.kind for one in samples}):
        for transposed in (False, True):
            some = [s for s in samples if (s.kind, s.grouped.transposed) == (kind, transposed)]
            errors = sorted(abs(one.error(pace)) for one in some)
            if errors:
                p90 = errors[min(int(0.9 * len(errors)), len(errors) - 1)]
                what = f"{kind}{' of the weights' if transposed else ''}"
                parts.append(f"{what} {len(some)}: {statistics.median(errors):.1%} / {p90:.1%}")
    return f"  {name}: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True, help="rows as ops.json has them")
    parser.add_argument("--judge", action="store_true", help="the judge half, nothing fitted")
    parser.add_argument("--rows", action="store_true", help="each row's error by those in use")
    asked = parser.parse_args()
    rows = [row for row in measured.unique(measured.read(asked.measured)) if measured.judged(row)]
    rows = [row for row in rows if row["what"] == "grouped_matmul"]
    rows = [row for row in rows if measured.half_of(row) == ("judge" if asked.judge else "fit")]
    rows = [row for row in rows if "problem" not in (compiling.report_of(row) or {"problem": ""})]
    for generation in sorted({row["generation"] for row in rows}):
        made = [sample(row) for row in rows if row["generation"] == generation]
        samples = [one for one in made if one is not None]
        now = pace_of(generation)
        print(f"[{generation}]")
        print(line("in use", samples, now))
        for one in samples if asked.rows else ():
            print(f"    {one.id:56} {one.error(now):+7.1%} {one.grouped.tile}")
        if asked.judge:
            continue
        tried = (
            GroupedPace(step_seconds=a, wait_seconds=b, share=c, unhidden=d)
            for a, b, c, d in itertools.product(STEPS, WAITS, SHARES, UNHIDDEN)
        )
        best = min(tried, key=lambda pace: mean(samples, pace))
        print(line(f"best {best}", samples, best))


if __name__ == "__main__":
    main()
