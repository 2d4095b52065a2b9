"""The table of a run of ``run.py``: published step, forecast of the trainer's own program, and its error beside our rebuild's.

``python benchmarks/reach/report.py ROWS.jsonl [--rebuilt REBUILT.jsonl]``; ``REBUILT`` is what ``benchmarks/accuracy/run.py``
wrote. Halves are those of ``benchmarks/accuracy``: by the first digit of the SHA-256 of a row's family (chip, trainer,
model). Causes are looked for in ``fit``; ``judge`` judges, without those that were looked into (:data:`LOOKED_INTO`) or that
a constant rests on (:data:`RESTED_ON`).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "accuracy"))
import rows as published
from records import lines, newest, tabled

from systolic.core.units import Origin

HERE = Path(__file__).parent
REBUILT = newest("accuracy-quick")
CAUSES = HERE / "causes.json"
"""Why a row is off, by the beginning of its name."""
LARGE = 0.15
"""Error above which a cause is named."""

LOOKED_INTO = ("maxtext-pr4836-",)
"""Beginnings of names of the judge half whose errors were looked into: they count as ``fit`` since."""

RESTED_ON = ("maxtext-v5e-16b-", "maxtext-v4-22b-", "wiki-maxtext-qwen3-8b-v6e8-")
"""Beginnings of names of the judge half that a constant of the simulator rests on: they count as ``fit``.

The growth of the 16B and 22B over slices gave ``asynchronous.share_per_doubling``. Profiles of Qwen3 8B on v6e-8 are the
source of the ends of carried gathers (``asynchronous.carried``), and of ``network.reduce_scatter`` beside v5p-8
(``src/systolic/sim/constants.toml``).
"""

Row = Mapping[str, Any]


def half(name: str, drawn: str) -> str:
    """``fit`` or ``judge`` of a row, however its program was made: the drawn one, but ``fit`` if it was looked into or rested on."""
    return "fit" if name.startswith((*LOOKED_INTO, *RESTED_ON)) else drawn


def joined(found: Sequence[Row], rebuilt: Sequence[Row]) -> list[dict[str, Any]]:
    """Each row with its published step, its half and our rebuild's error."""
    told = {one["id"]: one for one in json.loads(published.PUBLISHED.read_text())}
    ours = {one["id"]: one for one in rebuilt}
    made = []
    for row in found:
        record = told[row["id"]]
        expressed = published.row_of(record)
        seconds, measured = row.get("forecast_seconds"), record["step_time_best_s"]
        made.append(
            {
                **row,
                "measured_seconds": measured,
                "error": seconds / measured - 1 if seconds else None,
                "half": half(row["id"], published.half(expressed.family)),
                "chips": record["num_chips"],
                "generation": expressed.family.split()[0],
                "rebuilt": ours.get(row["id"], {}).get("error"),
            }
        )
    return made


def table(found: Sequence[Row]) -> str:
    """Markdown: a line for each row, then errors by half and generation, and what gave no forecast."""
    causes = json.loads(CAUSES.read_text())
    twice = {row["id"] for row in found if row["trainer"] != "maxtext" and row["error"] is not None}
    beside = [row for row in found if row["trainer"] == "maxtext" and row["id"] in twice]
    found = [row for row in found if row not in beside]
    lines = [
        "| row | half | chips | published | own program | error | rebuilt as a recipe | memory | answered in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if row["error"] is not None:
            lines.append(
                f"| {row['id']}{_stack(row)} | {row['half']} | {row['chips']} | {row['measured_seconds']:.4g} s | {row['forecast_seconds']:.4g} s | {row['error']:+.1%} | {_percent(row['rebuilt'])} | {_memory(row)} | {row['seconds']:.0f} s |"
            )
    lines += ["", *_summary(found), "", *_large(found, causes), "", *_without(found, causes)]
    if beside:
        lines += ["", "The rows of `maxtext-v0.1.3` by today's MaxText, not counted above:", ""]
        lines += [f"- {row['id']}: {_percent(row['error'])}" for row in beside]
    return "\n".join(lines)


def _stack(row: Row) -> str:
    notes = [] if row["trainer"] == "maxtext" else [row["trainer"], f"jax {row['versions']['jax']}"]
    notes += ["earlier prices"] if row.get("stale") else []
    return f" ({', '.join(notes)})" if notes else ""


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def _memory(row: Row) -> str:
    """Whether it fits, by what where that is not the compiler's own figure, and of how much."""
    need, have = row["peak_bytes"], row["capacity_bytes"]
    by = "" if row["memory_origin"] == Origin.compiled.value else " by lifetimes"
    return f"{'fits' if row['fits'] else 'does not fit'}{by}, {need / 2**30:.1f} of {have / 2**30:.1f} GiB"


def _summary(found: Sequence[Row]) -> Iterable[str]:
    """Mean, median and largest error of groups of rows, beside our rebuild's on the same rows."""
    yield "| rows | forecast | mean abs. error | median | mean | above 15 % | rebuilt, same rows | mean abs. error |"
    yield "|---|---|---|---|---|---|---|---|"
    groups = {f"half: {name}": [r for r in found if r["half"] == name] for name in ("fit", "judge")}
    for row in found:
        groups.setdefault(row["generation"], []).append(row)
    groups["all"] = list(found)
    for name, group in groups.items():
        errors = [r["error"] for r in group if r["error"] is not None]
        if not errors:
            continue
        both = [
            (abs(r["error"]), abs(r["rebuilt"]))
            for r in group
            if r["error"] is not None and r["rebuilt"] is not None
        ]
        pair = "- | -"
        if both:
            own, rebuilt = (statistics.mean(one) for one in zip(*both, strict=True))
            pair = f"{len(both)} | {rebuilt:.1%}, own program {own:.1%}"
        sizes = [abs(e) for e in errors]
        yield f"| {name} | {len(errors)} of {len(group)} | {statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | {statistics.mean(errors):+.1%} | {sum(e > LARGE for e in sizes)} | {pair} |"


def _large(found: Sequence[Row], causes: Mapping[str, str]) -> Iterable[str]:
    for row in found:
        if row["error"] is not None and abs(row["error"]) > LARGE:
            cause = _cause(row["id"], causes) or "cause not known"
            yield f"- {row['error']:+.1%} {row['id']} ({row['half']}): {cause}"


def _without(found: Sequence[Row], causes: Mapping[str, str]) -> Iterable[str]:
    for row in found:
        if row["error"] is None:
            why = _cause(row["id"], causes) or _short(row.get("problem") or "does not fit")
            yield f"- no forecast: {row['id']}: {why}"


def _short(problem: str) -> str:
    """A message without the command that it repeats."""
    return problem.rpartition("failed before its step was known: ")[2]


def _cause(name: str, causes: Mapping[str, str]) -> str:
    return next((text for start, text in causes.items() if name.startswith(start)), "")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="lines that run.py wrote")
    parser.add_argument("--rebuilt", type=Path, default=REBUILT)
    args = parser.parse_args()
    found = joined(lines(args.rows, "id", "on", "seconds"), lines(args.rebuilt, "id"))
    print(tabled(args.rows, found, table))


if __name__ == "__main__":
    main()
