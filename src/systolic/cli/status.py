"""``systolic status NAME``: shows the state of a launch."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.cli.runs import now_of
from systolic.report.output import print_json

REFUSED = 2
"""Exit code of a training that rejects its command line."""


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Shows the state of a launch; asks the platform's client if the training is not on this machine.

    Args:
        name: Name of the launch, as systolic runs lists it, or its folder.
        json: Print one JSON object with the state that this machine knows.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    from systolic.launching import logs as launch_logs
    from systolic.launching import record as launched
    from systolic.launching.clients import call
    from systolic.launching.cost import cost
    from systolic.launching.request import OURS
    from systolic.launching.state import ELSEWHERE, SUBMIT_FAILED, WRITTEN
    from systolic.launching.supervisor import unsaved

    options = parse(StatusOptions, args, "systolic status")
    found = launched.listed(options.name)
    now = now_of(found)
    if options.json:
        print_json({**found.to_json(), **now})
        return 0
    more = f", restart {now['attempt']}" if now.get("attempt") else ""
    if REFUSED in (now.get("code"), *now.get("codes", ())):
        more += f", its command line was rejected; systolic logs {found.name} shows why"
    if now["phase"] == "stopped" and (why := unsaved(now.get("codes", ()))):
        more += f"; {why}"
    if why := now.get("why"):
        more += f": {why}"
    if now["phase"] == WRITTEN:
        more += ", not submitted; add --submit"
    if host := now.get("host") if now["phase"] == ELSEWHERE else "":
        more += f": runs on {host} and is not visible from here"
    if gone := now.get("left_out"):
        more += f", without slice {', '.join(map(str, gone))}"
    print(f"{found.name} on {found.slice} via {found.via}: {now['phase']}{more}")
    if found.run:
        print(f"{'bundle' if 'serve' in found.made_by[2:3] else 'run':<8} {found.run}")
    if found.trouble:
        print(f"problem  {found.trouble}")
        print(f"made by  {shlex.join(found.made_by) or 'an unknown command'}")
        rents = "" if found.via in OURS else "; rented machines may still cost money"
        print(f"since    {found.submitted or 'an unknown time'}{rents}")
        return 1
    if (used := cost(found, time.time())) is not None:
        print(f"bill     {used.text()}")
    if now["phase"] == WRITTEN:
        print(f"next     {shlex.join([*found.made_by, '--submit'])}")
        return 0
    if (path := launch_logs.log_of(found)) is not None:
        last = launch_logs.last_line(path)
        print(f"log      {path}" + (f": {last}" if last else ""))
    if now["phase"] in ("lost", "failed", "stopped", SUBMIT_FAILED):
        print(f"next     {shlex.join([*found.made_by, '--submit'])} continues it")
    if words := found.commands["status"]:
        call(found.path, words)
    return 0
