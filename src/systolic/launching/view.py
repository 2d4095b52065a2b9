"""Terminal output of the verbs launch, runs, status, logs and stop."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from systolic.core.errors import OptionError
from systolic.report.output import StderrReporter, print_json, warn

if TYPE_CHECKING:
    from systolic.launching.lifecycle import Stopped
    from systolic.launching.record import WrittenLaunch
    from systolic.launching.state import LaunchState

REFUSED = 2
"""Exit code of a training that rejects its command line."""


class LaunchReporter(StderrReporter):
    """Prints the summary of a launch on stdout before it is submitted, unless JSON is asked for.

    Args:
        quiet: Show no progress.
        show: Print the texts of the files after the summary.
        json: Print no summary.

    Raises:
        OptionError: both ``show`` and ``json`` are given.
    """

    def __init__(self, *, quiet: bool = False, show: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet)
        if show and json:
            raise OptionError(
                "--show prints text, but --json prints one JSON object, which names the files; leave one of them out"
            )
        self._show, self._json = show, json

    def update(self, state: "WrittenLaunch") -> None:
        """Prints the summary of a launch whose files are written."""
        if not self._json:
            print("\n".join(summary(state, show=self._show)), flush=True)


def summary(written: "WrittenLaunch", *, show: bool) -> list[str]:
    """Lines with the slice, the command, the bill, the files and notes of a launch; ends with the texts of the files if asked for."""
    from systolic.launching.names import number_of
    from systolic.launching.request import LOCAL

    launch, prepared, on = written.launch, written.prepared, written.launch.on
    texts = {written.folder / name: text for name, text in prepared.files.items()}
    lines = {
        path: f" ({number_of(len(text.splitlines()), 'line')})" for path, text in texts.items()
    }
    kind = ("chip", on.num_chips) if on.platform == "tpu" else ("device", on.num_devices)
    # Processes of this machine stand in for hosts, as many as --processes has.
    num_hosts = on.num_hosts if written.record.via == LOCAL else prepared.hosts
    chips, hosts = (number_of(count, what) for what, count in (kind, ("host", num_hosts)))
    rows = [
        ("launch", f"{launch.name} on {on.name}: {chips}, {hosts}"),
        ("command", shlex.join(written.command)),
        *(
            (("run" if written.command[1] == "train" else "bundle", launch.run),)
            if launch.run
            else ()
        ),
        ("bill", written.bill.text()),
        *(("file", f"{path}{lines.get(path, '')}") for path in written.files),
        *(() if show else (("", f"--show prints {', '.join(prepared.files)}"),)),
        *(("note", note) for note in prepared.notes),
    ]
    shown = [f"{title:<8} {text}" for title, text in rows]
    if show:
        shown += [f"\n── {path}\n{text.rstrip()}" for path, text in texts.items()]
        shown.append("")
    return shown


def show_launch(written: "WrittenLaunch", *, show: bool = False, json: bool = False) -> int:
    """Prints the next commands; returns the exit code.

    Args:
        written: The launch.
        show: Print the files.
        json: Print one JSON object.
    """
    del show  # by the reporter, before the launch is submitted
    if json:
        print_json(written.to_json())
    else:
        print("\n".join(following(written)))
    return 0


def following(written: "WrittenLaunch") -> list[str]:
    """Lines that show the next commands."""
    record = written.record
    if record.submitted is None:
        defaults = () if record.place else record.commands.asked
        place = "".join(f" --{default.what}={default.what.upper()}" for default in defaults)
        commands = (*record.commands.checks, *record.commands.submit)
        words = [shlex.join(words) + place for words in commands]
        by_hand = " && ".join([f"cd {shlex.quote(record.folder)}", *words])
        return [
            f"submit   {shlex.join([*record.made_by, '--submit'])}",
            f"         or: {by_hand}",
        ]
    return [
        f"submitted; next: systolic status {record.name}, systolic logs -f {record.name}, systolic stop {record.name}"
    ]


def show_runs(states: "Sequence[LaunchState]", *, json: bool = False) -> int:
    """Prints the launches of this account, newest first; returns the exit code.

    Args:
        states: The launches.
        json: Print one JSON object.
    """
    if json:
        print_json({"runs": [state.to_json() for state in states]})
        return 0
    if not states:
        print("no launches from this account; start one: systolic launch RECIPE --on SLICE --via …")
        return 0
    table = rows(states)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    for state in states:
        if state.launched.trouble:
            warn(f"{state.name}: {state.launched.trouble}")
    return 0


def rows(states: "Sequence[LaunchState]") -> list[tuple[str, ...]]:
    """Table of launches, with the bill's total (USD) and the estimated cost so far (USED)."""
    head = ("NAME", "VIA", "SLICE", "STATE", "SUBMITTED", "USD", "USED", "RUN")
    return [head, *(_row(state) for state in states)]


def _row(state: "LaunchState") -> tuple[str, ...]:
    launched, cost = state.launched, state.cost
    used, most = (None, None) if cost is None else (cost.usd, cost.usd_most)
    money = ["-" if usd is None else f"{usd:,.2f}" for usd in (launched.bill.usd, used)]
    if cost is not None and cost.is_bound:
        money[1] = f"≤ {money[1] if most is None else f'{most:,.2f}'}"
    elif most is not None:
        money[1] += f" to {most:,.2f}"
    when = (launched.submitted or "-").replace("+00:00", "Z")
    return (
        launched.name,
        launched.via,
        launched.slice,
        state.phase,
        when,
        *money,
        launched.run,
    )


def show_status(state: "LaunchState", *, json: bool = False) -> int:
    """Prints the state of a launch; returns the exit code, 1 where its record is lost.

    Args:
        state: The state.
        json: Print one JSON object with the state that this machine knows.
    """
    if json:
        print_json(state.to_json())
        return 0
    from systolic.launching.request import OURS
    from systolic.launching.state import SUBMIT_FAILED, WRITTEN, last_line

    launched = state.launched
    print(f"{launched.name} on {launched.slice} via {launched.via}: {state.phase}{_details(state)}")
    if launched.run:
        print(f"{'bundle' if 'serve' in launched.made_by[2:3] else 'run':<8} {launched.run}")
    if launched.trouble:
        print(f"problem  {launched.trouble}")
        print(f"made by  {shlex.join(launched.made_by) or 'an unknown command'}")
        rents = "" if launched.via in OURS else "; rented machines may still cost money"
        print(f"since    {launched.submitted or 'an unknown time'}{rents}")
        return 1
    if state.cost is not None:
        print(f"bill     {state.cost.text()}")
    again = shlex.join([*launched.made_by, "--submit"])
    if state.phase == WRITTEN:
        print(f"next     {again}")
        return 0
    if (path := state.log) is not None:
        last = last_line(path)
        print(f"log      {path}" + (f": {last}" if last else ""))
    if state.phase in ("lost", "failed", "stopped", SUBMIT_FAILED):
        print(f"next     {again} continues it")
    state.ask_client()
    return 0


def _details(state: "LaunchState") -> str:
    """Reasons and circumstances of a phase, after it on its line."""
    from systolic.launching.state import ELSEWHERE, WRITTEN
    from systolic.launching.supervisor import unsaved

    now = state.now
    text = f", restart {now.attempt}" if now.attempt else ""
    if REFUSED in (now.code, *now.codes):
        text += f", its command line was rejected; systolic logs {state.name} shows why"
    if state.phase == "stopped" and (why := unsaved(now.codes)):
        text += f"; {why}"
    if now.why:
        text += f": {now.why}"
    if state.phase == WRITTEN:
        text += ", not submitted; add --submit"
    if state.phase == ELSEWHERE:
        text += f": runs on {now.host} and is not visible from here"
    if now.left_out:
        text += f", without slice {', '.join(map(str, now.left_out))}"
    return text


def show_logs(output: Iterable[str]) -> int:
    """Prints the output of a launch as it comes; returns the exit code.

    Args:
        output: Pieces of text.
    """
    for text in output:
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0


def show_stop(stopped: "Stopped", *, json: bool = False) -> int:
    """Prints the result of a stop; returns the exit code, 1 where the training was killed before it had saved.

    Args:
        stopped: The result.
        json: Print one JSON object.
    """
    if json:
        print_json(stopped.to_json())
    else:
        print(f"{stopped.name}: {stopped.text}")
    return 0 if stopped.saved else 1
