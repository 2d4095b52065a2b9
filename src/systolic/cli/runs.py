"""``systolic runs``: what was launched where."""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.cli.launch import rows
from systolic.cli.output import print_json
from systolic.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Lists launches of this account, the newest first.

    Args:
        json: Print one JSON object.
    """

    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    from systolic.session.launched import launches, phase

    options = parse(RunsOptions, args, "systolic runs")
    found = launches()
    if options.json:
        print_json({"runs": [{**one.to_json(), **phase(one)} for one in found]})
        return 0
    if not found:
        print("nothing was launched from this account; systolic launch RECIPE --on SLICE --via …")
        return 0
    table = rows(found)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0
