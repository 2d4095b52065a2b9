"""How steps grow with the number of slices, at equal work per slice: published series against the allowance.

    python benchmarks/accuracy/slices.py [--published FILE]

Fits the share of a step per doubling of the slices (``systolic.sim.asynchronous``) on half of the series and judges it
on the other half. What the exchange itself adds is left in: it hides behind compute in these steps.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from systolic.sim.asynchronous import SHARE_PER_DOUBLING

HERE = Path(__file__).parent
PUBLISHED = HERE / "published.json"
FITTED = ("MaxText 16B (global_parameter_scale=16)", "MaxText 22B (scale=3)")
"""Models of the half that the constant is fitted on; all others judge."""

Point = tuple[int, float]
"""Slices, and the step's growth over the one of a single slice."""


def series(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[Point]]:
    """Growth by model and chips of a slice: equal batches of a device, slices as copies, one slice measured too."""
    times: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        count, seconds = row["num_slices"] or 1, row["step_time_best_s"]
        copies = count == 1 or (row["parallelism"] or {}).get("dcn") == {"data": count}
        if seconds and row["num_chips"] and row["per_device_batch"] and copies:
            of = times[row["model"], row["num_chips"] // count]
            of.setdefault(count, seconds)
    return {
        key: [(n, of[n] / of[1] - 1) for n in sorted(of) if n > 1]
        for key, of in times.items()
        if 1 in of and len(of) > 1
    }


def fitted(points: Sequence[Point]) -> float:
    """Share per doubling, least squares through no growth at one slice."""
    xs = [math.log2(n) for n, _ in points]
    return sum(x * y for x, (_, y) in zip(xs, points, strict=True)) / sum(x * x for x in xs)


def errors(points: Sequence[Point]) -> tuple[float, float]:
    """Mean errors of the growth, with the allowance and without."""
    left = [abs(y - SHARE_PER_DOUBLING * math.log2(n)) for n, y in points]
    return sum(left) / len(left), sum(abs(y) for _, y in points) / len(points)


def judged(path: Path) -> tuple[float, float]:
    """:func:`errors` of the half that the allowance was not fitted on."""
    found = series(json.loads(path.read_text()))
    return errors([p for (model, _), mine in found.items() if model not in FITTED for p in mine])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--published", type=Path, default=PUBLISHED)
    found = series(json.loads(parser.parse_args().published.read_text()))
    halves: dict[bool, list[Point]] = {True: [], False: []}
    print("| model | chips of a slice | half | slices: growth, allowance |\n|---|---|---|---|")
    for (model, chips), points in found.items():
        fit = model in FITTED
        halves[fit] += points
        texts = (f"{n}: {y:+.1%}, {SHARE_PER_DOUBLING * math.log2(n):+.1%}" for n, y in points)
        print(f"| {model} | {chips} | {'fitted' if fit else 'judge'} | {'; '.join(texts)} |")
    for fit, points in halves.items():
        if points:
            after, before = errors(points)
            print(
                f"{'fitted' if fit else 'judge'}: {fitted(points):.2%} per doubling would fit best; mean error "
                f"{after:.1%} with {SHARE_PER_DOUBLING:.1%}, {before:.1%} with none"
            )


if __name__ == "__main__":
    main()
