"""A forecast of serving as text: memory first, then a table of concurrencies with the floor beside each figure."""

import textwrap

from rich.text import Text

from systolic.core.units import duration, gibibytes, plural
from systolic.forecasting.serving.forecast import ServingForecast, ServingPoint
from systolic.job.serving_memory import ServingMemory
from systolic.report.terminal import print_lines

WIDTH = 100
COLUMNS = (
    ("requests", 8),
    ("tokens/s", 10),
    ("floor", 9),
    ("first token", 12),
    ("floor", 9),
    ("per token", 10),
    ("floor", 9),
    ("$/M tokens", 11),
    ("$/M output", 11),
)
NOTES = 4
"""Notes that are shown; JSON has all."""
NAME, SIZE = 14, 11


def print_serving(forecast: ServingForecast) -> None:
    """Prints the screen to stdout."""
    print_lines(lambda width: lines(forecast, width), WIDTH, usual=WIDTH)


def lines(forecast: ServingForecast, width: int) -> list[Text]:
    """The screen, in lines of at most ``width`` columns."""
    load = forecast.load
    verdict = "fits" if forecast.fits else "does not fit"
    shown = [
        Text(f"{forecast.name} served on {forecast.on.name}: {verdict}", style="bold"),
        Text(
            f"prompts of {load.prompt_tokens:,} tokens in chunks of {load.chunk:,}, answers of {load.output_tokens:,}; {forecast.layout}"
        ),
        Text("; ".join(filter(None, (forecast.program, forecast.attention)))),
        Text(""),
        *map(Text, memory_lines(forecast.memory, load.tokens)),
    ]
    if forecast.points:
        shown += [Text(""), *_table(forecast)]
        shown += [*_host(forecast), _best(forecast)]
    if forecast.refused:
        many = ", ".join(f"{count:,}" for count in forecast.refused)
        shown.append(
            Text(
                f"no room for {many} at once: {forecast.concurrency:,} fit, the others would wait in the queue"
            )
        )
    price = forecast.bill.usd_per_hour
    if price is not None and forecast.points:
        bill = forecast.bill
        shown.append(Text(f"${price:.2f}/h on demand ({bill.price_region}, {bill.price_as_of})"))
    for note in forecast.notes[:NOTES]:
        for number, line in enumerate(textwrap.wrap(note, width - 6)):
            shown.append(Text(f"{'note' if not number else '':<6}{line}", style="dim"))
    if len(forecast.notes) > NOTES:
        more = len(forecast.notes) - NOTES
        shown.append(Text(f"{'':<6}{more} more with --json", style="dim"))
    for line in shown:
        line.truncate(width, overflow="ellipsis")
    return shown


def _table(forecast: ServingForecast) -> list[Text]:
    """Figures by concurrency."""
    origin = f"steps {forecast.origin.value}; closed load in steady state, assumed"
    head = "".join(f"{name:>{size}}" for name, size in COLUMNS)
    return [
        Text(f"output tokens per second and latency  [{origin}]"),
        Text(head, style="dim"),
        *(Text(_row(point)) for point in forecast.points),
    ]


def _host(forecast: ServingForecast) -> list[Text]:
    """Figures with the host's work after each step, where the load has any."""
    rates = [
        f"{point.concurrency:,} at once {point.host_after_output_tokens_per_second:,.0f} tokens/s"
        for point in forecast.points
        if point.host_after is not None
    ]
    if not rates:
        return []
    each = duration(forecast.load.host_seconds or 0.0)
    text = f"host's work of {each} a step (--host-ms): beside the device above; after each step {', '.join(rates)}"
    return [Text(line) for line in textwrap.wrap(text, WIDTH)]


def _best(forecast: ServingForecast) -> Text:
    """The cheapest load within the latency that was asked for."""
    best, limits = forecast.best, forecast.limits
    within = f" within {limits}" if limits.given else ""
    if best is None:
        least = forecast.points[0].state
        return Text(
            f"no load keeps {limits}: {forecast.points[0].concurrency:,} at once have {duration(least.first_token_seconds)} to the first token and {duration(least.token_seconds)} per token",
            style="bold yellow",
        )
    usd = best.usd_per_million_tokens
    rate = f"{best.output_tokens_per_second:,.0f} tokens/s"
    cost = "" if usd is None else f", ${usd:.3g} a million tokens"
    word = "most tokens" if usd is None else "cheapest"
    room = ", all that fit" if best.concurrency == forecast.concurrency else ""
    return Text(
        f"{word}{within}: {best.concurrency:,} at once{room}: {rate}{cost}", style="bold green"
    )


def _row(point: ServingPoint) -> str:
    state, floor = point.state, point.floor
    cells = (
        f"{point.concurrency:,}",
        f"{point.output_tokens_per_second:,.0f}",
        _number(point.floor_output_tokens_per_second),
        duration(state.first_token_seconds),
        _seconds(None if floor is None else floor.first_token_seconds),
        duration(state.token_seconds),
        _seconds(None if floor is None else floor.token_seconds),
        _dollars(point.usd_per_million_tokens),
        _dollars(point.usd_per_million_output_tokens),
    )
    row = "".join(f"{cell:>{size}}" for cell, (_, size) in zip(cells, COLUMNS, strict=True))
    return f"{row}  prompts wait" if state.saturated else row


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def memory_lines(memory: ServingMemory, tokens: int | None = None) -> list[str]:
    """The memory of a server of a language model as a table.

    Args:
        memory: Of one device.
        tokens: Of a request at its end, for the number of requests that fit.
    """
    head = f"{gibibytes(memory.capacity_bytes)} of each device"
    shown = [f"{'memory':<{NAME}}{head}  [{memory.origin.value}]"]
    for row in memory.rows():
        text = f"  {row.text}" if row.text else ""
        shown.append(f"  {row.name:<{NAME - 2}}{gibibytes(row.bytes):>{SIZE}}{text}")
    if tokens is not None:
        number = memory.concurrency(tokens)
        shown.append(f"{'room':<{NAME}}{plural(number, 'request')} of {tokens:,} tokens at once")
    return shown
