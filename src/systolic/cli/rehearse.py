"""``systolic train RECIPE --rehearse SLICE``: the job on as many virtual CPU devices as the slice has."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from systolic.core.errors import OptionError
from systolic.core.machine import bounded_workers
from systolic.core.units import duration, si
from systolic.recipes.jobs.source import JobSource
from systolic.report.output import print_json
from systolic.report.progress import ProgressLine
from systolic.session import rehearsal

if TYPE_CHECKING:
    from systolic.cli.train import TrainOptions

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
"""What follows a stage of a rehearsal."""


def rehearse(source: JobSource, options: "TrainOptions") -> int:
    """Rehearses a recipe's job and prints what is where; returns the exit code.

    Raises:
        OptionError: ``--executable``, which is for the local devices.
    """
    if options.executable is not None:
        raise OptionError(
            "--executable is for the local devices and --rehearse makes virtual ones; leave one of them out"
        )
    on = rehearsal.checked(source, options.rehearse or "")
    out = sys.stderr if options.json else sys.stdout
    if on.num_devices > rehearsal.MANY_DEVICES:
        print(f"{on.num_devices} virtual devices: this may take minutes", file=sys.stderr)
    workers = bounded_workers(options.workers)
    print(
        f"rehearsing {source.job.name} for {on.name} on {on.num_devices} virtual devices",
        file=out,
        flush=True,
    )
    with ProgressLine(sys.stderr, "rehearsing") as progress:
        record = rehearsal.rehearse(
            source,
            on,
            workers,
            lambda name, detail: progress.told(
                f"  {name:<11} {detail}", out, NEXT.get(name, "working")
            ),
        )
    if options.json:
        print_json({"recipe": source.recipe.target, **record})
    else:
        print("\n".join(lines(record)))
    return 0


def lines(record: Mapping[str, Any]) -> Sequence[str]:
    """What is where, and the verdict."""
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
