"""Errors of rows that ``run.py`` wrote, by half, generation and kind.

``python benchmarks/operations/table.py rows.jsonl``
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from records import lines, refuse, tabled


def line(row: Mapping[str, Any]) -> str:
    """One row."""
    if row["error"] is None:
        return f"{row['id']:60} {row['generation']:6} {row['problem']}"
    return (
        f"{row['id']:60} {row['generation']:6} {row['measured_seconds'] * 1e3:10.3f} ms measured "
        f"{row['forecast_seconds'] * 1e3:10.3f} ms forecast {row['error']:+7.1%}"
    )


def summary(group: Sequence[tuple[float, float]]) -> str:
    """Number, median, median of the absolute errors, their 90th percentile, and their mean by time, of errors and seconds."""
    errors = [error for error, _ in group]
    by_time = sum(abs(error) * seconds for error, seconds in group) / sum(s for _, s in group)
    absolute = sorted(abs(error) for error in errors)
    p90 = absolute[min(int(0.9 * len(absolute)), len(absolute) - 1)]
    return (
        f"{len(errors):5} | {statistics.median(errors):+7.1%} | "
        f"{statistics.median(absolute):6.1%} | {p90:6.1%} | {by_time:6.1%}"
    )


def text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table, in Markdown."""
    groups: dict[tuple[str, str, str, str], list[tuple[float, float]]] = defaultdict(list)
    problems: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["error"] is None:
            problems[row["problem"]] += 1
            continue
        seconds = row["measured_seconds"] * (row.get("runs") or 1)
        for generation, kind in (
            (row["generation"], row["kind"]),
            (row["generation"], "all"),
            ("all", "all"),
        ):
            groups[row["mode"], row["half"], generation, kind].append((row["error"], seconds))
    made = [
        "| mode | half | generation | kind | rows | median error | median abs | p90 abs | by time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (mode, half, generation, kind), group in sorted(groups.items()):
        made.append(f"| {mode} | {half} | {generation} | {kind} | {summary(group)} |")
    made += [f"{count} rows without a forecast: {why}" for why, count in sorted(problems.items())]
    return "\n".join(made)


def main() -> None:
    if len(sys.argv) < 2:
        refuse("table.py needs files that run.py --out wrote: table.py rows.jsonl")
    fields = ("mode", "half", "generation", "kind", "error", "measured_seconds")
    rows = []
    for path in map(Path, sys.argv[1:]):
        found = lines(path, *fields)
        tabled(path, found, text)
        rows += found
    print(text(rows))


if __name__ == "__main__":
    main()
