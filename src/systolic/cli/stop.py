"""``systolic stop NAME``: stops a launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.report.output import print_json


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """Stops a launch: asks the training to save, then releases the machines; fails if it was killed before it had saved.

    Args:
        name: Name of the launch, as systolic runs lists it, or its folder.
        json: Print one JSON object.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    from systolic.launching import record as launched
    from systolic.launching import stop as launch_stop

    options = parse(StopOptions, args, "systolic stop")
    found = launched.find(options.name)
    result = launch_stop.stop(found)
    if options.json:
        print_json({"name": found.name, "result": result.text, "saved": result.saved})
    else:
        print(f"{found.name}: {result.text}")
    return 0 if result.saved else 1
