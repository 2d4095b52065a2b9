"""Random jobs against physics: what no forecast may be below, and what must grow or shrink with what.

    nice -n 10 python benchmarks/envelope/run.py --out envelope.jsonl [--count 300] [--seed 0] [--only decode]
    python benchmarks/envelope/run.py --out envelope.jsonl --table

Jobs come in families of five: a base, the same with twice the layers, the batch or the sequence, and on
twice the slices or on a slice of twice the size. Each is compiled up to the compiler's schedule, with the flags that
jobs share on its chip, seconds a job. Results go to --out, a JSON object a line, as they come; what is there is not done again. --table prints
the rules, the jobs that break them and, where one is known, why. --again simulates the done jobs' schedules by
today's code; --record FOLDER keeps schedules for tests, those of --only.
"""

import argparse
import contextlib
import gzip
import json
import lzma
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from cases import Case, case_of, jobs
from physics import floor_of, table
from records import check_out

from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, StepKind
from systolic.core.errors import SystolicError
from systolic.core.files import Store
from systolic.forecasting import forecast_job
from systolic.hlo import parse
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Timeline

_METADATA = re.compile(r", metadata=\{[^{}]*\}")


def forecast(case: Case, compiler: Compiler) -> dict[str, Any]:
    """What the forecast says, as a record."""
    begin, on = time.perf_counter(), slice(case.slice)
    compiler = replace(compiler, flags=resolved("", on.chip)).quick()
    record: dict[str, Any] = {"name": case.name, "key": case.key, "case": asdict(case)}
    try:
        made = forecast_job(case.job(), on, verb=StepKind(case.verb), compiler=compiler)
    except SystolicError as error:
        return {**record, "problem": str(error)}
    return {
        **record,
        "fits": made.fits,
        "memory_bytes": made.need_bytes,
        **(seen(made.timeline) if made.timeline is not None else {"step_seconds": None}),
        "hardware_flops": made.hardware_flops,
        "program": made.compiler.program,
        "floor": asdict(floor_of(case)),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def seen(timeline: Timeline) -> dict[str, Any]:
    """What a record keeps of a simulated step."""
    by: Counter[str] = Counter()
    for span, times in timeline.leaves():
        if span.lane == "core":
            by[span.resource.value] += span.seconds * times
    return {
        "step_seconds": timeline.seconds,
        "by_resource": dict(by),
        "notes": list(timeline.notes),
    }


def again(record: Mapping[str, Any], compiler: Compiler) -> dict[str, Any]:
    """A done job's record, its schedule simulated by today's code."""
    if not record.get("step_seconds"):
        return dict(record)
    entry = Store("programs", compiler.root).path(record["program"])
    report = json.loads((entry / "report.json").read_text())
    module = parse(gzip.decompress((entry / "module.hlo.gz").read_bytes()).decode())
    places = [tuple(place) for place in report["places"]]
    timeline = simulate(module, slice(record["case"]["slice"]), places, flags=report["flags"])
    floor = asdict(floor_of(case_of(record)))
    return {**record, **seen(timeline), "floor": floor}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key; the last line may be torn."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            found[record["key"]] = record
    return found


def record_schedule(record: Mapping[str, Any], compiler: Compiler, folder: Path) -> None:
    """The schedule of a done job, small: names of JAX are left out but for kernels, machine code and folders too."""
    from tests.recorded.hlo.record import clean

    entry = Store("programs", compiler.root).path(record["program"])
    lines = clean(gzip.decompress((entry / "module.hlo.gz").read_bytes()).decode()).splitlines()
    kept = [one if "custom-call(" in one else _METADATA.sub("", one) for one in lines]
    (folder / f"{record['name']}.hlo.xz").write_bytes(
        lzma.compress("\n".join(kept).encode(), preset=9)
    )
    report = json.loads((entry / "report.json").read_text())
    (folder / f"{record['name']}.json").write_text(
        json.dumps({**record, "places": report["places"], "flags": report["flags"]}) + "\n"
    )


def recorded(path: Path) -> dict[str, Any]:
    """The record of a recorded schedule, simulated again."""
    record = json.loads(path.with_suffix(".json").read_text())
    text = lzma.decompress(path.with_suffix(".hlo.xz").read_bytes()).decode()
    places = [tuple(place) for place in record["places"]]
    on, flags = slice(record["case"]["slice"]), record["flags"]
    return {**record, **seen(simulate(parse(text), on, places, flags=flags))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a verb, or names of jobs with commas")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    check_out(asked.out)
    compiler, done = Compiler(), read(asked.out)
    cases = jobs(asked.count, asked.seed)
    known = [done[case.key] for case in cases if case.key in done]
    if asked.again:
        fresh = [again(record, compiler) for record in done.values()]
        asked.out.write_text("".join(json.dumps(record) + "\n" for record in fresh))
        return
    if asked.table:
        print(table(known))
        return
    names = (asked.only or "").split(",")
    cases = [c for c in cases if not asked.only or c.verb in names or c.name in names]
    if asked.record is not None:
        for case in cases:
            record_schedule(done[case.key], compiler, asked.record)
        return
    with asked.out.open("a") as out:
        for at, case in enumerate(cases, 1):
            if case.key in done:
                continue
            made = forecast(case, compiler)
            out.write(json.dumps(made) + "\n")
            out.flush()
            seconds = made.get("step_seconds") or 0.0
            print(
                f"{at}/{len(cases)} {case.name} {case.verb} {case.slice} {seconds * 1e3:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
