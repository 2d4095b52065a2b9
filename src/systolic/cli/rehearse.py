"""``systolic train RECIPE --rehearse SLICE``: the job on as many virtual CPU devices as the slice has.

The number of virtual devices is settled when JAX starts, so the rehearsal is a process of its own:
this module, run with ``python -m`` and the request as one JSON argument.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from systolic import recipes
from systolic.chips import Slice, slice
from systolic.cli.main import guarded
from systolic.cli.output import bounded_workers, print_json
from systolic.cli.target import Request
from systolic.core.errors import OptionError
from systolic.core.machine import end_with
from systolic.core.units import duration, si
from systolic.report.progress import ProgressLine
from systolic.session.planned import plan_of, under_plan

MANY_DEVICES = 64
"""Above it a rehearsal takes minutes."""
MOST_DEVICES = 1024
MUCH = 0.1
"""Share of the parameters above which it is said that they are whole everywhere."""
ROWS = 8
"""Parameters shown."""
NEXT = {
    "layout": "tracing the model",
    "model": "shrinking the job",
    "shrunk": "compiling the shrunk steps",
    "steps": "saving a checkpoint",
    "checkpoint": "evaluating",
}
"""What a rehearsal does after it has said something."""


def rehearse(asked: Request) -> int:
    """Starts the child, whose output streams through; returns its exit code.

    Raises:
        NotFoundError: there is no such slice.
        OptionError: it has more devices than a rehearsal can have.
        LayoutError: an axis does not divide the slice, the model or the batch.
    """
    on = slice(asked.verb["rehearse"])
    if on.num_devices > MOST_DEVICES:
        raise OptionError(
            f"{on.name} has {on.num_devices} devices and a rehearsal runs up to {MOST_DEVICES} on this CPU; rehearse a smaller slice of that chip"
        )
    asked.job.settle(on)
    if on.num_devices > MANY_DEVICES:
        print(f"{on.num_devices} virtual devices: this may take minutes", file=sys.stderr)
    message = {
        "target": asked.recipe.target,
        "options": recipes.plain(asked.options),
        "slice": on.name,
        "plan": None if asked.chosen is None else asked.chosen.to_json(),
        "workers": bounded_workers(asked.verb["workers"]),
        "parent": os.getpid(),
        "json": asked.verb["json"],
    }
    command = [sys.executable, "-m", "systolic.cli.rehearse", json.dumps(message)]
    sys.stdout.flush()
    return subprocess.run(command, env=environment(on, os.environ), check=False).returncode


def environment(on: Slice, given: Mapping[str, str]) -> dict[str, str]:
    """The child's variables: the given ones, with as many CPU devices as the slice has.

    XLA's warnings about costly resharding are of the shrunk sizes, so they are off by default.
    """
    flags = [
        flag
        for flag in given.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    flags.append(f"--xla_force_host_platform_device_count={on.num_devices}")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    return {**quiet, **given, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def child(argument: str) -> int:
    """The rehearsal itself, in a process with the right number of devices."""
    message = json.loads(argument)
    end_with(message["parent"])
    recipe = recipes.find(message["target"])
    job = under_plan(recipe(recipes.typed(recipe, message["options"])), plan_of(message))
    on = slice(message["slice"])
    out = sys.stderr if message["json"] else sys.stdout
    from systolic.training.rehearse import rehearse as run

    print(f"rehearsing {job.name} for {on.name} on {on.num_devices} virtual devices", file=out)

    with ProgressLine(sys.stderr, "rehearsing") as progress:

        def say(name: str, detail: str) -> None:
            progress.told(f"  {name:<11} {detail}", out, NEXT.get(name, "at work"))

        record = run(job, on, say, message["workers"])
    if message["json"]:
        print_json({"recipe": message["target"], **record})
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


if __name__ == "__main__":
    sys.exit(guarded(lambda: child(sys.argv[1])))
