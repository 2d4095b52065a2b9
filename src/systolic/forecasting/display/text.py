"""A forecast on one screen: the verdict first, then memory, time, costs and the bill."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.text import Text

from systolic.core.units import duration, gibibytes
from systolic.forecasting import Forecast
from systolic.forecasting.costs import by_place
from systolic.forecasting.display import readings
from systolic.forecasting.display.readings import Portion
from systolic.report import figures, terminal
from systolic.report.figures import TONE_COLOURS
from systolic.report.terminal import print_lines

HEIGHT = 23
"""Lines of a screen that leave one for the prompt."""
MAX_WIDTH = 100
COSTS = 6
BUFFERS = 8
INDENT = 9
SMALL = 0.02
"""Share of the peak below which kinds of memory are shown together."""

_FILLS = "█▓▒░▞▚▤▥"
"""Segments of a bar differ without colour, too."""
_HUES = ("blue", "magenta", "yellow", "green", "cyan", "red", "white", "bright_black")
_RESOURCES = {
    "mxu": ("█", "blue"),
    "vpu": ("▓", "magenta"),
    "hbm": ("▒", "yellow"),
    "ici": ("░", "green"),
    "dcn": ("▞", "cyan"),
    "host": ("▚", "red"),
    "idle": ("·", "bright_black"),
}


def print_forecast(
    forecast: Forecast,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    width: int | None = None,
) -> None:
    """Prints the screen to ``stream`` (stdout), in colour on a terminal."""
    print_lines(
        lambda columns: lines(forecast, columns),
        MAX_WIDTH,
        stream=stream,
        environ=environ,
        width=width,
    )


def lines(forecast: Forecast, width: int, *, every_note: bool = False) -> list[Text]:
    """The screen: at most :data:`HEIGHT` lines of ``width`` columns, more only for all cautions, or for every note."""
    shown = [*_verdict(forecast, width), Text("")]
    shown += _memory(forecast, width)
    shown += _refused(forecast, width) if not forecast.fits else _time(forecast, width)
    tail = _bill(forecast)
    notes = readings.notes(forecast)
    least = sum(len(_wrapped(note, width)) for note in forecast.cautions)
    others = len(notes) - len(forecast.cautions)
    room = HEIGHT - len(shown) - len(tail) - least
    if forecast.timeline is not None:
        rows = min(COSTS, room - 2 - min(others, 1 if forecast.cautions else 2))
        shown += _costs(forecast, width, rows)
    shown += tail
    counted = 1 if others else 0
    room = max(HEIGHT - len(shown), least + counted if forecast.cautions else 0)
    if every_note:
        room = sum(len(_wrapped(note, width)) for note in notes)
    shown += _notes(notes, room, width)
    return [_cut(line, width) for line in shown]


def _verdict(forecast: Forecast, width: int) -> list[Text]:
    verdict = readings.verdict(forecast)
    colour = TONE_COLOURS[verdict.tone]
    head = Text(f"{forecast.recipe} on {forecast.on.name}  ", style="bold")
    head.append(f" {verdict.word} ", f"bold reverse {colour}")
    sentence = Text(verdict.sentence, style="bold")
    heads = [head.append("  ").append(sentence)]
    if len(heads[0]) > width:
        lines_ = textwrap.wrap(verdict.sentence, width)
        heads = [
            head[: len(head) - len(sentence) - 2],
            *(Text(line, style="bold") for line in lines_),
        ]
    speed = dict(readings.speed(forecast))
    if not speed:
        axes = readings.axes_text(forecast)
        return [*heads, *([Text(f"layout {axes}", style="dim")] if axes else [])]
    step = Text(f"{speed['step']} a step", style=f"bold {colour}")
    if interval := readings.interval(forecast):
        step.append(f" ({interval})", "not bold")
    bound, origin = readings.words(forecast)[speed["bound by"]], readings.time_origin(forecast)
    if len(step) + len(f", bound by {bound}  [{origin}]") <= width:
        step.append(f", bound by {bound}", "not bold")
    step.append(f"  [{origin}]", "dim not bold")
    rest = [speed["throughput"]] if "throughput" in speed else []
    rest += [f"{name} {speed[name]}" for name in ("MFU", "HFU") if name in speed]
    rest.append(readings.axes_text(forecast))
    return [*heads, step, Text(", ".join(part for part in rest if part))]


def _memory(forecast: Forecast, width: int) -> list[Text]:
    need, have = forecast.need_bytes, forecast.capacity_bytes
    if not need:
        return []
    origin = readings.memory_origin(forecast).value
    head = _row("memory", f"{gibibytes(need)} of {gibibytes(have)} on each device")
    if not forecast.fits:
        head = _row("memory", f"{gibibytes(need)} needed, {gibibytes(have)} on each device")
    head.append(f"  [{origin}; kinds estimated]" if forecast.memory else f"  [{origin}]", "dim")
    parts = _merged(readings.memory_parts(forecast))
    if not parts:
        return [head]
    styles = {part.key: (_FILLS[i % 8], _HUES[i % 8]) for i, part in enumerate(parts)}
    return [head, _bar(parts, styles, width), *_legend(parts, styles, width)]


def _merged(parts: Sequence[Portion]) -> list[Portion]:
    """Merges kinds that would be too thin to see."""
    total = sum(part.value for part in parts)
    kept = [part for part in parts if part.value >= SMALL * total]
    rest = [part for part in parts if part not in kept]
    if len(rest) < 2:
        return list(parts)
    size = sum(part.value for part in rest)
    share = sum(part.share for part in rest)
    return [
        *kept,
        Portion(key="rest", name="others", value=size, share=share, text=gibibytes(size)),
    ]


def _time(forecast: Forecast, width: int) -> list[Text]:
    parts = readings.time_parts(forecast)
    if not parts:
        return []
    exposed = forecast.exposed_collective_seconds
    others = "GPUs" if forecast.on.platform == "gpu" else "chips"
    waits = f"{duration(exposed)} of it only waiting for {others}" if exposed else "no waiting"
    head = _row("time", f"{duration(forecast.step_seconds or 0.0)}, {waits}")
    head.append(f"  [{readings.time_origin(forecast)}]", "dim")
    return [head, _bar(parts, _RESOURCES, width), *_legend(parts, _RESOURCES, width, share=True)]


def _bar(parts: Sequence[Portion], styles: Mapping[str, tuple[str, str]], width: int) -> Text:
    """Draws segments by share; the remainder is free."""
    line, room = Text(" " * INDENT), width - INDENT
    done, at = 0.0, 0
    for part in parts:
        done += part.share
        end = min(round(done * room), room)
        fill, colour = styles[part.key]
        line.append(fill * (end - at), colour)
        at = end
    return line.append("·" * (room - at), "bright_black")


def _legend(
    parts: Sequence[Portion],
    styles: Mapping[str, tuple[str, str]],
    width: int,
    share: bool = False,
) -> list[Text]:
    """Explains the segments, on as few lines as possible."""
    rows = [Text(" " * INDENT)]
    for part in parts:
        text = figures.percent(part.share) if share else part.text
        size = len(part.name) + len(text) + 3
        if len(rows[-1]) + size > width:
            rows.append(Text(" " * INDENT))
        fill, colour = styles[part.key]
        rows[-1].append(fill, colour).append(f" {part.name} ").append(text, "bold").append("  ")
    return rows


def _costs(forecast: Forecast, width: int, rows: int) -> list[Text]:
    if forecast.timeline is None or rows < 1:
        return []
    names = readings.short_names(forecast)
    column = max(5, *map(len, names.values()))
    wide = width - INDENT - column - 41
    head = Text(f"{'costs':<{INDENT}}", style="bold")
    head.append(f"{'in the model':<{wide}}   share      time  {'by':<{column}} source", "dim")
    shown = [head]
    whole = forecast.timeline.seconds or 1.0
    for cost in by_place(forecast.timeline)[:rows]:
        source = "" if cost.short_source == cost.name else cost.short_source
        line = Text(f"{'':<{INDENT}}{_middle(cost.name, wide):<{wide}}  ")
        line.append(f"{cost.seconds / whole * 100:5.1f} %", "bold")
        line.append(f"  {duration(cost.seconds):>8}  ")
        key = cost.resource.value
        line.append(f"{names[key]:<{column}} ", _RESOURCES[key][1])
        shown.append(line.append(_tail(source, width - len(line)), "dim"))
    return shown


def _refused(forecast: Forecast, width: int) -> list[Text]:
    """The largest buffers of a step that does not fit."""
    buffers = () if forecast.rejected is None else forecast.rejected.buffers
    if not buffers:
        return [_row("largest", "the compiler names no buffers")]
    head = Text(f"{'largest':<{INDENT}}", style="bold")
    head.append(f"{'bytes':>9}  shape, what it is, op", "dim")
    shown = [head]
    same = Counter((b.bytes, b.shape, b.kind, b.op, b.source) for b in buffers)
    for (size, shape, kind, op, source), number in list(same.items())[:BUFFERS]:
        line = Text(f"{'':<{INDENT}}").append(f"{gibibytes(size):>9}", "bold")
        line.append(f" × {number}" if number > 1 else "")
        parts = (shape.split("{")[0], kind, _tail(op, 60))
        line.append("  " + "  ".join(part for part in parts if part))
        if source:
            line.append(f"  {_tail(source, 30)}", "dim")
        shown.append(line)
    return shown


def _bill(forecast: Forecast) -> list[Text]:
    rows = [("cost", readings.money(forecast)), ("energy", readings.energy(forecast))]
    rows.append(("compiler", readings.compiler_text(forecast)))
    if advice := readings.compiler_advice(forecast):
        rows.append(("", advice))
    rows.append(("flags", readings.flags_text(forecast)))
    return [_row(name, text) for name, text in rows if text]


def _wrapped(note: str, width: int) -> list[str]:
    return textwrap.wrap(terminal.one_line(note, 600), width - INDENT)


def _notes(notes: Sequence[str], room: int, width: int) -> list[Text]:
    """Complete notes, as many as fit; the last line counts the others."""
    wrapped = [_wrapped(note, width) for note in notes]
    rows: list[Text] = []
    shown = 0
    for lines_ in wrapped:
        rest = len(wrapped) - shown - 1
        if len(rows) + len(lines_) + (1 if rest else 0) > room:
            break
        rows += [Text(f"{'':<{INDENT}}{line}") for line in lines_]
        shown += 1
    if shown < len(wrapped) and len(rows) < room:
        noun = "more note" if shown else "note"
        more = f"{figures.plural(len(wrapped) - shown, noun)}, with --json or --html"
        rows.append(Text(f"{'':<{INDENT}}{more}"))
    if rows:
        rows[0] = _row("notes", rows[0].plain[INDENT:])
    for line in rows:
        line.stylize("dim", INDENT)
    return rows


def _row(name: str, text: str) -> Text:
    return Text(f"{name:<{INDENT}}", style="bold").append(terminal.one_line(text, 400), "not bold")


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _middle(text: str, width: int) -> str:
    """Cuts text in the middle, keeping the block and the op of a path."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _tail(text: str, width: int) -> str:
    if width < 2:
        return ""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"
