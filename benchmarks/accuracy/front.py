"""The README's table of accuracy: errors against published steps of rows that no constant rests on, by generation.

``python benchmarks/accuracy/front.py``. A row counts in the judge half alone (``rows.half``, and what
``benchmarks/reach/report.py`` counts as fit, looked into or rested on, is left out). ``own program`` is the trainer's own
(``benchmarks/reach``), ``rebuilt`` the same published settings as a recipe of ours (``benchmarks/accuracy``), both
compiled to the schedule (``--quick``).
"""

import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "reach"))
import report
from records import lines

RESULTS = Path(__file__).parent.parent / "results"
OWN = RESULTS / "2026-11-27-reach.jsonl"
REBUILT = RESULTS / "2026-11-22-accuracy-quick.jsonl"
GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e", "tpu7x")

Errors = Mapping[str, Sequence[float]]
"""Sizes of relative errors, by generation."""


def own_programs() -> Errors:
    """Errors of trainers' own programs; of a row with two versions of its trainer, those of the row's day."""
    rows = report.joined(lines(OWN, "id", "on", "seconds"), ())
    older = {row["id"] for row in rows if row["trainer"] != "maxtext" and row["error"] is not None}
    judged = (row for row in rows if row["half"] == "judge" and row["error"] is not None)
    return _by_generation(
        (row["generation"], row["error"])
        for row in judged
        if row["trainer"] != "maxtext" or row["id"] not in older
    )


def rebuilt() -> Errors:
    """Errors of our recipes with the same published settings."""
    rows = lines(REBUILT, "id")
    return _by_generation(
        (row["generation"], row["error"])
        for row in rows
        if report.half(row["id"], row["half"]) == "judge" and row.get("error") is not None
    )


def _by_generation(pairs: Iterator[tuple[str, float]]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {}
    for generation, error in pairs:
        errors.setdefault(generation, []).append(abs(error))
    return errors


def table() -> str:
    """Markdown: a line for each generation, then one for all."""
    own, ours = own_programs(), rebuilt()
    head = "| chip | own program: rows | mean | median | worst | rebuilt: rows | mean | median | worst |"
    text = [head, "|---" * 9 + "|"]
    for name in GENERATIONS:
        if name in own or name in ours:
            text.append(_line(name, own.get(name, ()), ours.get(name, ())))
    whole = (list(itertools.chain(*errors.values())) for errors in (own, ours))
    text.append(_line("all", *whole))
    return "\n".join(text)


def _line(name: str, *columns: Sequence[float]) -> str:
    cells = [name]
    for errors in columns:
        if errors:
            figures = (statistics.mean(errors), statistics.median(errors), max(errors))
            cells += [str(len(errors)), *(f"{value:.1%}" for value in figures)]
        else:
            cells += ["-"] * 4
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(table())
