"""A rehearsal: a job on as many virtual CPU devices as a slice has.

The number of virtual devices is settled when JAX starts, so that the rehearsal is a process of its own:
this module, run with ``python -m`` and the request as one JSON argument. It reports through a pipe,
one JSON object a line: ``stage`` and ``detail``, at the end ``record`` or ``error``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from systolic import recipes
from systolic.chips import Slice, slice
from systolic.core.errors import OptionError, RunError, SystolicError
from systolic.core.machine import end_with
from systolic.core.reporter import reporter, working
from systolic.recipes.jobs import JobSource, under_plan
from systolic.runs.plan_choice import Chosen
from systolic.training.session import check_data, check_rehearsal

MANY_DEVICES = 64
"""Above it a rehearsal takes minutes."""
MOST_DEVICES = 1024


class RehearsalError(SystolicError):
    """A rehearsal that found a mistake; its message is the mistake's own."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def checked(source: JobSource, wanted: Slice | str) -> Slice:
    """The slice that a job is rehearsed for.

    Raises:
        NotFoundError: there is no such slice.
        OptionError: it has more devices than a rehearsal can have, or is not the plan's.
        LayoutError: an axis does not divide the slice, the model or the batch.
    """
    on = slice(wanted) if isinstance(wanted, str) else wanted
    if source.chosen is not None:
        check_rehearsal(source.chosen, on.name)

    if on.num_devices > MOST_DEVICES:
        raise OptionError(
            f"{on.name} has {on.num_devices} devices and a rehearsal runs up to {MOST_DEVICES} on this CPU; rehearse a smaller slice of that chip"
        )
    job = source.job
    check_data(job)
    job.for_slice(on)
    return on


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Result of a rehearsal."""

    recipe: str
    record: Mapping[str, Any]
    """Result of :func:`systolic.training.rehearse.rehearse`."""


class RehearsalStart(NamedTuple):
    """A rehearsal begins; given to the reporter."""

    name: str
    on: Slice


class RehearsalStage(NamedTuple):
    """A part of a rehearsal is over; given to the reporter."""

    name: str
    """``layout``, ``model``, ``shrunk``, ``steps`` …"""
    detail: str


def rehearse(source: JobSource, on: Slice, workers: int) -> Rehearsal:
    """Runs a job's steps on a slice's mesh of virtual devices, in a process of its own.

    Args:
        source: What the job is made from: a recipe.
        on: The slice; :func:`checked` finds it.
        workers: Processes that read data.

    Raises:
        RehearsalError: the job does not fit, or a step failed.
        RunError: the process ended without a result.
    """
    read, write = os.pipe()
    request = {
        "recipe": source.recipe.target,
        "options": recipes.plain(source.options),
        "plan": None if source.chosen is None else source.chosen.to_json(),
        "slice": on.name,
        "workers": workers,
        "parent": os.getpid(),
        "pipe": write,
    }
    reporter().update(RehearsalStart(source.job.name, on))
    command = [sys.executable, "-m", __name__, json.dumps(request)]
    sys.stdout.flush()
    child = subprocess.Popen(command, env=environment(on, os.environ), pass_fds=(write,))
    os.close(write)
    with os.fdopen(read) as lines, child, working("rehearsing"):
        for line in lines:
            message = json.loads(line)
            if "stage" in message:
                reporter().update(RehearsalStage(message["stage"], message["detail"]))
            elif "error" in message:
                raise RehearsalError(message["error"], message["exit_code"])
            else:
                return Rehearsal(recipe=source.recipe.target, record=message["record"])
    raise RunError(
        f"the rehearsal ended with code {child.returncode} and no result; see what it printed above"
    )


def environment(on: Slice, inherited: Mapping[str, str]) -> dict[str, str]:
    """The child's variables: the inherited ones, with as many CPU devices as the slice has.

    XLA's warnings about costly resharding are of the shrunk sizes, so they are off by default.
    """
    flags = [
        flag
        for flag in inherited.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    flags.append(f"--xla_force_host_platform_device_count={on.num_devices}")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    return {**quiet, **inherited, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def _child(request: Mapping[str, Any]) -> None:
    """The rehearsal itself, in a process with the right number of devices."""
    end_with(request["parent"])

    def send(**message: Any) -> None:
        os.write(request["pipe"], f"{json.dumps(message)}\n".encode())

    try:
        recipe = recipes.find(request["recipe"])
        chosen = None if request["plan"] is None else Chosen.from_json(request["plan"])
        job = under_plan(recipe(recipes.typed(recipe, request["options"])), chosen)
        from systolic.training.rehearse import rehearse as run

        record = run(
            job,
            slice(request["slice"]),
            lambda stage, detail: send(stage=stage, detail=detail),
            request["workers"],
        )
    except SystolicError as error:
        send(error=str(error), exit_code=error.exit_code)
        return
    send(record=record)


if __name__ == "__main__":
    try:
        _child(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
