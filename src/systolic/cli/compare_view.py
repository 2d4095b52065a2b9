"""Two models as a table of three columns."""

from collections.abc import Callable, Mapping
from typing import Any

from systolic.core.units import duration, si
from systolic.session.comparing import ComparedModel, Comparison

NONE = "-"
Cell = Callable[[ComparedModel], str]


def lines(made: Comparison) -> list[str]:
    """The table, then what both answered and what was run."""
    sides = (made.a, made.b)
    rows: list[tuple[str, str, str]] = [("", str(made.a.path), str(made.b.path))]

    def add(name: str, cell: Cell) -> None:
        rows.append((name, cell(made.a), cell(made.b)))

    add("model", lambda side: f"{side.kind}, {side.precision} here")
    add("parameters", lambda side: f"{side.parameters:,}")
    add("weights in memory", lambda side: si(side.bytes, "B"))
    for dtype in _names(side.bytes_by_dtype for side in sides):
        add(f"  {dtype}", lambda side, dtype=dtype: _bytes(side.bytes_by_dtype.get(dtype)))
    add("weights in files", lambda side: _bytes(side.file_bytes))
    _add_recorded(add, sides)
    for metric in _names(side.measured or {} for side in sides):
        add(f"{metric} measured", lambda side, m=metric: _number((side.measured or {}).get(m)))
    for stage in _names(side.seconds for side in sides):
        add(f"{stage} here", lambda side, s=stage: _seconds(side.seconds.get(s)))
    if made.on is not None:
        _add_forecast(add, made.on, sides)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*table, *_told(made)]


def _told(made: Comparison) -> list[str]:
    found = []
    if (one := made.agreement) is not None:
        found.append(
            f"outputs on {one.inputs}: same {one.best} at {one.same_best:.1%} of {one.positions}, largest error {one.max_abs:.2e} (relative {one.max_relative:.2e}), mean {one.mean_abs:.2e}"
        )
    else:
        found.append(f"outputs not compared: {made.disagreement}")
    if made.data is not None:
        found.append(f"measured on {made.data}")
    if made.timed:
        ran = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in made.timed.items())
        found.append(f"here: {made.device}, medians of calls in turn, {ran}")
    if made.a.forecast is not None:
        found.append(f"forecast: {made.a.forecast['program']} on {made.on}")
    return found


def _add_recorded(add: Callable[[str, Cell], None], sides: tuple[ComparedModel, ...]) -> None:
    def values(side: ComparedModel) -> dict[tuple[str, str], float | None]:
        return {
            (one["on"], name): value
            for one in side.recorded
            for name, value in one["metrics"].items()
        }

    for split, metric in _names(values(side) for side in sides):
        add(
            f"{split} {metric} on record",
            lambda side, key=(split, metric): _number(values(side).get(key)),
        )


def _add_forecast(
    add: Callable[[str, Cell], None], on: str, sides: tuple[ComparedModel, ...]
) -> None:
    if all("points" in (side.forecast or {}) for side in sides):
        named: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
            ("first token", "time_to_first_token_seconds", _seconds),
            ("per token", "time_per_output_token_seconds", _seconds),
            ("new tokens/s", "output_tokens_per_second", lambda value: f"{value:,.0f}"),
        )
        for name, key, shown in named:
            add(f"{name} on {on}", lambda side, k=key, s=shown: _point(side, k, s))
        add(f"weights on {on}", lambda side: _bytes((side.forecast or {}).get("weights_bytes")))
        return
    add(f"step on {on}", lambda side: _seconds((side.forecast or {}).get("step_seconds")))
    add(f"memory on {on}", lambda side: _bytes((side.forecast or {}).get("peak_bytes")))


def _point(side: ComparedModel, key: str, shown: Callable[[Any], str]) -> str:
    points = (side.forecast or {}).get("points") or ()
    return shown(points[0][key]) if points else "does not fit"


def _names(each: Any) -> list[Any]:
    """Keys of several mappings, each once, in order."""
    found: dict[Any, None] = {}
    one: Mapping[Any, Any]
    for one in each:
        found |= dict.fromkeys(one)
    return list(found)


def _bytes(value: float | None) -> str:
    return NONE if value is None else si(value, "B")


def _seconds(value: float | None) -> str:
    return NONE if value is None else duration(value)


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"
