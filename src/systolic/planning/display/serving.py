"""Plan of a server on one screen: the answer with its command, the ranking, what was rejected and why."""

import textwrap
from collections.abc import Sequence

from rich.text import Text

from systolic.core.units import dollars, duration, plural
from systolic.forecasting.serving.demand import ASSUMED
from systolic.planning.goal import priced
from systolic.planning.serving import DIR, ServingCandidate, ServingPlan
from systolic.report.terminal import print_lines

WIDTH = 120
REJECTED = 6
"""Rejections that are shown; JSON has all."""
LEAST_TEXTS = 0.01
"""Mean of texts under way below which it is only said that there are fewer."""
UNCOMPILED = 4
"""Candidates known by their floors that are shown; JSON has all."""
COLUMNS = (
    ("replicas", 9),
    ("chips", 9),
    ("$/h", 9),
    ("$/M", 7),
    ("$/M out", 9),
    ("texts", 7),
    ("99 % first", 12),
    ("per token", 11),
    ("headroom", 10),
)
"""Columns beside a candidate, and their widths; dollars a million tokens, all and new ones; texts under way in an engine."""


def print_serving_plan(plan: ServingPlan) -> None:
    """Prints the screen to stdout."""
    print_lines(lambda width: lines(plan, width), WIDTH, usual=100)


def lines(plan: ServingPlan, width: int) -> list[Text]:
    """The screen, ``width`` columns wide; commands are never cut."""
    demand = plan.demand
    load, limits = demand.load, demand.limits
    requested = f"{plan.name} for {demand.requests_per_second:g} requests a second of {load.prompt_tokens:,} + {load.output_tokens:,} tokens"
    within = f", {limits}" if limits.given else ""
    formats = [
        f"{what} in {how}"
        for what, how in (("weights", plan.weights), ("cache", plan.cache))
        if how != "plain"
    ]
    head = "; ".join([requested + within, *formats])
    shown = [Text(line, style="bold") for line in _wrapped(head, width)]
    best = plan.best
    if best is None:
        shown.append(Text("nothing that was tried takes this demand", style="bold red"))
    else:
        shown += _answer(plan, best, width)
        shown += [
            Text(""),
            *_table(plan.ranked, width, "engines x tensor axis, compiled, cheapest first", best),
        ]
    if plan.uncompiled:
        few = plan.uncompiled[:UNCOMPILED]
        head = "not compiled: at the floors of their steps, cheapest first"
        shown += [Text(""), *_table(few, width, head)]
        more = len(plan.uncompiled) - len(few)
        shown += [Text(f"  {more} more with --json", style="dim")] if more else []
    if plan.rejected:
        shown += [Text(""), Text("rejected", style="dim")]
        for rejection in plan.rejected[:REJECTED]:
            text = f"{rejection.name}: {rejection.reason}"
            shown += [Text(line) for line in _wrapped(text, width, "  ", "    ")]
        more = len(plan.rejected) - REJECTED
        shown += [Text(f"  {more} more with --json", style="dim")] if more > 0 else []
    shown.append(Text(""))
    for note in (f"assumed: {ASSUMED}", *plan.notes):
        shown += [Text(line, style="dim") for line in _wrapped(note, width, "note  ", " " * 6)]
    return shown


def _answer(plan: ServingPlan, best: ServingCandidate, width: int) -> list[Text]:
    fleet, state = best.fleet, best.fleet.state
    usd = fleet.usd_per_hour
    cost = "no price" if usd is None else f"{dollars(usd)} an hour"
    each = fleet.usd_per_million_tokens
    million = "" if each is None else f", {dollars(each)} a million tokens"
    taken = "keep the limits" if plan.demand.limits.given else "be taken"
    answer = f"{fleet.replicas:,} x {best.name}, {plural(best.chips, 'chip')}: {cost}{million}; {_headroom(fleet.headroom)} more requests would {taken}"
    engines = fleet.replicas * fleet.engines
    many = "the engine" if engines == 1 else f"each of {engines:,} engines"
    why = f"{many}: {state.requests_per_second:.3g} requests a second, {_texts(state.requests)} texts under way (99 % of the time up to {best.most_texts:,}, room for {best.room:,}); first token {duration(state.first_token_seconds)} on average and {duration(state.late_first_token_seconds)} for 99 %, {duration(state.token_seconds)} per token"
    price = priced(best.on, plan.price)
    rate = f"prices {plan.price.value}, {price['price_region']}, {price['price_as_of']}"
    kind = "the compiler's schedule" if best.quick else "a full compile"
    shown = [Text(line, style="bold green") for line in _wrapped(answer, width)]
    shown += [Text(line) for line in _wrapped(why, width)]
    shown.append(Text(f"steps by {kind}; {rate}" if usd is not None else f"steps by {kind}"))
    for number, command in enumerate(plan.commands):
        shown.append(Text(f"{'' if number else 'run':<10}{command}", style="bold cyan"))
    if plan.commands[-1].split()[2] == DIR:
        shown.append(
            Text(f"{'':<10}{DIR} is a run, a Bundle or a folder with the weights", style="dim")
        )
    return shown


def _texts(number: float) -> str:
    """Texts under way in the mean: ``760``, ``0.59``, ``<0.01``."""
    if number < LEAST_TEXTS:
        return f"<{LEAST_TEXTS}"
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _headroom(share: float) -> str:
    """``84%``, or ``1,200 times`` from ten times on."""
    return f"{share:,.0f} times" if share >= 10 else f"{share:.0%}"


def _table(
    candidates: Sequence[ServingCandidate],
    width: int,
    title: str,
    answer: ServingCandidate | None = None,
) -> list[Text]:
    """Candidates with a line each, the answer's in bold."""
    names = max(len(_short(candidate)) for candidate in candidates)
    head = "".join(f"{name:>{size}}" for name, size in COLUMNS)
    shown = [Text(title), Text(f"{'':<{names}}{head}", style="dim")]
    for candidate in candidates:
        cells = "".join(
            f"{cell:>{size}}" for cell, (_, size) in zip(_cells(candidate), COLUMNS, strict=True)
        )
        text = Text(
            f"{_short(candidate):<{names}}{cells}", style="bold" if candidate is answer else ""
        )
        text.truncate(width, overflow="ellipsis")
        shown.append(text)
    return shown


def _short(candidate: ServingCandidate) -> str:
    """``v6e-8 4x2``: engines, and the devices of the tensor axis of each; an expert axis follows with an e."""
    layout = candidate.layout
    expert = f"xe{layout.expert}" if layout.expert > 1 else ""
    return f"{candidate.on.name} {layout.data}x{layout.tensor}{expert}"


def _cells(candidate: ServingCandidate) -> tuple[str, ...]:
    fleet, state = candidate.fleet, candidate.fleet.state
    return (
        f"{fleet.replicas:,}",
        f"{candidate.chips:,}",
        "-" if fleet.usd_per_hour is None else f"{fleet.usd_per_hour:,.2f}",
        _dollars(fleet.usd_per_million_tokens),
        _dollars(fleet.usd_per_million_output_tokens),
        _texts(state.requests),
        duration(state.late_first_token_seconds),
        duration(state.token_seconds),
        f"{fleet.headroom:,.0f} x" if fleet.headroom >= 10 else f"{fleet.headroom:.0%}",
    )


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest)
