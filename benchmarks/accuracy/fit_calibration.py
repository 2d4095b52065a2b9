"""Fits sim/calibration.toml on one half of the published results and judges it on the other.

``python benchmarks/accuracy/fit_calibration.py rows.jsonl [more.jsonl …]`` reads what ``run.py --out``
wrote, takes the programs from the store, and prints the table and the errors of both halves. A model
is in one half only, whatever the number of its slices. One constant a generation: the time of matmuls.
"""

import argparse
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ask import lines

from systolic.aot import Compiled
from systolic.aot.dump import SCHEDULE_ONLY
from systolic.chips import slice
from systolic.core.store import Store, read_json
from systolic.hlo import parse
from systolic.sim import simulate
from systolic.sim.calibration import Calibration
from systolic.sim.timeline import PricedBy

PRIOR = 0.01
"""Log error that a factor of e away from 1 is worth."""
RANGE = (0.8, 1.25)
"""A correction beyond it would hide a defect of the model."""


@dataclass(frozen=True)
class Sample:
    """One row's step with nothing corrected."""

    id: str
    generation: str
    kind: str
    """``cycles`` or ``estimate``: what the matmuls are priced by."""
    published: float
    seconds: float
    matmuls: float
    """Seconds of the core in matmuls."""

    @property
    def model(self) -> str:
        """The id without its slices, chips and batch."""
        return re.sub(r"-\d+x(?=v)|-(?:\d+x)?v\d\w*-\d+$|-gbs\d+.*|-\d+chips.*", "", self.id)

    def error(self, factor: float) -> float:
        """log(forecast / published); what waits is taken to wait as before."""
        return float(np.log((self.seconds + (factor - 1) * self.matmuls) / self.published))


def sample(record: dict[str, Any]) -> Sample | None:
    if "program" not in record:
        return None
    folder = Store("programs").path(record["program"])
    report = read_json(folder / "report.json")
    on = slice(report["slice"])
    places = [tuple(place) for place in report["places"]]
    module = parse(Compiled(folder, record["program"], True).hlo)
    timeline = simulate(module, on, places, Calibration(on.chip.name), flags=report["flags"])
    quick = SCHEDULE_ONLY in report["options"]
    return Sample(
        id=record["id"],
        generation=on.chip.name,
        kind="estimate" if quick else "cycles",
        published=record["measured_seconds"],
        seconds=timeline.seconds,
        matmuls=sum(
            s.seconds * n
            for s, n in timeline.leaves()
            if s.lane == "core" and s.flops and s.priced_by in (PricedBy.cycles, PricedBy.estimate)
        ),
    )


def halves(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Every other model of a generation, in the order of the file, to the first half."""
    models = list(dict.fromkeys(s.model for s in samples))
    first = set(models[::2])
    return [s for s in samples if s.model in first], [s for s in samples if s.model not in first]


def fitted(samples: list[Sample]) -> float:
    """The factor with the least mean absolute log error; 1 without samples."""
    if not samples:
        return 1.0
    grid = np.arange(RANGE[0], RANGE[1] + 1e-9, 0.005)
    loss = [np.mean([abs(s.error(f)) for s in samples]) + PRIOR * abs(np.log(f)) for f in grid]
    return float(grid[int(np.argmin(loss))])


def judged(samples: list[Sample], factor: float) -> str:
    if not samples:
        return "none"
    errors = [np.expm1(s.error(factor)) for s in samples]
    return f"{statistics.mean(map(abs, errors)):.1%} (largest {max(errors, key=abs):+.1%}, {len(errors)} rows)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    records = [record for path in parser.parse_args().results for record in lines(path)]
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for record in records:
        if (one := sample(record)) is not None:
            groups[one.generation, one.kind].append(one)
    everything: dict[str, list[float]] = defaultdict(list)
    for (generation, kind), samples in sorted(groups.items()):
        one, two = halves(samples)
        a, b = fitted(one), fitted(two)
        print(f"[{generation}]\n{kind} = {a:.3f}")
        print(f"# fitted on: {', '.join(dict.fromkeys(s.model for s in one))}")
        print(f"# judged on: {', '.join(dict.fromkeys(s.model for s in two)) or 'nothing'}")
        print(f"# fitted half: {judged(one, 1.0)} before, {judged(one, a)} after")
        print(
            f"# other half: {judged(two, 1.0)} before, {judged(two, a)} after; by itself {b:.3f}\n"
        )
        everything["fitted"] += [np.expm1(s.error(a)) for s in one]
        everything["judged"] += [np.expm1(s.error(a)) for s in two]
        everything["judged, uncorrected"] += [np.expm1(s.error(1.0)) for s in two]
    for name, errors in everything.items():
        if errors:
            print(
                f"# {name}: mean absolute error {statistics.mean(map(abs, errors)):.1%} of {len(errors)} rows"
            )


if __name__ == "__main__":
    main()
