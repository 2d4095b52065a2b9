"""Steps of published training runs on GPUs: forecast by XLA's GPU compiler, or by the roofline where it is not installed.

``python benchmarks/gpu/steps.py --out rows.jsonl`` forecasts every row of ``steps.json`` and appends a line each; ``--table``
prints errors, those of both halves and the growth from 8 to 128 GPUs, of the lines of one or several files.
"""

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "accuracy"))
from ask import forecast

from systolic.compiling import Compiler
from systolic.compiling.gpu_compiler import compiler

HERE = Path(__file__).parent
GROWTH = "maxtext-a3-llama2-7b-"
"""Rows of one model on more and more machines."""
MOST = 0.25
"""Error that no row is to have."""
UNSTATED = re.compile(r"not stated|not stored")
"""Words of a departure that says which setting the source does not give."""


def half_of(name: str) -> str:
    """``fit`` or ``judge``, by the row's name."""
    return "judge" if hashlib.sha256(name.encode()).digest()[0] % 2 else "fit"


def run(row: dict[str, Any]) -> dict[str, Any]:
    """The forecast of a row.

    The published runs mask by position only. The recipe hides other documents too, whose mask is read as a bias.
    """
    began = time.monotonic()
    made = forecast(row["options"], row["flags"].split(), row["on"], Compiler())
    seconds = made.get("forecast_seconds")
    kept = ("problem", "peak_gib", "mfu", "hfu", "time_by_resource", "dropped")
    return {
        "id": row["id"],
        "half": half_of(row["id"]),
        "set": row["set"],
        "by": "compiler" if compiler() else "roofline",
        "measured_seconds": row["measured_seconds"],
        "forecast_seconds": seconds,
        "error": None if seconds is None else seconds / row["measured_seconds"] - 1,
        "took_seconds": round(time.monotonic() - began, 1),
        **{key: made[key] for key in kept if key in made},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown: each row, then the errors of both halves and the growth."""
    forecasts: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        forecasts[row["id"]][row["by"]] = row
    ways = [by for by in ("compiler", "roofline") if any(by in of for of in forecasts.values())]
    lines = [
        f"| row | set | half | measured | {' | '.join(ways)} | memory |",
        "|---|---|---|---|" + "---|" * (len(ways) + 1),
    ]
    for name, of in forecasts.items():
        first = next(iter(of.values()))
        cells = [_cell(of.get(by)) for by in ways]
        peak = of.get("compiler", first).get("peak_gib")
        memory = "–" if peak is None else f"{peak:.1f} GiB, fits"
        lines.append(
            f"| {name} | {first['set']} | {first['half']} | {first['measured_seconds']:.3f} s | {' | '.join(cells)} | {memory} |"
        )
    lines.append("")
    for by in ways:
        priced = [of[by] for of in forecasts.values() if by in of and of[by]["error"] is not None]
        for batch, half in sorted({(row["set"], row["half"]) for row in priced}):
            errors = [row["error"] for row in priced if (row["set"], row["half"]) == (batch, half)]
            lines.append(f"- {by}, {batch} set, {half}: {_summary(errors)}")
        lines.append(f"- {by}, all: {_summary([row['error'] for row in priced])}")
        stated = [row["error"] for row in priced if row["id"] in _stated()]
        lines.append(
            f"- {by}, rows whose mesh and rematerialisation are published: {_summary(stated)}"
        )
        lines += _growth(forecasts, by)
    return lines


def _summary(errors: list[float]) -> str:
    size = [abs(error) for error in errors]
    beyond = sum(error > MOST for error in size)
    return (
        f"{len(errors)} rows, mean {statistics.mean(size):.1%}, median {statistics.median(size):.1%}, signed "
        f"{statistics.mean(errors):+.1%}, worst {max(errors, key=abs):+.1%}, {beyond} above {MOST:.0%}"
    )


def _stated() -> set[str]:
    """Rows without a setting that had to be taken from elsewhere."""
    rows = json.loads((HERE / "steps.json").read_text())
    return {
        row["id"] for row in rows if not any(UNSTATED.search(text) for text in row["departures"])
    }


def _growth(forecasts: dict[str, dict[str, dict[str, Any]]], by: str) -> list[str]:
    series = {
        int(name.removeprefix(GROWTH)): of[by]
        for name, of in forecasts.items()
        if name.startswith(GROWTH) and by in of and of[by]["error"] is not None
    }
    if len(series) < 2:
        return []
    least = min(series)
    cells = []
    for count, row in sorted(series.items()):
        ours = row["forecast_seconds"] / series[least]["forecast_seconds"]
        theirs = row["measured_seconds"] / series[least]["measured_seconds"]
        cells.append(f"{count}: {ours:.3f} of {theirs:.3f} ({ours / theirs - 1:+.1%})")
    return [f"- {by}, growth from {least} GPUs: " + ", ".join(cells)]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["error"] is None:
        return str(row.get("problem"))
    return f"{row['forecast_seconds']:.3f} s ({row['error']:+.1%})"


def main() -> None:
    """Forecasts or prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines, appended to")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--table", type=Path, nargs="+", help="files to print")
    chosen = parser.parse_args()
    if chosen.table:
        texts = [line for path in chosen.table for line in path.read_text().splitlines()]
        print("\n".join(table([json.loads(line) for line in texts])))
        return
    for row in json.loads((HERE / "steps.json").read_text()):
        if chosen.only not in row["id"]:
            continue
        line = json.dumps(run(row))
        print(line, flush=True)
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
