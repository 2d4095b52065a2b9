"""Fits ``sim/attention.toml`` to the fit half of the attention kernels that ``run.py`` compiled.

``python benchmarks/operations/fit_attention.py --measured ops.json`` prints, for each generation, the constants with the
least mean error and the errors that they and those in use leave; ``--judge`` those in use on the judge half alone.
Times hold the transposes around a kernel, priced as other ops are.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import compiling
import rows as measured
import run

from systolic.chips import slice
from systolic.hlo import Computation, Instruction, Module
from systolic.sim.attention import (
    FORWARD,
    Attention,
    AttentionPace,
    attention_of,
    pace_of,
    seconds_of,
)
from systolic.sim.kernels import computation_bytes
from systolic.sim.rates import Rates, rates_of
from systolic.sim.timeline import PricedBy

FORWARDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
BACKWARDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ROWS = (2e-7, 4e-7, 6e-7, 8e-7, 1e-6, 1.2e-6)
MOST = 0.5
"""An error above it counts as it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured program with one kernel."""

    id: str
    measured_seconds: float
    other_seconds: float
    """Simulated, of what is not the kernel."""
    attention: Attention
    own_bytes: float
    rates: Rates

    def error(self, pace: AttentionPace) -> float:
        """Of the forecast with these constants."""
        kernel = seconds_of(self.attention, self.rates, self.own_bytes, pace)
        return (self.other_seconds + kernel) / self.measured_seconds - 1


def _calls(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    for computation in module.computations.values():
        for op in computation:
            if op.target == "tpu_custom_call":
                yield computation, op


def sample(row: measured.Row) -> Sample | None:
    """A compiled row; None where its kernel is not known as attention."""
    module, report = run.module_of(row, "quick"), compiling.report_of(row) or {}
    timeline = run.simulated(row, "quick")
    computation, call = next(_calls(module))
    counted = call.config.get("custom_call_config", {}).get("counted") or {}
    found = attention_of(module, computation, call, counted)
    if found is None:
        return None
    kernel = sum(
        span.seconds * n for span, n in timeline.leaves() if span.priced_by is PricedBy.kernel
    )
    return Sample(
        id=row["id"],
        measured_seconds=row["measured_seconds"],
        other_seconds=timeline.seconds - kernel,
        attention=found,
        own_bytes=computation_bytes(computation, call),
        rates=rates_of(slice(report["slice"])),
    )


def mean(samples: Sequence[Sample], pace: AttentionPace) -> float:
    """Mean error, with the largest cut."""
    return statistics.mean(min(abs(one.error(pace)), MOST) for one in samples)


def line(name: str, samples: Sequence[Sample], pace: AttentionPace) -> str:
    """Median and 90th percentile of the absolute errors, forward and backward apart."""
    parts = []
    for way in ("forward", "backward"):
        some = [one for one in samples if (one.attention.kind == FORWARD) == (way == "forward")]
        errors = sorted(abs(one.error(pace)) for one in some)
        if errors:
            p90 = errors[min(int(0.9 * len(errors)), len(errors) - 1)]
            parts.append(f"{way} {len(errors)} rows {statistics.median(errors):.1%} / {p90:.1%}")
    return f"  {name}: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True, help="rows as ops.json has them")
    parser.add_argument("--judge", action="store_true", help="the judge half, nothing fitted")
    asked = parser.parse_args()
    rows = [row for row in measured.unique(measured.read(asked.measured)) if measured.judged(row)]
    rows = [row for row in rows if measured.is_kernel(row)]
    rows = [row for row in rows if measured.half_of(row) == ("judge" if asked.judge else "fit")]
    rows = [row for row in rows if "problem" not in (compiling.report_of(row) or {"problem": ""})]
    for generation in sorted({row["generation"] for row in rows}):
        made = [sample(row) for row in rows if row["generation"] == generation]
        samples = [one for one in made if one is not None]
        now = pace_of(generation)
        print(f"[{generation}]")
        print(line("in use", samples, now))
        if asked.judge:
            continue
        tried = (
            replace(now, staged_forward=a, staged_backward=b, row_seconds=c)
            for a, b, c in itertools.product(FORWARDS, BACKWARDS, ROWS)
        )
        best = min(tried, key=lambda pace: mean(samples, pace))
        print(line(f"best {best}", samples, best))


if __name__ == "__main__":
    main()
