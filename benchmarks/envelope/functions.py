"""Random plain functions against physics: loops, sorts, gathers, collectives, x64 and more, through ``systolic.forecast``.

    nice -n 10 python benchmarks/envelope/functions.py --out FILE [--count 150] [--seed 0] [--only sort,top_k]
    python benchmarks/envelope/functions.py --out FILE --table

Functions come in families: a base and variants that must take at least as long (more of something, 64-bit types), or at
most as long. Each is compiled for one v5e or for eight chips of v5e and v6e, one to ten seconds a function; what --out
holds is not done again. Floors are made by hand from shapes: FLOPs, bytes and granules of device memory, comparisons
on the vector units, bytes on the links.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import jax
from kinds import Case, functions
from physics import SAME, Break
from records import check_out
from run import read

from systolic.chips import slice
from systolic.core.errors import SystolicError
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.function import forecast_function
from systolic.sim.rates import rates_of

# Forecasts, and the rules that they keep


def forecast(case: Case) -> dict[str, Any]:
    """What the forecast says, as a record."""
    begin = time.perf_counter()
    record: dict[str, Any] = {
        "name": case.name,
        "key": case.key,
        "kind": case.kind,
        "member": case.member,
        "on": case.on,
        "x64": case.x64,
        "options": dict(case.options),
    }
    try:
        with jax.enable_x64(case.x64):
            made = forecast_function(case.function, *case.args, on=case.on, spread=case.spread)
    except SystolicError as error:
        return {**record, "problem": str(error)}
    return {**record, **seen(made), "seconds": round(time.perf_counter() - begin, 1)}


def seen(made: Forecast) -> dict[str, Any]:
    """What a record keeps of a forecast."""
    by: Counter[str] = Counter()
    for span, times in made.timeline.leaves() if made.timeline is not None else ():
        if span.lane == "core":
            by[span.price_source or "wait"] += span.seconds * times
    return {
        "fits": made.fits,
        "step_seconds": made.step_seconds,
        "low": made.low,
        "high": made.high,
        "lower_bound": made.is_lower_bound,
        "unpriced": sum(seconds for _, seconds in made.unpriced),
        "by": dict(by),
        "notes": [*made.warnings, *made.notes],
    }


RULES = {
    "answer": "every function has an answer that fits",
    "floor": "not below its FLOPs, bytes, granules, comparisons, addresses and links at documented rates",
    "grows": "twice of what must make it longer takes longer, a loop of twice the turns nearly twice",
    "most": "an approximate top-k is not above the exact one, half of an all-reduce not above it",
    "x64": "64-bit types are never cheaper",
    "range": "the range contains the value, its least is above zero, and only open parts leave it without an upper end",
    "bound": "a time that depends on data is a lower bound, others are not",
    "priced": "what no rule prices is under 1 % of the time, or the time is a lower bound",
}


def breaks(
    cases: Sequence[Case], records: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Break], Counter[str]]:
    """The rules that records break, and how often each was checked."""
    found: list[Break] = []
    checked: Counter[str] = Counter()

    def check(rule: str, case: Case, good: bool, said: str) -> None:
        checked[rule] += 1
        if not good:
            found.append(Break(rule=rule, name=case.name, said=said))

    bases = {
        case.name.rsplit("-", 1)[0]: records.get(case.key, {})
        for case in cases
        if case.member == "base"
    }
    for case in cases:
        record = records.get(case.key)
        if record is None:
            continue
        now = record.get("step_seconds")
        check("answer", case, bool(now), record.get("problem", "does not fit"))
        if not now:
            continue
        floors = case.work.seconds(rates_of(slice(case.on)))
        most = max(floors, key=lambda name: floors[name])
        text = f"{now * 1e6:.1f} us, {most} {floors[most] * 1e6:.1f} us"
        check("floor", case, now >= floors[most] * (1 - SAME), text)
        low, high = record["low"], record["high"]
        ends = bool(low) and low <= now and (record["lower_bound"] if high is None else now <= high)
        check("range", case, ends, f"{low} {now} {high}")
        check(
            "bound",
            case,
            record["lower_bound"] == case.bound,
            f"lower bound {record['lower_bound']}, should be {case.bound}",
        )
        good = record["unpriced"] <= 0.01 * now or record["lower_bound"]
        check("priced", case, good, f"{record['unpriced'] / now:.1%} unpriced")
        before = bases[case.name.rsplit("-", 1)[0]].get("step_seconds")
        if case.member == "base" or not before:
            continue
        text = f"{before * 1e6:.1f} to {now * 1e6:.1f} us"
        if case.least:
            check(
                "x64" if case.x64 else "grows",
                case,
                now >= case.least * before * (1 - SAME),
                f"{text}, at least {case.least} times",
            )
        if math.isfinite(case.most):
            check("most", case, now <= case.most * before, f"{text}, at most {case.most} times")
    return found, checked


def table(cases: Sequence[Case], records: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: the rules with their counts, then the breaks."""
    found, checked = breaks(cases, records)
    done = [case for case in cases if case.key in records]
    kinds = Counter(case.kind for case in done)
    broken = Counter(one.rule for one in found)
    of = {case.name: case for case in cases}
    lines = [
        f"{len(done)} functions ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}).",
        "",
        "| rule | checked | broken |",
        "|---|---|---|",
        *(f"| {text} | {checked[rule]} | {broken[rule]} |" for rule, text in RULES.items()),
        "",
        "| broken rule | function | what came out |",
        "|---|---|---|",
    ]
    for one in found:
        case = of[one.name]
        options = " ".join(f"{name} {value}" for name, value in case.options.items())
        lines.append(f"| {one.rule} | {one.name}: {case.on}, {options} | {one.said[:160]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds or names, with commas")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    check_out(asked.out)
    done = read(asked.out)
    cases = functions(asked.count, asked.seed)
    if asked.only:
        names = asked.only.split(",")
        cases = [case for case in cases if case.kind in names or case.name in names]
    if asked.table:
        print(table(cases, done))
        return
    with asked.out.open("a") as out:
        for at, case in enumerate(cases, 1):
            if case.key in done:
                continue
            made = forecast(case)
            out.write(json.dumps(made) + "\n")
            out.flush()
            done[case.key] = made
            seconds = made.get("step_seconds") or 0.0
            print(
                f"{at}/{len(cases)} {case.name} {case.on} {seconds * 1e6:.1f} us {made.get('problem', '')[:80]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
