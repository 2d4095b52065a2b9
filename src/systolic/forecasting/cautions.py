"""Notes on what makes a step's time one-sided or rests on the user: shown before all others."""

import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from systolic.sim.incomplete import GapKind, Incomplete
from systolic.sim.timeline import Timeline

SHOWN = 3
"""Parts that a note names."""
Range = tuple[float, float | None, str]
"""Low and high seconds, and what they rest on."""


def cautions_of(timeline: Timeline) -> list[str]:
    """A note for each kind of incomplete part with how to give what is missing, and one for what was given."""
    cautions = [_note(part, held) for part in GapKind if (held := _of(timeline, part))]
    if timeline.given:
        cautions.append(f"given by you: {'; '.join(timeline.given)}")
    return cautions


@cache
def errors() -> Mapping[str, Any]:
    """Errors of past forecasts by kind of program, mode and generation, as ``benchmarks/accuracy/intervals.py`` writes them."""
    return tomllib.loads((Path(__file__).parent / "errors.toml").read_text())


def ended(timeline: Timeline, range_of: Callable[[Timeline], tuple[float, float, str]]) -> Range:
    """Range of a step's time; where parts are priced incompletely, from its least to its most.

    Args:
        timeline: Of the step.
        range_of: Range of a step that has no such parts.
    """
    low, high, text = range_of(timeline)
    if not timeline.incomplete or not timeline.seconds:
        return low, high, text
    if timeline.least is not None:
        low = min(low, range_of(timeline.least)[0])
        text += "; the lower end has the fewest trips of all loops and the shortest branches"
    if timeline.most is None:
        return low, None, f"{text}; no upper end: a part of the step has no bound"
    what = "most trips of all loops and the longest branches"
    return low, max(high, range_of(timeline.most)[1]), f"{text}; the upper end has the {what}"


def summary(parts: Sequence[Incomplete]) -> str:
    """``2 loops of unknown length, 1 callback``."""
    names = {
        GapKind.loop: "loop{} of unknown length",
        GapKind.branch: "branch{} on data",
        GapKind.kernel: "kernel{} of unknown work",
    }
    phrases = []
    for part in GapKind:
        if number := sum(gap.part is part for gap in parts):
            several = "es" if part is GapKind.branch else "s"
            noun = names.get(part, f"{part.value}{{}}").format("" if number == 1 else several)
            phrases.append(f"{number} {noun}")
    return ", ".join(phrases)


def _of(timeline: Timeline, part: GapKind) -> list[Incomplete]:
    return [gap for gap in timeline.incomplete if gap.part is part]


def _note(part: GapKind, held: Sequence[Incomplete]) -> str:
    if part is GapKind.loop:
        named = _listed([f"{gap.name}{_at(gap)} {gap.how}" for gap in held])
        first, most = held[0].name, held[0].trips.most
        number = 100 if most is None else min(most, 100)
        return f'trips that the program leaves open: {named}; give them with --trips {first}={number}, in Python trips={{"{first}": {number}}}'
    if part is GapKind.branch:
        named = _listed([f"{gap.name}{_at(gap)} {gap.how}" for gap in held])
        return f"branches that data decides: {named}; the time is with the longest, the range goes down to the shortest"
    labels: dict[str, list[Incomplete]] = {}
    for gap in held:
        labels.setdefault(gap.label or gap.name, []).append(gap)
    named = _listed(
        [
            f"{f'{len(gaps)} of ' if len(gaps) > 1 else ''}{label}{_at(gaps[0])}"
            for label, gaps in labels.items()
        ]
    )
    first = next(iter(labels))
    word = {GapKind.kernel: "kernels", GapKind.call: "custom calls", GapKind.callback: "callbacks"}[
        part
    ]
    how = " or ".join(sorted({gap.how for gap in held}))
    option = shlex.quote(f"{first}=1ms")
    return f'{word} of unknown time: {named}: {how}; give the time of a call with --cost {option}, in Python costs={{"{first}": 1e-3}}'


def _at(gap: Incomplete) -> str:
    """The line of source, without folders, else the end of the name in the model."""
    file, _, line = gap.source.rpartition("/")[2].rpartition(":")
    # A function of the main program comes without its file.
    place = f"line {line}" if file.startswith("<") else f"{file}:{line}"
    place = place if gap.source else "/".join(gap.op_name.split("/")[-3:])
    return f" ({place})" if place else ""


def _listed(texts: Sequence[str]) -> str:
    shown = "; ".join(texts[:SHOWN])
    return shown if len(texts) <= SHOWN else f"{shown}; and {len(texts) - SHOWN} more"
