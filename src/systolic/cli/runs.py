"""``systolic runs``: lists launches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.cli.parse import parse
from systolic.report.output import print_json, warn

if TYPE_CHECKING:
    from systolic.launching.record import Launched


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Lists the launches of this account, newest first.

    Args:
        json: Print one JSON object.
    """

    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    from systolic.launching.record import launches

    options = parse(RunsOptions, args, "systolic runs")
    found = launches()
    if options.json:
        print_json({"runs": [{**one.to_json(), **now_of(one)} for one in found]})
        return 0
    if not found:
        print("no launches from this account; start one: systolic launch RECIPE --on SLICE --via …")
        return 0
    table = rows(found)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for one in found:
        if one.trouble:
            warn(f"{one.name}: {one.trouble}")
    return 0


def now_of(one: "Launched") -> dict[str, Any]:
    """State of a launch as this machine knows it: its phase, and its cost so far."""
    from systolic.launching.cost import cost
    from systolic.launching.state import phase

    used = cost(one, time.time())
    return {**phase(one), **({} if used is None else used.to_json())}


def rows(found: "Sequence[Launched]") -> list[tuple[str, ...]]:
    """Table of launches, with the bill's total (USD) and the estimated cost so far (USED)."""
    head = ("NAME", "VIA", "SLICE", "STATE", "SUBMITTED", "USD", "USED", "RUN")
    return [head, *((*_row(one, now_of(one)),) for one in found)]


def _row(one: "Launched", now: dict[str, Any]) -> tuple[str, ...]:
    money = [
        "-" if usd is None else f"{usd:,.2f}" for usd in (one.bill["usd"], now.get("used_usd"))
    ]
    most = now.get("used_usd_most")
    if now.get("used_at_most"):
        money[1] = f"≤ {money[1] if most is None else f'{most:,.2f}'}"
    elif most is not None:
        money[1] += f" to {most:,.2f}"
    when = (one.submitted or "-").replace("+00:00", "Z")
    return (one.name, one.via, one.slice, now["phase"], when, *money, one.run)
