"""Forecast against published: compiles each published result's program and prints the table of errors.

``python benchmarks/accuracy/run.py --published FILE --out ROWS`` appends a line for each record of
FILE: ``id, measured_seconds, forecast_seconds, error`` and more; run again, it goes on. ``--quick``
stops at schedules, ``--fresh`` uses an empty store, ``--list`` says what can be expressed. ``--again ROWS`` prices the
programs of an earlier run anew, a second or two a row, without a compile: they lie in ``--store FOLDER``, by default
the user's cache.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rows as published
from ask import append, forecast, priced_again, settled
from records import check_out, count, left_stale, lines, none_chosen, refuse, tabled

from systolic.compiling import Compiler
from systolic.core.files import cache_home, write_atomically

LARGE = 0.15
"""Error above which a row is listed by itself."""


def answer(row: published.Row, compiler: Compiler, mode: str) -> dict[str, Any]:
    """One row of the table; ``problem`` where there is no forecast."""
    start = time.perf_counter()
    made = forecast(row.options, row.flags, row.slice, compiler, row.recipe)
    departures = list(row.departures)
    if dropped := made.pop("dropped", None):
        departures.append(f"flags unknown to this libtpu: {' '.join(dropped)}")
    record = {
        "id": row.id,
        "measured_seconds": row.published_seconds,
        "half": published.half(row.family),
        "generation": row.generation,
        "kind": row.kind,
        "slice": row.slice,
        "mode": mode,
        "flags": list(row.flags),
        "departures": departures,
    }
    return priced(record, made) | {"seconds": round(time.perf_counter() - start, 2)}


def priced(record: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the figures of its program, and the error of its forecast."""
    seconds, measured = made.get("forecast_seconds"), record["measured_seconds"]
    error = None if seconds is None else seconds / measured - 1
    return {**record, **made, "forecast_seconds": seconds, "error": error}


def again(earlier: Sequence[Mapping[str, Any]], root: Path) -> Iterator[dict[str, Any]]:
    """Rows at today's prices, of the programs in a store; ``stale`` has those whose program isn't there."""
    for record in earlier:
        same = {name: value for name, value in record.items() if name != "stale"}
        made = priced_again(record.get("program"), record.get("slice") or "", root)
        if made is not None:
            yield priced(same, made | {"cached": record["cached"]})
        elif record.get("error") is not None:
            yield same | {"stale": True}
        else:
            yield same


def skipped(row: published.Skipped, mode: str) -> dict[str, Any]:
    """The line of a record that no recipe can say."""
    empty = {"measured_seconds": None, "forecast_seconds": None, "error": None}
    return {"id": row.id, **empty, "half": published.half(row.family), "mode": mode} | {
        "reason": row.reason
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each row, then errors by generation and half, what does not fit, what was not expressed."""
    head = "| published result | slice | measured | forecast | error | largest parts of the step |"
    lines = [head, "|---|---|---|---|---|---|"]
    forecasts = [r for r in records if "reason" not in r]
    for record in forecasts:
        start = f"| {record['id']} | {record['slice']} | {record['measured_seconds']:.4g} s"
        if record["error"] is None:
            lines.append(f"{start} | - | - | {record['problem'].splitlines()[0]} |")
            continue
        whole = record["forecast_seconds"]
        parts = sorted(record["time_by_resource"].items(), key=lambda p: -p[1])[:3]
        text = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts)
        lines.append(f"{start} | {whole:.4g} s | {record['error']:+.1%} | {text} |")
    lines += ["", *summary(forecasts), "", *reasons(records)]
    return "\n".join(lines)


def summary(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors by generation, by half and of all, and the rows that need a word."""
    lines = [
        "| rows | forecast | mean abs. error | median | mean | largest | above 15 % |",
        "|---|---|---|---|---|---|---|",
    ]
    generations = dict.fromkeys(r["generation"] for r in records)
    groups = {name: [r for r in records if r["generation"] == name] for name in generations}
    for name in ("fit", "judge"):
        groups[f"half: {name}"] = [r for r in records if r["half"] == name]
    groups["all"] = list(records)
    for name, group in groups.items():
        errors = [r["error"] for r in group if r["error"] is not None]
        if not errors:
            continue
        sizes = [abs(e) for e in errors]
        lines.append(
            f"| {name} | {len(errors)} of {len(group)} | {statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | {statistics.mean(errors):+.1%} | {max(errors, key=abs):+.1%} | {sum(e > LARGE for e in sizes)} |"
        )
    lines.append("")
    for record in records:
        if record["error"] is not None and abs(record["error"]) > LARGE:
            lines.append(f"- {record['error']:+.1%} {record['id']} ({record['half']})")
    for record in records:
        if record["error"] is None and "does not fit" in record["problem"]:
            lines.append(f"- ran there, wrongly rejected here: {record['id']}, {record['problem']}")
    return lines


def reasons(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Records that no recipe says, by reason."""
    by_reason: dict[str, list[str]] = {}
    for record in records:
        if "reason" in record:
            by_reason.setdefault(record["reason"], []).append(record["id"])
    lines = ["Not expressed:", ""] if by_reason else []
    return lines + [f"- {reason}: {', '.join(ids)}" for reason, ids in by_reason.items()]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, default=published.PUBLISHED, help="records")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; an earlier run goes on")
    parser.add_argument("--only", nargs="*", default=[], help="parts of row names")
    parser.add_argument("--half", choices=("fit", "judge"), help="rows of one half only")
    parser.add_argument("--workers", type=count, default=1)
    parser.add_argument("--fresh", action="store_true", help="with an empty store")
    parser.add_argument("--quick", action="store_true", help="schedules only, cycles estimated")
    parser.add_argument("--list", action="store_true", help="what can be expressed, no compile")
    parser.add_argument("--again", type=Path, help="an earlier run's lines, priced anew into --out")
    parser.add_argument("--store", type=Path, default=cache_home(), help="of compiled programs")
    parser.add_argument("--table", type=Path, help="print the table of an earlier run's lines")
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    if asked.table:
        print(tabled(asked.table, lines(asked.table, "id", "measured_seconds", "half"), table))
        return
    if asked.again:
        if asked.out is None:
            refuse("--again writes rows at today's prices; add --out FILE, which may be the same")
        made = list(again(lines(asked.again, "id", "mode"), asked.store))
        write_atomically(asked.out, "".join(json.dumps(record) + "\n" for record in made))
        print(left_stale(made, asked.store), file=sys.stderr)
        return
    chosen = [
        row
        for row in published.expressed(asked.published)
        if (not asked.only or any(part in row.id for part in asked.only))
        and asked.half in (None, published.half(row.family))
    ]
    if not chosen:
        refuse(none_chosen(asked.published, asked.only, asked.half))
    if asked.list:
        for row in chosen:
            plain = isinstance(row, published.Skipped)
            print(
                json.dumps(
                    {"id": row.id, "reason": row.reason}
                    if plain
                    else {"id": row.id, "slice": row.slice, "options": row.options}
                    | {"flags": row.flags, "departures": row.departures}
                )
            )
        return
    mode = "quick" if asked.quick else "full"
    check_out(asked.out)
    done = settled(asked.out, mode)
    with tempfile.TemporaryDirectory() as empty:
        compiler = Compiler(root=Path(empty) if asked.fresh else asked.store)
        if asked.quick:
            compiler = compiler.quick()

        def one(row: published.Row | published.Skipped) -> None:
            if row.id in done:
                return
            if isinstance(row, published.Skipped):
                record = skipped(row, mode)
            else:
                record = answer(row, compiler, mode)
                said = record.get("problem") or f"{record['error']:+.1%}"
                print(f"{row.id}: {said} ({record['seconds']:.0f} s)", file=sys.stderr, flush=True)
            done[row.id] = record
            append(asked.out, record)

        with ThreadPoolExecutor(asked.workers) as pool:
            list(pool.map(one, chosen))
    print(table([done[row.id] for row in chosen]))


if __name__ == "__main__":
    main()
