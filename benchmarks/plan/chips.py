"""The plan against chips: of settings that others published of one model on one slice, does the forecast pick the fastest?

``python benchmarks/plan/chips.py --out rows.jsonl`` forecasts the settings of each series from their schedules and writes a
line for each. ``--again rows.jsonl --out priced.jsonl`` prices the same programs anew, in seconds; ``--table rows.jsonl`` prints the page.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "ablations"))
import ask
import pairs as ablations
import rows as published
from ask import forecast, tiled
from records import lines, newest, tabled

from systolic.compiling import Compiler
from systolic.core.files import cache_home
from systolic.job import Axis, Remat
from systolic.planning.plan import PAIRED_ERROR

ROOT = Path(__file__).parent.parent
OWN = newest("reach")
"""Forecasts of trainers' own programs."""
LOOKED_INTO = ("v5p maxtext llama3-8b",)
"""Families of the judge half that were looked into, as in ``benchmarks/reach``: they count as ``fit``."""
FEWEST = 3
"""Settings that make a family."""
CLOSE = 0.03
"""Regret up to which a pick is as good as the best."""
NEAR = 0.03
"""Difference of two forecasts up to which their paired error counts: layouts that tie are near each other."""
APART = 0.015
"""Measured difference from which two settings are told apart: the same binary differs by 0.7 to 1.2 % from node to node."""
UNSCANNED = "qwen3-cx"
"""Beginning of the names of runs without a scan over layers, which is no option here."""
SQUARE = "the kernel's blocks are square here"
"""Departure of settings that are left out: theirs has blocks of 2,048 queries by 512 keys, which no option says."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A published setting with its step time."""

    id: str
    family: str
    """Chip, trainer and model: what lies in one half."""
    series: str
    """The family, its slice and the length of its rows, and where the settings are from: what is ranked."""
    slice: str
    measured_seconds: float
    options: Mapping[str, Any]
    flags: Sequence[str]

    @property
    def job(self) -> str:
        """What is compiled, as text: settings that no option tells apart are one."""
        return json.dumps([self.slice, self.options, sorted(self.flags)], sort_keys=True)


def half(family: str) -> str:
    """``fit`` or ``judge`` of a family."""
    return "fit" if family in LOOKED_INTO else published.half(family)


def of_ablations(path: Path) -> list[Setting]:
    """Both sides of each pair with a step time."""
    settings = []
    for record in json.loads(path.read_text()):
        pair = ablations.pair_of(record)
        if isinstance(pair, ablations.Skipped) or record.get("step_before_s") == 1.0:
            continue  # 1 stands for a time that was not printed
        base = record["base"]
        trainer = (
            "maxtext" if base.startswith("MaxText") else "torchax" if "torchax" in base else "jax"
        )
        model = pair.family.split()[0]
        family = published.family(f"wiki-{trainer}", pair.before.slice.split(":")[0], model)
        program = "ablations"
        if "no-scan" in base or record["id"].startswith(UNSCANNED):
            program = "layers not scanned, ablations"
        for side in ("before", "after"):
            setting = getattr(pair, side)
            if SQUARE in setting.departures:
                continue
            settings.append(
                Setting(
                    id=f"{pair.id} {side}",
                    family=family,
                    series=f"{family}, {pair.before.slice}, {setting.sequence} tokens, {program}",
                    slice=setting.slice,
                    measured_seconds=record[f"step_{side}_s"],
                    options=setting.options(),
                    flags=setting.flags,
                )
            )
    return settings


def of_steps(path: Path) -> list[Setting]:
    """Whole steps that a recipe expresses."""
    return [
        Setting(
            id=row.id,
            family=row.family,
            series=f"{row.family}, {row.slice}, {row.options.get('sequence')} tokens, steps",
            slice=row.slice,
            measured_seconds=row.published_seconds,
            options=row.options,
            flags=row.flags,
        )
        for row in published.rows(path)
        if row.recipe == "lm"
    ]


def series(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Settings by series, each job once with the median of its times, where there are enough of them.

    A job whose times differ by more than :data:`CLOSE` is left out: something that no option says differs too.
    """
    jobs: dict[str, dict[str, list[Setting]]] = {}
    for setting in settings:
        jobs.setdefault(setting.series, {}).setdefault(setting.job, []).append(setting)
    merged: dict[str, list[Setting]] = {}
    for name, by_job in jobs.items():
        for same in by_job.values():
            times = {setting.measured_seconds for setting in same}
            if max(times) <= (1 + CLOSE) * min(times):
                middle = replace(same[0], measured_seconds=statistics.median(times))
                merged.setdefault(name, []).append(middle)
    return {name: group for name, group in merged.items() if len(group) >= FEWEST}


def answers(group: Sequence[Setting], compiler: Compiler) -> list[dict[str, Any]]:
    """Forecasts of a series: all with a loss in tiles where one does not fit without."""
    narrow, rows = False, list[dict[str, Any]]()
    while len(rows) < len(group):
        setting = group[len(rows)]
        options = tiled(setting.options) if narrow else dict(setting.options)
        answer = forecast(options, setting.flags, setting.slice, compiler)
        whole = not narrow and options["layout"].get("loss_chunks", 1) == 1
        if whole and "does not fit" in answer.get("problem", ""):
            narrow, rows = True, []
            continue
        rows.append(
            {
                "id": setting.id,
                "series": setting.series,
                "half": half(setting.family),
                "slice": setting.slice,
                "program": "rebuilt",
                "examples": setting.options["batch"],
                "measured_seconds": setting.measured_seconds,
                "forecast_seconds": answer.get("forecast_seconds"),
                "problem": answer.get("problem"),
                "digest": answer.get("program"),
                "layout": options["layout"],
                "flags": list(setting.flags),
            }
        )
        print(
            f"{setting.id}: {answer.get('problem') or answer['forecast_seconds']}", file=sys.stderr
        )
    return rows


def priced_again(row: Row) -> Row:
    """A row at today's prices, of the program that the cache has; itself where that has none."""
    made = ask.priced_again(row.get("digest"), row["slice"], cache_home()) or {}
    return {**row, **{name: made[name] for name in ("forecast_seconds",) if name in made}}


def own_programs(path: Path, records: Path) -> list[dict[str, Any]]:
    """Stored forecasts of trainers' own programs, of families with enough settings."""
    told = {record["id"]: record for record in json.loads(records.read_text())}
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines(path, "id", "on"):
        record = told[line["id"]]
        if not line.get("forecast_seconds") or line["trainer"] != "maxtext":
            continue
        family = published.row_of(record).family
        name = f"{family}, {line['on']}, {record['seq_len']} tokens, own programs"
        groups.setdefault(name, []).append(
            {
                "id": line["id"],
                "series": name,
                "half": half(family),
                "program": "own",
                "examples": record["global_batch"],
                "measured_seconds": record["step_time_best_s"],
                "forecast_seconds": line["forecast_seconds"],
            }
        )
    return [row for group in groups.values() if len(group) >= FEWEST for row in group]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the forecasts of a series are worth."""

    series: str
    half: str
    settings: int
    pick: str
    """The best by forecast; of several that tie, the slowest on the chip."""
    regret: float
    """Its measured time over the best measured, less one."""
    simplest: float
    """The same of the simplest setting that a plan can't tell from the best: what a plan names first."""
    spearman: float
    apart: int
    """Pairs of settings that chips tell apart."""
    right: int
    """Those of them that the forecast puts in the measured order."""


def per_example(group: Sequence[Row], kind: str) -> list[float]:
    """Seconds an example, ``measured`` or ``forecast``."""
    return [row[f"{kind}_seconds"] / row["examples"] for row in group]


def complexity(row: Row) -> tuple[int, ...]:
    """The order of a plan's ties: axes in use, offload, how much is recomputed, flags."""
    layout = row.get("layout") or {}
    axes = sum(int(layout.get(axis.value, 1)) > 1 for axis in Axis)
    remat = Remat(layout.get("remat", "none"))
    return axes, remat is Remat.offload, list(Remat).index(remat), len(row.get("flags", ()))


def verdict(group: Sequence[Row]) -> Verdict:
    """The verdict on a series, by seconds an example."""
    measured, forecast_times = per_example(group, "measured"), per_example(group, "forecast")
    first, best = min(forecast_times), min(measured)

    def within(share: float) -> list[int]:
        return [at for at, seconds in enumerate(forecast_times) if seconds <= first * (1 + share)]

    pick = max(within(1e-6), key=lambda at: measured[at])
    batch = group[pick]["examples"]
    tied = [at for at in within(PAIRED_ERROR) if group[at]["examples"] == batch]
    simplest = min(tied, key=lambda at: (complexity(group[at]), forecast_times[at]))
    pairs = [
        (math.log(measured[a] / measured[b]), math.log(forecast_times[a] / forecast_times[b]))
        for a in range(len(group))
        for b in range(a)
    ]
    apart = [pair for pair in pairs if abs(pair[0]) > APART]
    several = len(set(forecast_times)) > 1
    return Verdict(
        series=group[0]["series"],
        half=group[0]["half"],
        settings=len(group),
        pick=group[pick]["id"],
        regret=measured[pick] / best - 1,
        simplest=measured[simplest] / best - 1,
        spearman=ablations.spearman(measured, forecast_times) if several else 0.0,
        apart=len(apart),
        right=sum(chip * by_forecast > 0 for chip, by_forecast in apart),
    )


def paired_errors(group: Sequence[Row], near: float = NEAR) -> list[float]:
    """Logarithms of the forecast over the measured ratio of each two settings whose forecasts lie within ``near``."""
    measured, forecast_times = per_example(group, "measured"), per_example(group, "forecast")
    ratios = [
        (math.log(forecast_times[a] / forecast_times[b]), math.log(measured[a] / measured[b]))
        for a in range(len(group))
        for b in range(a)
    ]
    return [by_forecast - chip for by_forecast, chip in ratios if abs(by_forecast) <= near]


def spread(groups: Iterable[Sequence[Row]], near: float = NEAR) -> float:
    """Standard deviation of the paired errors, each series counting once; 0 without any."""
    errors = [paired_errors(group, near) for group in groups]
    squares = [statistics.mean(error * error for error in some) for some in errors if some]
    return math.sqrt(statistics.mean(squares)) if squares else 0.0


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows with a forecast by series, the half that is judged last."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["forecast_seconds"]:
            groups.setdefault(row["series"], []).append(row)
    several = [group for group in groups.values() if len(group) >= FEWEST]
    return sorted(several, key=lambda group: group[0]["half"])


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each series, means by half, paired errors, and what has no forecast."""
    groups = grouped(rows)
    text = [
        "| series | half | settings | pick by forecast | regret | of the simplest in a tie | Spearman | order right where chips differ by 1.5 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in groups:
        of = verdict(group)
        text.append(
            f"| {of.series} | {of.half} | {of.settings} | {of.pick} | {of.regret:.1%} | {of.simplest:.1%} | {of.spearman:.2f} | {of.right} of {of.apart} |"
        )
    text.append("")
    for name in ("fit", "judge"):
        mine = [group for group in groups if group[0]["half"] == name]
        of = [verdict(group) for group in mine]
        if of:
            text.append(
                f"- {name}: {sum(v.regret <= CLOSE for v in of)} of {len(of)} picks within {CLOSE:.0%}, mean regret {statistics.mean(v.regret for v in of):.1%}, mean Spearman {statistics.mean(v.spearman for v in of):.2f}; paired error {spread(mine):.1%} of settings within {NEAR:.0%} by forecast, {spread(mine, math.inf):.1%} of all"
            )
    text += [f"- no forecast: {row['id']}: {row['problem']}" for row in rows if row.get("problem")]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=Path, default=ROOT / "ablations" / "published.json")
    parser.add_argument("--steps", type=Path, default=published.PUBLISHED)
    parser.add_argument("--own", type=Path, default=OWN, help="lines of benchmarks/reach/run.py")
    parser.add_argument("--out", type=Path, help="JSON lines, written anew")
    parser.add_argument("--only", default="", help="a part of the names of series")
    parser.add_argument("--list", action="store_true", help="the settings, no compile")
    parser.add_argument("--again", type=Path, help="lines of an earlier run to price anew")
    parser.add_argument("--table", type=Path, help="print the page of an earlier run's lines")
    args = parser.parse_args()
    if args.table:
        print(tabled(args.table, lines(args.table, "id", "series", "half"), table))
        return
    if args.again:
        kept = lines(args.again, "id", "series", "half")
        rows = [priced_again(row) for row in kept if args.only in row["series"]]
    else:
        groups = series([*of_ablations(args.pairs), *of_steps(args.steps)])
        groups = {name: group for name, group in groups.items() if args.only in name}
        if args.list:
            print(json.dumps({name: [s.id for s in group] for name, group in groups.items()}))
            return
        compiler = Compiler().quick()
        rows = [row for group in groups.values() for row in answers(group, compiler)]
        rows += [row for row in own_programs(args.own, args.steps) if args.only in row["series"]]
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    main()
