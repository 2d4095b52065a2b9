"""Simulated against measured operations: compiles each program, simulates its schedule, writes rows.

``python benchmarks/operations/run.py --measured ops.json --out rows.jsonl`` goes on where an earlier
run of the same ``--out`` stopped; answers of the compiler are kept, so that a change of pricing is
seconds. ``table.py`` prints what it wrote.
"""

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compiling
import rows as measured
import table
import traced
from records import check_out, count, lines, none_chosen, refuse

from systolic.chips import slice
from systolic.core.errors import SystolicError
from systolic.hlo import Module, parse
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Timeline

SHOWN = 3
"""Ids of rows that are left out, named for each reason; --left-out names all."""
CALL_SECONDS = 1.37e-4
"""A call by the host's clock, beside the device's seconds: median of the fit half's matmuls on TPU7x that take less than 0.1 ms."""
MODES = ("full", "quick")
"""With the compiler's cycles, and from the schedule before code generation."""


def module_of(row: measured.Row, mode: str) -> Module:
    """The compiler's answer."""
    if measured.is_traced(row):
        return traced.program(row)
    path = compiling.folder_of(row) / f"{mode}.hlo.gz"
    return parse(gzip.decompress(path.read_bytes()).decode())


def report_of(row: measured.Row) -> dict[str, Any] | None:
    """The report of a row's compile; a profile's op needs none."""
    if measured.is_traced(row):
        return {"slice": measured.slice_of(row), "places": []}
    return compiling.report_of(row)


def modes_of(row: measured.Row) -> Sequence[str]:
    """Modes that a row has: a profile's lines carry no cycles."""
    return MODES[1:] if measured.is_traced(row) else MODES


def simulated(row: measured.Row, mode: str) -> Timeline:
    """The timeline of a compiled row.

    Raises:
        SystolicError: the schedule cannot be simulated.
    """
    report = report_of(row) or {}
    places = [tuple(place) for place in report["places"]] or None
    flags = measured.flags_of(row)
    return simulate(module_of(row, mode), slice(report["slice"]), places, flags)


def other_program(row: measured.Row, module: Module) -> bool:
    """Whether a row that took as long as a product of every row with every group is a kernel of groups now."""
    return measured.ran_dense(row) and "tpu_custom_call" in {
        op.target for computation in module.computations.values() for op in computation
    }


def result(row: measured.Row, mode: str) -> dict[str, Any]:
    """One line of the output."""
    report = report_of(row) or {"problem": "not compiled"}
    made: dict[str, Any] = {
        "id": row["id"],
        "measured_seconds": row["measured_seconds"],
        "runs": row.get("runs", 1),
        "forecast_seconds": None,
        "error": None,
        "kind": measured.kind_of(row),
        "generation": row["generation"],
        "half": measured.half_of(row),
        "mode": mode,
    }
    if "problem" in report:
        return made | {"problem": report["problem"]}
    if other_program(row, module_of(row, mode)):
        return made | {"problem": "timed as a product with every group, now a kernel of groups"}
    try:
        timeline = simulated(row, mode)
    except SystolicError as error:
        return made | {"problem": str(error)}
    call = CALL_SECONDS if (row.get("config") or {}).get("call") else 0.0
    return made | {
        "forecast_seconds": timeline.seconds + call,
        "error": (timeline.seconds + call) / row["measured_seconds"] - 1,
        "priced_by": priced_by(timeline),
    }


def priced_by(timeline: Timeline) -> dict[str, float]:
    """Seconds of the core by what priced them."""
    found: dict[str, float] = {}
    for span, times in timeline.leaves():
        if span.lane == "core":
            found[span.price_source] = found.get(span.price_source, 0.0) + span.seconds * times
    return found


def written(path: Path | None) -> list[dict[str, Any]]:
    """What the output has."""
    if path is None or not path.exists():
        return []
    return lines(path, "id", "mode", "error")


def chosen(asked: argparse.Namespace) -> list[measured.Row]:
    """Rows that are asked for and have a program here; the others are listed on stderr, by reason."""
    read = measured.read(asked.measured)
    rows, left = measured.unique(read), defaultdict(list)
    if asked.half:
        rows = [row for row in rows if measured.half_of(row) == asked.half]
    why = {row["id"]: measured.why_not(row) for row in rows}
    # What is no program may lack what tells its kind.
    kinds = {r["id"]: r["what"] if why[r["id"]] else measured.kind_of(r) for r in rows}
    rows = [row for row in rows if asked.match in f"{kinds[row['id']]} {row['id']}"]
    if not rows:
        refuse(none_chosen(asked.measured, [asked.match] if asked.match else [], asked.half))
    for row in rows:
        if reason := why[row["id"]]:
            left[reason].append(row["id"])
    apart = {name for names in left.values() for name in names}
    if asked.left_out:
        for reason, names in left.items():
            print(json.dumps({"reason": reason, "rows": len(names), "ids": names}))
    told = [f"{len(read)} rows"]
    if len(read) > len(measured.unique(read)):
        told.append(f"{len(read) - len(measured.unique(read))} have the id of another")
    told.append(f"{len(rows)} asked for, {len(apart)} of them left out:")
    print(", ".join(told), file=sys.stderr)
    for reason, names in sorted(left.items(), key=lambda one: -len(one[1])):
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        print(f"  {len(names):5} {reason}: {shown}", file=sys.stderr)
    rows = [row for row in rows if row["id"] not in apart]
    return measured.sample(rows, asked.sample) if asked.sample else rows


def run(rows: Sequence[measured.Row], out: Path | None, batch: int = 24) -> list[dict[str, Any]]:
    """Rows of the output, written a few at a time."""
    made = written(out)
    done = {(line["id"], line["mode"]) for line in made}
    waiting = [r for r in rows if any((r["id"], mode) not in done for mode in modes_of(r))]
    for begin in range(0, len(waiting), batch):
        group = waiting[begin : begin + batch]
        compiling.compiled([row for row in group if not measured.is_traced(row)])
        new = [result(row, mode) for row in group for mode in modes_of(row)]
        new = [line for line in new if (line["id"], line["mode"]) not in done]
        made += new
        if out is not None:
            with out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in new)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True, help="rows as ops.json has them")
    parser.add_argument("--out", type=Path, help="JSON lines; what is there is not made again")
    parser.add_argument(
        "--sample", type=count, help="so many rows, spread over kind and generation"
    )
    parser.add_argument("--half", choices=("fit", "judge"))
    parser.add_argument("--match", default="", help="only rows with this text in kind or id")
    parser.add_argument("--again", action="store_true", help="only rows compiled before")
    parser.add_argument(
        "--left-out", action="store_true", help="print the rows that can't be used, a line a reason"
    )
    asked = parser.parse_args()
    if not asked.left_out:
        check_out(asked.out)
    rows = chosen(asked)
    if asked.left_out:
        return
    if not rows:
        refuse("none of the rows can be used; --left-out prints them by reason")
    if asked.again:
        rows = [row for row in rows if report_of(row) is not None]
        if not rows:
            refuse("none of these rows was compiled before; leave --again out")
    print(table.text(run(rows, asked.out, batch=len(rows) if asked.again else 24)))


if __name__ == "__main__":
    main()
