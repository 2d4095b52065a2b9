"""Output of ``systolic train``, for each of its forms."""

import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from systolic.core.arguments import explained_by
from systolic.core.reporter import reporter
from systolic.core.units import duration, si
from systolic.report.output import StderrReporter, print_json

if TYPE_CHECKING:
    from systolic.training.display.live import Live
    from systolic.training.rehearsal import Rehearsal
    from systolic.training.session import ReplayedStep, TrainResult

MUCH = 0.1
"""Share of the parameters above which a line says that every device holds all of them."""
ROWS = 8
"""Parameters shown."""
NEXT = {
    "layout": "tracing the model",
    "model": "shrinking the job",
    "shrunk": "compiling the shrunk steps",
    "steps": "saving a checkpoint",
    "checkpoint": "evaluating",
}
"""Stage that follows another of a rehearsal."""


class TrainReporter(StderrReporter):
    """The reporter of a training: its first piece of work is drawn live, with the session's events."""

    shows_events = True

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet, json=json)
        self._live: Live | None = None
        self._is_over = quiet or json
        self.shows_events = not quiet

    def begin(self, title: str) -> None:
        """Draws the run, once."""
        if self._is_over:
            super().begin(title)
            return
        from systolic.training.display.live import Live

        self._is_over, self._live = True, Live()
        self._open.append(self._closing(self._live))

    def update(self, state: Any) -> None:
        """Shows a record of the run."""
        if self._live is not None:
            self._live.see(state)


def show(result: "TrainResult", *, json: bool = False) -> int:
    """Prints the summary in the first process; returns the exit code: after a signal 128 and its number, as a shell has it.

    Args:
        result: The result.
        json: Print the summary as one JSON object on stdout.
    """
    from systolic.forecasting.display.profiled import beside_json, print_beside
    from systolic.training import distributed
    from systolic.training.display.summary import print_summary

    first = distributed.is_first()
    if json and (first or not result.trained):
        more = {} if result.beside is None else {"profile": beside_json(result.beside)}
        print_json({**result.summary, **more})
    elif first and result.trained:
        print_summary(result.run)
        if result.beside is not None:
            print_beside(result.beside)
    name = result.interrupted
    if name is None:
        return 0
    if first:
        at = f"step {result.summary['steps']}, which is saved"
        at = at if result.summary["checkpoint"] else "the start"
        reporter().warn(f"stopped by {name} at {at}; continue with {result.summary['next']}")
    return 128 + signal.Signals[name]


def show_replay(replay: "ReplayedStep", *, json: bool = False) -> int:
    """Prints a bad step made again.

    Args:
        replay: The step.
        json: Print one JSON object.
    """
    if json:
        print_json(replay.report)
        return 0
    print(f"{replay.path} with the weights of step {replay.report['weights']}")
    for name, value in replay.report["metrics"].items():
        print(f"  {name:<14} {value:.6g}")
    for name, text in replay.report["arrays"].items():
        print(f"  batch {name:<8} {text}")
    for name in replay.report["not_finite"]:
        print(f"  not finite: {name}")
    return 0


@explained_by(show)
def show_rehearsal(rehearsal: "Rehearsal", *, json: bool = False) -> int:
    """Prints what is where.

    Args:
        rehearsal: The rehearsal.
    """
    if json:
        print_json({"recipe": rehearsal.recipe, **rehearsal.record})
    else:
        print("\n".join(rehearsal_lines(rehearsal.record)))
    return 0


class RehearsalReporter(StderrReporter):
    """The reporter of a rehearsal: a line on stdout for each part, on stderr with ``--json``."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet, json=json)
        self._out = sys.stderr if json else sys.stdout

    def update(self, state: Any) -> None:
        """Prints the parts of a rehearsal."""
        from systolic.training.rehearsal import MANY_DEVICES, RehearsalStage, RehearsalStart

        if isinstance(state, RehearsalStart):
            if state.on.num_devices > MANY_DEVICES:
                print(
                    f"{state.on.num_devices} virtual devices: this may take minutes",
                    file=sys.stderr,
                )
            on = state.on
            print(
                f"rehearsing {state.name} for {on.name} on {on.num_devices} virtual devices",
                file=self._out,
                flush=True,
            )
        elif isinstance(state, RehearsalStage):
            text = f"  {state.name:<11} {state.detail}"
            if self._line is None:
                print(text, file=self._out, flush=True)
            else:
                self._line.told(text, self._out, NEXT.get(state.name, "working"))


def rehearsal_lines(record: Mapping[str, Any]) -> Sequence[str]:
    """Lines of what is where, and the verdict."""
    held = record["bytes_per_device"]
    text = [f"  kernels     {note}" for note in record["notes"]]
    text += ["", "on each device of the real job:"]
    text += [f"  {kind:<11} {si(size, 'B')}" for kind, size in held.items()]
    if record["devices"] > 1 and record["whole_share"] > MUCH:
        text.append(
            f"  {record['whole_share']:.0%} of these parameters are whole on every device: no mesh axis splits them"
        )
    parts = record["parameters"]
    shown = [*parts[:ROWS], *record["batch"]]
    cells = [
        (
            part["path"],
            "x".join(map(str, part["shape"])) or "scalar",
            part["spec"],
            si(part["bytes_per_device"], "B"),
        )
        for part in shown
    ]
    widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
    text.append("")
    for number, (path, shape, spec, size) in enumerate(cells):
        if number == min(ROWS, len(parts)) and len(parts) > ROWS:
            text.append(f"  … and {len(parts) - ROWS} smaller parameters; the batch:")
        text.append(
            f"  {path:<{widths[0]}}  {shape:<{widths[1]}}  {spec:<{widths[2]}}  {size:>{widths[3]}}"
        )
    text += [
        "",
        f"The job fits the mesh of {record['slice']} ({duration(record['seconds'])}). A rehearsal does not check {record['not_checked']}.",
    ]
    return text
