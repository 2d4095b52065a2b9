"""Output of ``systolic compare``: two models as a table of three columns."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from systolic.core.units import duration, si
from systolic.report.output import or_json

if TYPE_CHECKING:
    from systolic.comparing.comparison import ComparedModel, Comparison
    from systolic.comparing.speeds import EvalForecast, ModelSpeeds, ServerForecast
    from systolic.forecasting.serving.forecast import ServingPoint

NONE = "-"
Cell = Callable[["ComparedModel"], str]
SERVER: tuple[tuple[str, Callable[["ServingPoint"], str]], ...] = (
    ("first token", lambda point: duration(point.state.first_token_seconds)),
    ("per token", lambda point: duration(point.state.token_seconds)),
    ("new tokens/s", lambda point: f"{point.output_tokens_per_second:,.0f}"),
)
"""Name of a row, and what it shows of a server's point."""


@or_json
def show(comparison: "Comparison") -> None:
    """Prints two models side by side."""
    print("\n".join(lines(comparison)))


def lines(comparison: "Comparison") -> list[str]:
    """The table, then what both answered and what was run."""
    sides = (comparison.a, comparison.b)
    rows: list[Sequence[str]] = [("", str(comparison.a.path), str(comparison.b.path))]

    def add(name: str, cell: Cell) -> None:
        rows.append((name, cell(comparison.a), cell(comparison.b)))

    add("model", lambda side: f"{side.kind}, {side.precision} here")
    add("parameters", lambda side: f"{side.parameters:,}")
    if any(side.adapter_parameters for side in sides):
        add("  of its adapters", lambda side: f"{side.adapter_parameters:,}")
    add("weights in memory", lambda side: si(side.bytes, "B"))
    for dtype in _names(side.bytes_by_dtype for side in sides):
        add(f"  {dtype}", lambda side, dtype=dtype: _bytes(side.bytes_by_dtype.get(dtype)))
    add("weights in files", lambda side: _bytes(side.file_bytes))
    _add_recorded(add, sides)
    for metric in _names(side.measured or {} for side in sides):
        add(f"{metric} measured", lambda side, m=metric: _number((side.measured or {}).get(m)))
    rows += speed_rows([side.speeds for side in sides])
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*table, *_told(comparison)]


def _told(comparison: "Comparison") -> list[str]:
    texts = []
    if (agreement := comparison.agreement) is not None:
        texts.append(str(agreement))
    else:
        texts.append(f"outputs not compared: {comparison.disagreement}")
    if comparison.data is not None:
        texts.append(f"measured on {comparison.data}")
    if comparison.timed:
        texts += timed_lines((comparison.a.speeds, comparison.b.speeds), comparison.timed)
    for name, forecast in comparison.a.speeds.forecasts.items():
        texts.append(f"forecast: {forecast.program} on {name}")
    return texts


def _add_recorded(add: Callable[[str, Cell], None], sides: "tuple[ComparedModel, ...]") -> None:
    def values(side: "ComparedModel") -> dict[tuple[str, str], float | None]:
        return {
            (evaluation.on, name): value
            for evaluation in side.recorded
            for name, value in evaluation.metrics.items()
        }

    for split, metric in _names(values(side) for side in sides):
        add(
            f"{split} {metric} on record",
            lambda side, key=(split, metric): _number(values(side).get(key)),
        )


def _names(each: Any) -> list[Any]:
    """Keys of several mappings, each once, in order."""
    keys: dict[Any, None] = {}
    mapping: Mapping[Any, Any]
    for mapping in each:
        keys |= dict.fromkeys(mapping)
    return list(keys)


def _bytes(value: float | None) -> str:
    return NONE if value is None else si(value, "B")


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def speed_rows(sides: "Sequence[ModelSpeeds]") -> list[Sequence[str]]:
    """Stages timed here, then each slice's forecasts."""
    stages = dict.fromkeys(stage for side in sides for stage in side.seconds)
    rows: list[Sequence[str]] = [
        (f"{stage} here", *(_shown(side.seconds.get(stage), duration) for side in sides))
        for stage in stages
    ]
    for name in dict.fromkeys(name for side in sides for name in side.forecasts):
        rows += _slice_rows(name, [side.forecasts.get(name) for side in sides])
    return rows


def timed_lines(sides: "Sequence[ModelSpeeds]", timed: Mapping[str, int]) -> list[str]:
    """Device and programs of the timings (both programs where they differ), with notes."""
    ran = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in timed.items())
    programs = " and ".join(dict.fromkeys(side.program or "" for side in sides))
    device = next((side.device for side in sides if side.device), "")
    served = "the server's programs" if "prefill" in programs else "the program"
    return [
        f"here: {device}, {served} ({programs}), medians of calls in turn, {ran}",
        *(f"here: {note}" for side in sides for note in side.notes),
    ]


def _slice_rows(
    name: str, sides: "Sequence[ServerForecast | EvalForecast | None]"
) -> list[Sequence[str]]:
    from systolic.comparing.speeds import EvalForecast, ServerForecast

    servers = [side for side in sides if isinstance(side, ServerForecast)]
    if len(servers) < len(sides):
        cells = [
            (_shown(side.step_seconds, duration), _bytes(side.peak_bytes))
            if isinstance(side, EvalForecast)
            else (NONE, NONE)
            for side in sides
        ]
        seconds, peaks = zip(*cells, strict=True)
        return [(f"step on {name}", *seconds), (f"memory on {name}", *peaks)]
    rows: list[Sequence[str]] = []
    for title, shown in SERVER:
        cells = [shown(side.points[0]) if side.points else "does not fit" for side in servers]
        rows.append((f"{title} on {name}", *cells))
    return [*rows, (f"weights on {name}", *(_bytes(side.weights_bytes) for side in servers))]


def _shown(value: float | None, shown: Callable[[float], str]) -> str:
    return NONE if value is None else shown(value)
