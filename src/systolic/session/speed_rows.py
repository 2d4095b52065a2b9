"""ModelSpeeds of models side by side, as rows of a table: a name and a cell for each model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from systolic.core.units import duration, si
from systolic.session.speeds import ModelSpeeds

NONE = "-"
Shown = Callable[[Any], str]


def _tokens(value: float) -> str:
    return f"{value:,.0f}"


SERVER: tuple[tuple[str, str, Shown], ...] = (
    ("first token", "time_to_first_token_seconds", duration),
    ("per token", "time_per_output_token_seconds", duration),
    ("new tokens/s", "output_tokens_per_second", _tokens),
)
"""Name of a row, entry of a server's point, and how it is shown."""


def speed_rows(sides: Sequence[ModelSpeeds]) -> list[Sequence[str]]:
    """Stages timed here, then each slice's forecasts."""
    stages = dict.fromkeys(stage for side in sides for stage in side.seconds)
    rows: list[Sequence[str]] = [
        (f"{stage} here", *(_cell(side.seconds, stage, duration) for side in sides))
        for stage in stages
    ]
    for name in dict.fromkeys(name for side in sides for name in side.forecasts):
        rows += _slice_rows(name, [side.forecasts.get(name, {}) for side in sides])
    return rows


def timed_lines(sides: Sequence[ModelSpeeds], timed: Mapping[str, int]) -> list[str]:
    """Where and what was timed, both programs where they differ, and notes about it."""
    ran = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in timed.items())
    programs = " and ".join(dict.fromkeys(side.program or "" for side in sides))
    device = next((side.device for side in sides if side.device), "")
    served = "the server's programs" if "prefill" in programs else "the program"
    return [
        f"here: {device}, {served} ({programs}), medians of calls in turn, {ran}",
        *(f"here: {note}" for side in sides for note in side.notes),
    ]


def _slice_rows(name: str, sides: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    def row(title: str, key: str, shown: Shown) -> Sequence[str]:
        return (f"{title} on {name}", *(_cell(side, key, shown) for side in sides))

    if not all("points" in side for side in sides):
        return [
            row("step", "step_seconds", duration),
            row("memory", "peak_bytes", lambda value: si(value, "B")),
        ]
    rows: list[Sequence[str]] = []
    for title, key, shown in SERVER:
        cells = [
            shown(side["points"][0][key]) if side["points"] else "does not fit" for side in sides
        ]
        rows.append((f"{title} on {name}", *cells))
    return [*rows, row("weights", "weights_bytes", lambda value: si(value, "B"))]


def _cell(values: Mapping[str, Any], key: str, shown: Shown) -> str:
    value = values.get(key)
    return NONE if value is None else shown(value)
