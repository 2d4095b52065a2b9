"""Every figure about the accuracy of step times that README and the pages print, from the newest stored results.

``python benchmarks/accuracy/front.py`` prints README's table (rows that no constant rests on) and errors by kind of program, chip
and half. ``--write`` puts the figures into the pages, ``--check`` names those that differ. ``--again`` first prices what earlier
runs compiled at today's prices, about three minutes: rebuilt rows from ``--store``, own programs from ``--kept``, the folder that
``benchmarks/reach/run.py --keep`` filled; rows without a program there keep theirs and are named. Then it makes the ranges
(``intervals.py --write``) and writes the pages.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import intervals
import slices

sys.path.insert(0, str(Path(__file__).parent.parent / "reach"))
import report
from records import lines, newest, refuse

from systolic.core.files import cache_home, write_atomically

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OWN = newest("reach")
REBUILT = newest("accuracy-quick")
BLIND = HERE / "blind.json"
"""Errors of the rows whose errors were computed only after their forecasts."""
GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
EVERY = ("v2", *GENERATIONS)
NAMES = {
    "own": "own program",
    "rebuilt": "rebuilt",
    "function": "operation",
    "decode": "rebuilt decode step",
}
EXAMPLE = "maxtext-docs-v5p-8-deepseek2-16b"
"""The row that docs/your-own-program.md shows."""

Row = Mapping[str, Any]
Errors = Mapping[str, Sequence[float]]
"""Sizes of relative errors, by generation."""


@cache
def rows_of(kind: str) -> Sequence[Row]:
    """Rows of a kind of program that have an error."""
    rows = {
        "own": intervals.own_rows,
        "rebuilt": intervals.rebuilt_rows,
        "function": lambda: [
            row for row in intervals.function_rows("fit", "judge") if row["mode"] == "quick"
        ],
        "decode": intervals.decode_rows,
    }[kind]()
    return [row for row in rows if row.get("error") is not None]


def errors(kind: str, half: str) -> Errors:
    """Errors of a kind of program in one half."""
    sizes: dict[str, list[float]] = {}
    for row in rows_of(kind):
        if row["half"] == half:
            sizes.setdefault(row["generation"], []).append(abs(row["error"]))
    return sizes


def own_programs() -> Errors:
    """Errors of trainers' own programs in the judge half."""
    return errors("own", "judge")


def rebuilt() -> Errors:
    """Errors of our recipes with the same published settings, in the judge half."""
    return errors("rebuilt", "judge")


def _whole(sizes: Errors) -> list[float]:
    return list(itertools.chain(*sizes.values()))


def table() -> str:
    """README's: a line for each generation, then one for all."""
    own, ours = own_programs(), rebuilt()
    head = "| chip | own program: rows | mean | median | worst | rebuilt: rows | mean | median | worst |"
    text = [head, "|---" * 9 + "|"]
    for name in GENERATIONS:
        if name in own or name in ours:
            text.append(_line([name], own.get(name, ()), ours.get(name, ())))
    text.append(_line(["all"], _whole(own), _whole(ours)))
    return "\n".join(text)


def kinds() -> str:
    """Markdown: errors by kind of program and chip, judge and fit apart."""
    text = [
        "| program | chip | judge: rows | mean | median | worst | fit: rows | mean | median | worst |",
        "|---" * 10 + "|",
    ]
    for kind, name in NAMES.items():
        judged, fitted = errors(kind, "judge"), errors(kind, "fit")
        for chip in EVERY:
            if chip in judged or chip in fitted:
                text.append(_line([name, chip], judged.get(chip, ()), fitted.get(chip, ())))
        text.append(_line([name, "all"], _whole(judged), _whole(fitted)))
    return "\n".join(text)


def _line(cells: Sequence[str], *columns: Sequence[float]) -> str:
    cells = list(cells)
    for sizes in columns:
        if sizes:
            values = (statistics.mean(sizes), statistics.median(sizes), max(sizes))
            cells += [str(len(sizes)), *(f"{value:.1%}" for value in values)]
        else:
            cells += ["-"] * 4
    return "| " + " | ".join(cells) + " |"


def unfit(kind: str) -> list[str]:
    """Names of programs that ran on chips and are forecast not to fit."""
    rows = lines(OWN) if kind == "own" else lines(REBUILT)
    return [
        row["id"]
        for row in rows
        if row.get("fits") is False or "does not fit" in (row.get("problem") or "")
    ]


def memory() -> str:
    """Of programs that ran, how many are forecast to fit."""
    parts = []
    for kind, name in (("own", "own programs"), ("rebuilt", "rebuilt ones")):
        names = unfit(kind)
        number = len({row["id"] for row in rows_of(kind)} | set(names))
        but = f" (not {', '.join(names)})" if names else ""
        parts.append(f"{number - len(names)} of {number} {name}{but}")
    return f"Of programs that ran, {' and '.join(parts)} are forecast to fit."


def stale() -> str:
    """Rows whose forecasts have earlier prices, since their programs weren't kept; empty without any."""
    parts = [
        f"{len(names)} of {len(rows_of(kind))} {name} ({', '.join(names)})"
        for kind, name in (("own", "own programs"), ("rebuilt", "rebuilt ones"))
        if (names := [row["id"] for row in rows_of(kind) if row.get("stale")])
    ]
    earlier = f"At prices before 28 November: {' and '.join(parts)}. " if parts else ""
    dates = Counter(row["priced"] for row in rows_of("function"))
    listed = ", ".join(f"{number} at prices of {date}" for date, number in sorted(dates.items()))
    return (
        f"{earlier}Forecasts of operations, by schedule (`--quick`), are not made anew with those of steps: {listed}."
        if dates
        else earlier
    )


def left_out() -> str:
    """Operations that are in no table and no range, the reasons, and by how much the traced ones miss."""
    rows = [row for row in intervals.operations() if row["mode"] == "quick"]
    rows = [row for row in rows if not intervals.counts(row) and row.get("error") is not None]
    clock = [row for row in rows if row["generation"] in intervals.UNJUDGED]
    traced = [row for row in rows if row["kind"].startswith("traced ")]
    older = len(rows) - len(clock) - len(traced)
    sizes = sorted(abs(row["error"]) for row in traced if row["half"] == "judge")
    tenth = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
    return (
        f"Left out: {len(clock)} operations on v5e, timed by the host's clock; {older} grouped matmuls outside a kernel, whose measured "
        f"programs are not those of today's compiler; and {len(traced)} single ops out of profiles of TPU7x, one line of a program each. The "
        f"{len(sizes)} of these in the judge half are off by {statistics.mean(sizes):.1%} in the mean, {statistics.median(sizes):.1%} in the "
        f"median and {tenth:.0%} at the 90th percentile: a range of whole functions does not hold for one small op."
    )


@cache
def blind() -> Mapping[str, Any]:
    """Date, number and errors of the blind rows, by generation and of all."""
    return json.loads(BLIND.read_text())


def figures() -> dict[str, str]:
    """The figures of :data:`SENTENCES`, by name."""
    own_every, rebuilt_every = intervals.own_rows(), lines(REBUILT)
    own, ours = rows_of("own"), rows_of("rebuilt")
    judged, judged_rebuilt = _whole(own_programs()), _whole(rebuilt())
    large = [sum(abs(row["error"]) > report.LARGE for row in rows) for rows in (own, ours)]
    example = next(row for row in own if row["id"] == EXAMPLE)
    held = intervals.checks(intervals.read())
    shares = {
        f"{kind}_{name}": held[kind, "quick"].get(name, ((0, 0), (0, 0)))[1]
        for kind in ("own", "rebuilt", "function", "decode")
        for name in ("all", "tpu7x")
    }
    steps = [sum(shares[f"{kind}_all"][at] for kind in ("own", "rebuilt")) for at in (0, 1)]
    after, before = slices.judged(slices.PUBLISHED)
    return {
        "published": str(len(rebuilt_every)),
        "own_forecast": str(len(own)),
        "own_tried": str(len(own_every)),
        "own_others": str(len(own_every) - 1),
        "own_every_mean": _percent(statistics.mean(abs(row["error"]) for row in own)),
        "rebuilt_tried": str(len(ours) + len(unfit("rebuilt"))),
        "rebuilt_every_mean": _percent(statistics.mean(abs(row["error"]) for row in ours)),
        "rebuilt_every_median": _percent(statistics.median(abs(row["error"]) for row in ours)),
        "own_judged": str(len(judged)),
        "own_mean": _percent(statistics.mean(judged)),
        "own_worst": _percent(max(judged)),
        "rebuilt_forecast": str(len(ours)),
        "rebuilt_judged": str(len(judged_rebuilt)),
        "not_expressed": str(len(rebuilt_every) - len(ours) - len(unfit("rebuilt"))),
        "unfit": str(len(unfit("rebuilt"))),
        "rested": str(sum(row["id"].startswith(report.RESTED_ON) for row in rebuilt_every)),
        "large": str(sum(large)),
        "large_own": str(large[0]),
        "large_rebuilt": str(large[1]),
        "blind_rows": str(blind()["rows"]),
        "blind_mean": _percent(blind()["mean"]),
        "blind_median": _percent(blind()["median"]),
        "example_seconds": f"{example['forecast_seconds']:.3f}",
        "example_error": _percent(abs(example["error"])),
        "held_steps": f"{steps[0] / steps[1]:.0%}"[:-1],
        "held_own": str(shares["own_all"][0]),
        "held_rebuilt": str(shares["rebuilt_all"][0]),
        "held_function": "{:.0%}".format(shares["function_all"][0] / shares["function_all"][1])[
            :-1
        ],
        "held_decode": str(shares["decode_all"][0]),
        "decode_rows": str(shares["decode_all"][1]),
        "held_tpu7x": str(shares["own_tpu7x"][0] + shares["rebuilt_tpu7x"][0]),
        "tpu7x_rows": str(shares["own_tpu7x"][1] + shares["rebuilt_tpu7x"][1]),
        "growth": _percent(slices.SHARE_PER_DOUBLING),
        "growth_after": _percent(after),
        "growth_before": _percent(before),
    }


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


HELD = "lie {held_steps} % of the published steps, {held_tpu7x} of {tpu7x_rows} on TPU7x"
SENTENCES: Mapping[str, Sequence[str]] = {
    "README.md": (
        "On {blind_rows} further rows, evaluated only afterwards, rebuilt recipes have a mean error of {blind_mean} % and a median of {blind_median} %.",
    ),
    "docs/index.md": (
        "Step times of {own_judged} trainers' own programs that no constant rests on were off by {own_mean} % in the mean and {own_worst} % at worst;",
        "{blind_rows} published rows that were collected afterwards, rebuilt as recipes, by {blind_mean} % in the mean.",
    ),
    "docs/accuracy.md": (
        "holds {published} published results",
        "compiled to the schedule and simulated | {own_forecast} of {own_tried} tried |",
        "with `--quick` | {rebuilt_forecast} of {published}; {not_expressed} cannot be expressed as a recipe, {unfit} is forecast not to fit |",
        "Their {rested} rows count as `fit`",
        "without the {rested} rows above:",
        "{blind_rows} further published rows were collected",
        "Rebuilt recipes were off by {blind_mean} % in the mean and {blind_median} % in the median:",
        "The repository has these figures but not the {blind_rows} rows.",
        "{large} forecasts are off by more than 15 %, {large_own} of own programs and {large_rebuilt} of rebuilt ones:",
        "{growth} % for each doubling of slices, on half of the published series. On the other half the growth then has a mean error of {growth_after} %, against {growth_before} % without it.",
        "In ranges that were made without their model or kind lie {held_own} of {own_forecast} steps of own programs, {held_rebuilt} of {rebuilt_forecast} of rebuilt ones, {held_function} % of the operations and {held_decode} of {decode_rows} steps of decode:",
    ),
    "benchmarks/accuracy/README.md": (
        "All rows by schedule: [results](../results/2026-11-28-accuracy-quick.md), {rebuilt_forecast} of {rebuilt_tried} forecast, mean |error| {rebuilt_every_mean} %, median {rebuilt_every_median} %, {large_rebuilt} above 15 %.",
    ),
    "docs/limits.md": (f"In ranges that were made without their model {HELD};",),
    "docs/start/choose-hardware.md": (f"In such ranges, made without their model, {HELD}.",),
    "docs/your-own-program.md": (
        "forecast | {example_seconds} s; MaxText's guide prints 5.667 s, so it is {example_error} % too",
        "with {own_others} other published configurations",
        "own train entry, {own_tried} published configurations",
        "{own_forecast} answered, mean error {own_every_mean} %:",
    ),
}
"""Sentences of the pages, whose figures :func:`figures` has."""
_FIGURE = re.compile(r"\{(\w+)\}")
_TABLE = re.compile(r"^\| chip \| own program: rows .*\n(?:\|.*\n)+", re.MULTILINE)
_LAST = re.compile(r"(?<=^…\n)\| all \|.*$", re.MULTILINE)


def filled(text: str, template: str, values: Mapping[str, str]) -> str:
    """A page with the figures of one of its sentences, however its lines are broken.

    Raises:
        ValueError: the page has the sentence not once.
    """
    names = _FIGURE.findall(template)
    words = re.escape(_FIGURE.sub("\0", template)).replace("\\ ", r"\s+")
    pattern = re.compile(words.replace("\0", r"(\d[\d.,]*)"))
    found = list(pattern.finditer(text))
    if len(found) != 1:
        raise ValueError(f"has {len(found)} times, not once: {template}")
    for at, name in reversed(list(enumerate(names, 1))):
        start, end = found[0].span(at)
        text = text[:start] + values[name] + text[end:]
    return text


def pages() -> Iterator[tuple[str, str, str]]:
    """Name of each page that prints figures, its text, and its text with today's."""
    values = figures()
    for name, sentences in SENTENCES.items():
        text = before = (ROOT / name).read_text()
        for template in sentences:
            try:
                text = filled(text, template, values)
            except ValueError as error:
                refuse(f"{name} {error}; correct it or SENTENCES in {Path(__file__).name}")
        if name == "README.md":
            text = _TABLE.sub(lambda _: table() + "\n", text)
        text = _LAST.sub(lambda _: table().splitlines()[-1], text)
        yield name, before, text


def price_again(store: Path, kept: Path) -> None:
    """Writes the newest rows at today's prices, their tables, and the ranges that they make."""
    reach = ROOT / "benchmarks" / "reach"
    _ran(HERE / "run.py", "--again", REBUILT, "--out", REBUILT, "--store", store)
    _ran(reach / "run.py", "--again", kept, "--before", OWN, "--out", OWN)
    retable(REBUILT.with_suffix(".md"), _ran(HERE / "run.py", "--table", REBUILT))
    retable(OWN.with_suffix(".md"), _ran(reach / "report.py", OWN))
    _ran(HERE / "intervals.py", "--write")


def _ran(*command: object) -> str:
    """What a script prints; ends the process where it fails."""
    began = time.monotonic()
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    print(f"{Path(words[1]).name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return done.stdout


def retable(page: Path, table: str) -> None:
    """Puts a table, and what follows it, in place of that of a dated page, whose introduction stays."""
    introduction = page.read_text().partition("\n| ")[0]
    write_atomically(page, f"{introduction}\n{table.rstrip()}\n")


def main() -> int:
    """Prints, writes or checks the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="prices anew, then writes")
    parser.add_argument("--store", type=Path, default=cache_home(), help="of compiled programs")
    parser.add_argument("--kept", type=Path, default=cache_home() / "reach", help="own programs")
    parser.add_argument("--write", action="store_true", help="writes the figures into the pages")
    parser.add_argument("--check", action="store_true", help="names the pages that differ")
    args = parser.parse_args()
    if args.again:
        price_again(args.store, args.kept)
    if not (args.again or args.write or args.check):
        print("\n\n".join(filter(None, (table(), kinds(), memory(), stale(), left_out()))))
        return 0
    differ = [(name, text) for name, before, text in pages() if text != before]
    for name, text in differ:
        print(name)
        if not args.check:
            write_atomically(ROOT / name, text)
    return int(args.check and bool(differ))


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # ``front.py | head``: nobody reads the rest, nor what the exit would flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    raise SystemExit(status)
