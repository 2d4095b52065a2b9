"""Makes ``forecasting/errors.toml``, the ranges of forecasts, from the newest stored results, and judges each family of rows by the others.

``python benchmarks/accuracy/intervals.py`` prints how many rows lie in a range that was made without their family;
``--write`` writes the table and the dated page of these counts. Rows are of four kinds of program: ``own``, a trainer's, captured
(``benchmarks/reach``); ``rebuilt``, the published settings as a recipe (``run.py``); ``function``, operations and small
programs (``benchmarks/operations``); ``decode``, a token of a static batch (``benchmarks/serve``); ``gpu``, training steps on GPUs by
XLA's GPU compiler or by a roofline (``benchmarks/gpu``).
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import rows as published
from ask import lines

sys.path.insert(0, str(Path(__file__).parent.parent / "reach"))
import report
from records import RESULTS, newest

from systolic.chips import slice

HERE = Path(__file__).parent
GPU_STEPS = HERE.parent / "gpu" / "steps.json"
PUBLISHED = HERE / "published.json"
TABLE = HERE.parents[1] / "src" / "systolic" / "forecasting" / "errors.toml"
PAGE = RESULTS / "2026-11-28-intervals.md"
SHARE = {"own": 0.8, "rebuilt": 0.8, "function": 0.84, "decode": 0.8, "gpu": 0.8}
"""Of results that a range is made to hold, by kind: the least from 80 % up at which it holds 80 % of the rows of each
generation that it was made without, where there are ten or more that nothing was fitted to."""
FEW = 9
"""Families from which on both ends of a range of 80 % are results: one of ten lies beyond each. A generation with
fewer takes the range of all, and its own results widen that."""
LEAST = 0.03
"""Of a range, each way: results on one side of the truth do not promise the next one there."""
OTHER = ("grouped_matmul", "traced ")
"""Beginnings of kinds of operations that are left out: the programs that were measured are not those of today's compiler,
or one line of a program."""
KEPT_IN = ("grouped_matmul kernel",)
"""Kinds that begin so and are kept."""
UNJUDGED = ("v5e",)
"""Generations whose few operations were timed by the host's clock."""
KINDS = ("own", "rebuilt", "function", "decode", "gpu")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Errors (forecast - measured) / measured between which a share of results lies."""

    low: float
    high: float
    rows: int
    families: int

    def holds(self, row: Row) -> bool:
        return self.low - 1e-9 <= row["error"] <= self.high + 1e-9

    def widened(self, other: "Interval") -> "Interval":
        """The same results, with ends that are no narrower than another's."""
        return replace(self, low=min(self.low, other.low), high=max(self.high, other.high))


Ranges = Mapping[str, Interval]
"""By generation, and of ``all``."""


@cache
def _models() -> dict[str, str]:
    return {record["id"]: record["model"] for record in json.loads(PUBLISHED.read_text())}


def family(row: Row) -> str:
    """What shares its error: one trainer's runs of one model on one generation; a kind of operation; an engine's batch."""
    match row["group"]:
        case "function":
            return f"{row['generation']} {row['kind']}"
        case "decode":
            return f"{row['name']} {row['case'].partition(',')[0]}"
        case "gpu":
            return re.sub(r"-\d+$", "", row["id"])  # of one model on more and more GPUs
        case _:
            model = _models().get(row["id"], row["id"])
            return published.family(row["id"], row["generation"], model)


def own_rows() -> list[Row]:
    """Trainers' own programs; of a row with two versions of its trainer, that of the row's day."""
    rows = report.joined(lines(newest("reach")), ())
    older = {row["id"] for row in rows if row["trainer"] != "maxtext" and row["error"] is not None}
    return [row for row in rows if row["trainer"] != "maxtext" or row["id"] not in older]


def rebuilt_rows() -> list[Row]:
    """Published settings as recipes; those that constants rest on count as ``fit``."""
    rows = lines(newest("accuracy-quick"))
    return [row | {"half": report.half(row["id"], row["half"])} for row in rows]


def function_rows(*halves: str) -> list[Row]:
    """Operations that count, each by its latest result; by default those that prices were not fitted to."""
    return [row for row in operations() if row["half"] in (halves or ("judge",)) and counts(row)]


def operations() -> list[Row]:
    """Operations, each by its latest result; ``priced`` is the date of that."""
    files = sorted(
        path for path in RESULTS.glob("*.jsonl") if path.stem[11:].startswith("operations")
    )
    latest = {
        (row["id"], row["mode"]): {**row, "priced": path.stem[:10]}
        for path in files
        for row in lines(path)
    }
    return list(latest.values())


def counts(row: Row) -> bool:
    """Whether an operation is in the table and in the ranges."""
    kept = row["kind"] in KEPT_IN or not row["kind"].startswith(OTHER)
    return kept and row["generation"] not in UNJUDGED


def decode_rows() -> list[Row]:
    """Tokens of static batches, rebuilt as ``--step decode`` forecasts them, not in the engine's own code; servers' rows hold their hosts' work, too."""
    rows = lines(newest("serve-published"))
    return [
        row
        | {"generation": row["name"].split()[-1].partition("-")[0].replace("v7x", "tpu7x")}
        | {"error": row["rebuilt_seconds"] / row["measured_seconds"] - 1}
        for row in rows
        if row["kind"] in ("measured_engine", "measured_readme")
    ]


def gpu_rows() -> list[Row]:
    """Steps of GPUs that were read after all prices were set; ``mode`` is what forecast them."""
    places = {row["id"]: row["on"] for row in json.loads(GPU_STEPS.read_text())}
    return [
        row | {"mode": row["by"], "generation": slice(places[row["id"]]).chip.name}
        for row in lines(newest("gpu-steps"))
        if row["set"] == "later"
    ]


def read(**files: Sequence[Row]) -> list[Row]:
    """Rows with a forecast, by default the stored ones; ``group`` is their kind."""
    stored = {
        "own": own_rows,
        "rebuilt": rebuilt_rows,
        "function": function_rows,
        "decode": decode_rows,
        "gpu": gpu_rows,
    }
    found = [
        {"mode": "quick", **row, "group": kind}
        for kind in KINDS
        for row in (files[kind] if kind in files else stored[kind]())
        if row.get("error") is not None
    ]
    for row in found:
        if not row["error"] > -1 or row["error"] == math.inf:
            raise SystemExit(
                f"{row['id']} has an error of {row['error']}; it is finite and above -1"
            )
    return found


def interval(rows: Sequence[Row]) -> Interval:
    """The range of its kind's share by rank of the errors: the wider of each family counting once and each row.

    Of n results that are exchangeable with a new one, the new one lies beyond the k-th from an end with probability
    k / (n + 1) (conformal prediction; Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005). With fewer
    than nine, ranges reach from end to end.
    """
    sizes = Counter(family(row) for row in rows)
    by_family = sorted((math.log1p(row["error"]), 1 / sizes[family(row)]) for row in rows)
    by_row = [(error, 1.0) for error, _ in by_family]
    share = SHARE[rows[0]["group"]]
    ends = [_ends(by_family, len(sizes), share), _ends(by_row, len(rows), share)]
    return Interval(
        low=min(*(low for low, _ in ends), -LEAST),
        high=max(*(high for _, high in ends), LEAST),
        rows=len(rows),
        families=len(sizes),
    )


def _ends(weighed: Sequence[tuple[float, float]], number: int, share: float) -> tuple[float, float]:
    """Errors of the ``number`` results that the ranks of both ends fall on."""
    beyond = max(math.floor((1 - share) / 2 * (number + 1) + 1e-9), 1)

    def end(ordered: Iterable[tuple[float, float]]) -> float:
        total = 0.0
        for error, weight in ordered:
            total += weight
            if total >= beyond - 1e-9:
                return math.expm1(error)
        raise AssertionError("ranks end within the results")

    return end(weighed), end(reversed(weighed))


def intervals(rows: Sequence[Row]) -> dict[str, Interval]:
    """By generation, with ``all`` of them together; a generation with few families has none but where it widens that."""
    whole = interval(rows)
    found = {"all": whole}
    for name in dict.fromkeys(row["generation"] for row in rows):
        mine = interval([row for row in rows if row["generation"] == name])
        if mine.families >= FEW:
            found[name] = mine
        elif (wide := mine.widened(whole)) != replace(mine, low=whole.low, high=whole.high):
            found[name] = wide
    return found


def ranges(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Interval]]:
    """By kind of program and mode; a rebuilt program's are at least as wide as an own program's on the chip."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["group"], row["mode"]), []).append(row)
    made = {key: intervals(mine) for key, mine in groups.items()}
    own = made.get(("own", "quick"), {})
    for (kind, _), found in made.items():
        if kind == "rebuilt":
            for name in {**found, **own}:
                here = found.get(name) or _of(groups["rebuilt", "quick"], name, found["all"])
                found[name] = here.widened(own.get(name, own.get("all", here)))
    return made


def _of(rows: Sequence[Row], generation: str, whole: Interval) -> Interval:
    """The range of all generations, of the rows of one."""
    mine = [row for row in rows if row["generation"] == generation]
    return replace(whole, rows=len(mine), families=len({family(row) for row in mine}))


Share = tuple[int, int]
"""Rows that lie in a range, and rows."""


def checks(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, tuple[Share, Share]]]:
    """By kind and mode, then generation: of rows that nothing was fitted to and of all, how many lie in the ranges of all other families."""
    found: dict[tuple[str, str], dict[str, tuple[Share, Share]]] = {}
    names = [family(row) for row in rows]
    for left_out in dict.fromkeys(names):
        others = [row for row, name in zip(rows, names, strict=True) if name != left_out]
        made = ranges(others)
        for row in (row for row, name in zip(rows, names, strict=True) if name == left_out):
            by_generation = made[row["group"], row["mode"]]
            inside = by_generation.get(row["generation"], by_generation["all"]).holds(row)
            counts = found.setdefault((row["group"], row["mode"]), {})
            for name in (row["generation"], "all"):
                judged, every = counts.get(name, ((0, 0), (0, 0)))
                if row["half"] == "judge":
                    judged = judged[0] + inside, judged[1] + 1
                counts[name] = judged, (every[0] + inside, every[1] + 1)
    return found


def table(rows: Sequence[Row]) -> str:
    """The text of ``errors.toml``."""
    text = [
        "# Errors (forecast - measured) / measured between which 80 % of results lie, by kind of program, mode and",
        "# generation. Written by benchmarks/accuracy/intervals.py --write; what they hold of families that they were",
        f"# made without is in benchmarks/results/{PAGE.name}.",
        "",
    ]
    for (group, mode), made in ranges(rows).items():
        mine = [row for row in rows if (row["group"], row["mode"]) == (group, mode)]
        for name, of in made.items():
            here = [row for row in mine if name in ("all", row["generation"])]
            text += [f"[{group}.{mode}.{name}]", f"rows = {len(here)}"]
            text += [f"held = {sum(of.holds(row) for row in here)}", f"families = {of.families}"]
            text += [f"low = {of.low:.3f}", f"high = {of.high:.3f}", ""]
    return "\n".join(text).rstrip() + "\n"


def coverage(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown of :func:`checks`."""
    yield "| kind | mode | generation | rows that nothing was fitted to: held | share | all rows: held | share |"
    yield "|---|---|---|---|---|---|---|"
    for (group, mode), found in checks(rows).items():
        for name, shares in sorted(found.items()):
            cells = (
                f"{within} of {total} | {within / total:.0%}" if total else "- | -"
                for within, total in shares
            )
            yield f"| {group} | {mode} | {name} | {' | '.join(cells)} |"


INTRODUCTION = """# Ranges of forecasts, 2026-11-28

`python benchmarks/accuracy/intervals.py --write` makes `src/systolic/forecasting/errors.toml` and this page from the newest results: trainers' own programs
(`own`), published settings as recipes (`rebuilt`), operations that no price was fitted to (`function`), tokens of static batches (`decode`), training
steps on GPUs by their compiler or by a roofline (`gpu`). Claimed: 80 %.

- Ends are by rank of the errors (conformal), each family counting once: one trainer's runs of one model on one generation, a kind of operation, an engine's
  batch. A generation with fewer than nine families takes the range of all, and its own results widen it.
- Each row is judged by ranges that were made without its family, of any kind. A few constants rest on steps (docs/accuracy.md); their rows, and those that were looked
  into, are in `all rows` alone.
- A rebuilt program's range is no narrower than an own program's: a recipe is not the trainer's program.
- There are only schedules of steps; full compiles take the same ranges, since they agree within 3 % (`2026-11-22-operations.md`).
- GPUs: the 21 steps that were read after the last constant was set (`later` in `2026-11-28-gpu-steps.md`), of which causes were looked for in the fit half; one
  rule, of the steps of an all-reduce over hosts, was mended by it. The roofline's fp8, which had been priced as bf16, was mended by no row.
- Decode has nine families, all on v5e: from end to end they promise 8 of 10.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="writes errors.toml and the page")
    asked = parser.parse_args()
    rows = read()
    text = "\n".join(coverage(rows))
    print(text)
    if asked.write:
        TABLE.write_text(table(rows))
        PAGE.write_text(f"{INTRODUCTION}{text}\n")


if __name__ == "__main__":
    main()
