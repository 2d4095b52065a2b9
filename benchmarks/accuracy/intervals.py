"""Makes ``forecasting/errors.toml``, the intervals of forecasts, from stored results, and judges them on the other half.

``python benchmarks/accuracy/intervals.py`` prints how many rows of each half the intervals of the other half hold;
``--write`` writes the table. Rows of ``--steps`` are those that ``run.py`` wrote, of ``--operations`` those of
``benchmarks/operations/run.py``.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rows as published
from ask import lines

HERE = Path(__file__).parent
PUBLISHED = HERE / "published.json"
RESULTS = HERE.parent / "results"
STEPS = RESULTS / "2026-11-22-accuracy-quick.jsonl"
OPERATIONS = RESULTS / "2026-11-22-operations.jsonl"
TABLE = HERE.parents[1] / "src" / "systolic" / "forecasting" / "errors.toml"
SHARE = 0.8
"""Of results that an interval is to hold."""
FEW = 9
"""Families from which on both ends of an interval of 80 % are results: one of ten lies beyond each. A
generation with fewer takes the interval of all."""
LEAST = 0.03
"""Of an interval, each way: results on one side of the truth do not promise the next one there."""
OTHER = ("grouped_matmul",)
"""Kinds of operations that are left out: the programs that were measured are not those of today's compiler."""
HALVES = {"step": ("fit", "judge"), "operation": ("judge",)}
"""Halves that the table is made of: operations of which no price was fitted, and all steps. A few constants do rest
on steps (README.md names them), so that errors of those families are smaller than those of a new one."""
UNJUDGED = ("v5e",)
"""Generations whose few operations were timed by the host's clock."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Errors (forecast - measured) / measured between which a share of results lies."""

    low: float
    high: float
    rows: int
    families: int

    def holds(self, row: Row) -> bool:
        return self.low <= row["error"] <= self.high


@cache
def _models() -> dict[str, str]:
    return {record["id"]: record["model"] for record in json.loads(PUBLISHED.read_text())}


def family(row: Row) -> str:
    """What shares its error: one trainer's runs of one model on one generation; a kind of operation."""
    if row["group"] == "operation":
        return f"{row['generation']} {row['kind']}"
    return published.family(row["id"], row["generation"], _models().get(row["id"], row["id"]))


def half(row: Row) -> str:
    """Of the rows, so that no family of steps lies in both; operations keep the halves that prices were fitted by."""
    if row["group"] == "operation":
        return row["half"]
    return published.half(family(row))


def read(steps: Path, operations: Path) -> list[Row]:
    """Rows with a forecast; ``group`` is ``step`` or ``operation``."""
    for path in (steps, operations):
        if not path.is_file():
            raise SystemExit(f"{path} is no file; give lines that run.py wrote with --out")
    found = [row | {"group": "step"} for row in lines(steps)]
    found += [
        row | {"group": "operation"}
        for row in lines(operations)
        if row["kind"] not in OTHER and row["generation"] not in UNJUDGED
    ]
    found = [row for row in found if row.get("error") is not None]
    for row in found:
        if not row["error"] > -1 or row["error"] == math.inf:
            raise SystemExit(
                f"{row['id']} has an error of {row['error']}; it is finite and above -1"
            )
    return [row | {"half": half(row)} for row in found]


def interval(rows: Sequence[Row]) -> Interval | None:
    """The interval of ``SHARE`` by rank of the errors, each family counting once; None for too few families.

    Of n results that are exchangeable with a new one, the new one lies beyond the k-th from an end with probability
    k / (n + 1) (conformal prediction; Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005).
    """
    sizes = Counter(family(row) for row in rows)
    if len(sizes) < FEW:
        return None
    weighed = sorted((math.log1p(row["error"]), 1 / sizes[family(row)]) for row in rows)
    beyond = math.floor((1 - SHARE) / 2 * (len(sizes) + 1) + 1e-9)

    def end(ordered: Iterable[tuple[float, float]]) -> float:
        total = 0.0
        for error, weight in ordered:
            total += weight
            if total >= beyond - 1e-9:
                return math.expm1(error)
        raise AssertionError("ranks end within the families")

    return Interval(
        low=min(end(weighed), -LEAST),
        high=max(end(reversed(weighed)), LEAST),
        rows=len(rows),
        families=len(sizes),
    )


def intervals(rows: Sequence[Row]) -> dict[str, Interval]:
    """By generation, with ``all`` of them together; a generation with few families has none of its own."""
    found = {"all": interval(rows)}
    for name in dict.fromkeys(row["generation"] for row in rows):
        found[name] = interval([row for row in rows if row["generation"] == name])
    return {name: made for name, made in found.items() if made is not None}


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by kind of program and mode."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["group"], row["mode"]), []).append(row)
    return found


def held(made: Mapping[str, Interval], rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Rows that lie in the intervals, and rows, by generation and of ``all``."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        inside = made.get(row["generation"], made["all"]).holds(row)
        for name in (row["generation"], "all"):
            within, total = found.get(name, (0, 0))
            found[name] = within + inside, total + 1
    return found


def checks(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, tuple[int, int]]]:
    """By kind, mode and the half judged: how many of its rows the intervals of the other half hold."""
    found = {}
    for (group, mode), mine in groups(rows).items():
        for half, other in (("judge", "fit"), ("fit", "judge")):
            made = intervals([row for row in mine if row["half"] == other])
            found[group, mode, half] = held(made, [row for row in mine if row["half"] == half])
    return found


def table(rows: Sequence[Row]) -> str:
    """The text of ``errors.toml``."""
    text = [
        "# Errors (forecast - measured) / measured between which 80 % of results lie, by kind of program, mode and",
        "# generation. Written by benchmarks/accuracy/intervals.py --write; what it holds of the other half is in",
        "# benchmarks/results/2026-11-22-intervals.md.",
        "",
    ]
    for (group, mode), mine in groups(rows).items():
        used = [row for row in mine if row["half"] in HALVES[group]]
        for name, made in intervals(used).items():
            here = [row for row in used if name in ("all", row["generation"])]
            inside = sum(made.holds(row) for row in here)
            text += [f"[{group}.{mode}.{name}]", f"rows = {made.rows}", f"held = {inside}"]
            text += [f"low = {made.low:.3f}", f"high = {made.high:.3f}", ""]
    return "\n".join(text).rstrip() + "\n"


def coverage(rows: Sequence[Row]) -> str:
    """Markdown of :func:`checks`."""
    text = [
        "| kind | mode | half judged by the other | generation | held | rows | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for (group, mode, half), found in checks(rows).items():
        for name, (within, total) in sorted(found.items()):
            text.append(
                f"| {group} | {mode} | {half} | {name} | {within} | {total} | {within / total:.0%} |"
            )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, default=STEPS, help="lines of accuracy/run.py")
    parser.add_argument("--operations", type=Path, default=OPERATIONS, help="of operations/run.py")
    parser.add_argument("--write", action="store_true", help="writes forecasting/errors.toml")
    asked = parser.parse_args()
    rows = read(asked.steps, asked.operations)
    for group, given in {"step": asked.steps, "operation": asked.operations}.items():
        for part in ("fit", "judge"):
            mine = {family(r) for r in rows if r["group"] == group and r["half"] == part}
            if len(mine) < FEW:
                raise SystemExit(
                    f"{given} has {len(mine)} families of {group}s in the {part} half; {FEW} are needed"
                )
    print(coverage(rows))
    if asked.write:
        TABLE.write_text(table(rows))


if __name__ == "__main__":
    main()
