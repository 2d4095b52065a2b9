"""Forecast against chips with one setting changed: does the forecast say which side is faster?

``python benchmarks/ablations/run.py --pairs FILE --out ROWS`` appends a line for each pair of FILE:
``id, measured_delta, forecast_delta`` and more; run again, it goes on. ``--quick`` stops at schedules.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pairs as published
from ask import (
    append,
    fitting,
    forecast,
    settled,
    tiled,
)  # of benchmarks/accuracy, whose folder pairs adds
from records import Kind, Record, check_out, lines, none_chosen, records, refuse, tabled, used
from rows import half

from systolic.compiling import Compiler

HERE = Path(__file__).parent
LEAST = 0.015
"""Differences below it are not judged: chips themselves differ by 0.7 to 1.2 % from node to node."""
NEEDED = dict.fromkeys(("id", "generation", "base", "change"), Kind.text) | {"chips": Kind.any}
OTHER = {
    "kind": Kind.text,
    **dict.fromkeys(("step_before_s", "step_after_s", "delta_pct"), Kind.number),
}
"""Fields of a record and their kinds."""
FEWEST = 3
"""Pairs of a family that make a ranking."""


def answer(pair: published.Pair, compiler: Compiler, mode: str) -> dict[str, Any]:
    """One line; ``problem`` where a side has no forecast."""
    start = time.perf_counter()
    record: dict[str, Any] = {
        "id": pair.id,
        "measured_delta": pair.measured_delta,
        "forecast_delta": None,
        "half": half(pair.id),
        "family": pair.family,
        "mode": mode,
        "departures": list(pair.after.departures),
    }
    seconds = []
    narrow = False  # both sides with whole logits, or both with tiles
    for name, side in (("before", pair.before), ("after", pair.after)):
        options = tiled(side.options()) if narrow else side.options()
        ask = fitting if name == "before" else forecast
        made = ask(options, side.flags, side.slice, compiler)
        if made.pop("tiled", False):
            narrow = True
            record["departures"].append("a loss in tiles, since whole logits do not fit here")
        if "dropped" in made:
            record["departures"].append(
                f"flags unknown to this libtpu: {' '.join(made['dropped'])}"
            )
        if "problem" in made:
            record["problem"] = f"{name}: {made['problem'].splitlines()[0]}"
            break
        record[f"{name}_seconds"] = made["forecast_seconds"]
        record[f"{name}_recomputed_seconds"] = made["recomputed_seconds"]
        record[f"{name}_program"] = made["program"]
        seconds.append(made["forecast_seconds"])
    else:
        record["forecast_delta"] = seconds[1] / seconds[0] - 1
        if record["before_program"] == record["after_program"]:
            record["problem"] = "both sides are the same program here"
            record["forecast_delta"] = None
    return record | {"seconds": round(time.perf_counter() - start, 2)}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each pair, agreement of signs, ranks, and what was not expressed."""
    judged = [r for r in records if r.get("forecast_delta") is not None]
    lines = ["| pair | half | measured | forecast | sign |", "|---|---|---|---|---|"]
    for r in judged:
        large = abs(r["measured_delta"]) > LEAST
        sign = ("right" if right(r) else "WRONG") if large else "-"
        if apart(r):
            sign += ", XLA recomputes on one side to fit"
        lines.append(
            f"| {r['id']} | {r['half']} | {r['measured_delta']:+.1%} | {r['forecast_delta']:+.1%} | {sign} |"
        )
    lines.append("")
    for name in ("fit", "judge", "all"):
        group = [r for r in judged if name in (r["half"], "all")]
        large = [r for r in group if abs(r["measured_delta"]) > LEAST]
        if large:
            error = statistics.median(abs(r["forecast_delta"] - r["measured_delta"]) for r in group)
            lines.append(
                f"- {name}: {len(group)} pairs forecast; {sum(map(right, large))} of {len(large)} signs right where chips differ by more than {LEAST:.1%}; median |forecast - measured| {error:.1%}"
            )
    lines += ["", *ranks(judged), ""]
    by_reason: dict[str, list[str]] = {}
    for r in records:
        if "reason" in r:
            by_reason.setdefault(r["reason"], []).append(r["id"])
        elif "problem" in r:
            by_reason.setdefault(f"no forecast: {r['problem']}", []).append(r["id"])
    return "\n".join(lines + [f"- {reason}: {', '.join(ids)}" for reason, ids in by_reason.items()])


def apart(record: Mapping[str, Any]) -> bool:
    """Whether XLA recomputes more on one side, by more than the smallest difference that is judged."""
    before, after = (record.get(f"{side}_recomputed_seconds", 0.0) for side in ("before", "after"))
    return abs(after - before) > LEAST * record.get("before_seconds", 1.0)


def right(record: Mapping[str, Any]) -> bool:
    """Whether the forecast is on the measured side of zero."""
    return record["measured_delta"] * record["forecast_delta"] > 0


def ranks(judged: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rank correlation of the deltas, by family."""
    lines = []
    for family in dict.fromkeys(r["family"] for r in judged):
        group = [r for r in judged if r["family"] == family]
        if len(group) >= FEWEST:
            value = published.spearman(
                [r["measured_delta"] for r in group], [r["forecast_delta"] for r in group]
            )
            lines.append(f"- {family}: rank correlation {value:.2f} over {len(group)} pairs")
    return lines


def chosen(asked: argparse.Namespace) -> list[Record]:
    """Records of the pairs that are asked for."""
    found = [
        entry
        for entry in records(asked.pairs, NEEDED, OTHER)
        if (not asked.only or any(part in entry["id"] for part in asked.only))
        and asked.half in (None, half(entry["id"]))
    ]
    if not found:
        refuse(none_chosen(asked.pairs, asked.only, asked.half))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=Path, default=HERE / "published.json", help="records")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; an earlier run goes on")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--half", choices=("fit", "judge"), help="pairs of one half only")
    parser.add_argument("--quick", action="store_true", help="schedules only, cycles estimated")
    parser.add_argument("--list", action="store_true", help="what can be expressed, no compile")
    parser.add_argument("--table", type=Path, help="print the table of an earlier run's lines")
    asked = parser.parse_args()
    if asked.table:
        print(tabled(asked.table, lines(asked.table, "id", "measured_delta", "half"), table))
        return
    mode = "quick" if asked.quick else "full"
    check_out(asked.out)
    done = settled(asked.out, mode)
    compiler = Compiler().quick() if asked.quick else Compiler()
    shown = []
    for entry in chosen(asked):
        pair = used(asked.pairs, entry, published.pair_of)
        if asked.list:
            print(json.dumps(pair.to_json()))
            continue
        if pair.id not in done:
            if isinstance(pair, published.Skipped):
                measured = {"measured_delta": pair.measured_delta, "forecast_delta": None}
                record = {"id": pair.id, **measured, "half": half(pair.id), "mode": mode}
                record["reason"] = pair.reason
            else:
                record = answer(pair, compiler, mode)
                print(json.dumps(record)[:300], file=sys.stderr, flush=True)
            done[pair.id] = record
            append(asked.out, record)
        shown.append(done[pair.id])
    if not asked.list:
        print(table(shown))


if __name__ == "__main__":
    main()
