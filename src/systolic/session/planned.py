"""What a plan decided of a job: the job with it, what holds of it when the run resumes, and the devices that it is for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.artifact.chosen import Chosen
from systolic.chips import by_device_kind, slice
from systolic.core.errors import OptionError, RunError
from systolic.job import Job
from systolic.recipes import Recipe


def plan_of(record: Mapping[str, Any]) -> Chosen | None:
    """What a run's job.json says of its plan."""
    return Chosen.from_json(record["plan"]) if record.get("plan") else None


def under_plan(job: Job, chosen: Chosen | None) -> Job:
    """A job with the layout, batch, precision and steps of a plan, where there is one."""
    if chosen is None:
        return job
    job = chosen.applied(job)
    if not chosen.steps:
        return job
    schedule = job.schedule
    if schedule.warmup >= chosen.steps:
        # The recipe fitted it to its own steps.
        schedule = schedule.shortened(schedule, chosen.steps)
    return replace(job, steps=chosen.steps, schedule=schedule)


def resumed(chosen: Chosen | None, changed: set[str]) -> Chosen | None:
    """What still holds of a run's plan when it goes on with some options changed.

    Args:
        chosen: From the run's job.json.
        changed: The recipe's options that were given anew.
    """
    if chosen is None:
        return None
    dropped = {
        name
        for name in chosen.settings
        if name.partition(".")[0] in changed
        or (name == "batch" and any("batch" in option for option in changed))
    }
    kept = {name: value for name, value in chosen.settings.items() if name not in dropped}
    forecast = {} if dropped else chosen.forecast
    steps = 0 if "steps" in changed else chosen.steps
    return replace(chosen, settings=kept, forecast=forecast, steps=steps)


def expected(chosen: Chosen | None) -> Any:
    """The forecast to be shown while training; None without one, or on other devices than it is of."""
    from systolic.training.expected import Expected

    if chosen is None or not chosen.forecast or problem(chosen):
        return None
    told = chosen.forecast
    assert told["step_seconds"] is not None
    return Expected(
        slice=chosen.slice,
        step_seconds=told["step_seconds"],
        low=told["step_seconds_low"],
        high=told["step_seconds_high"],
        mfu=told["mfu"],
    )


def check_machine(chosen: Chosen) -> None:
    """Whether the devices at hand are those of the plan's slice.

    Raises:
        RunError: they are not; names both.
    """
    if text := problem(chosen):
        raise RunError(text)


def problem(chosen: Chosen) -> str:
    """Why the devices at hand are not those of the plan's slice; empty when they are."""
    from systolic.training.machine import LocalDevices

    on, machine = slice(chosen.slice), LocalDevices.here()
    kind = machine.devices[0].device_kind
    known = by_device_kind(kind)
    here = "cpu" if machine.platform == "cpu" else known.name if known is not None else kind
    if here == on.chip.name and len(machine.devices) == on.num_devices:
        return ""
    return f"{chosen.path} is a plan for {on.name} ({on.num_devices} x {on.chip.device_kind or on.chip.name}) and this machine has {machine.name}; train there, or add --rehearse {on.name} to try it here"


def check_rehearsal(chosen: Chosen, name: str) -> None:
    """Whether the slice of ``--rehearse`` is the plan's.

    Raises:
        OptionError: it is not; names both.
    """
    if slice(name) != slice(chosen.slice):
        raise OptionError(
            f"the plan's candidate is for {chosen.slice} and --rehearse asks for {name}; rehearse {chosen.slice}, or choose one of {name} with --candidate"
        )


def is_of(recipe: Recipe, target: str) -> bool:
    """Whether a plan's recipe is this one; a file may be named by another path."""
    if recipe.file is None or recipe.target == target:
        return recipe.target == target
    return _file(recipe.target) == _file(target)


def _file(target: str) -> tuple[Path, str]:
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "job")
    return Path(path).resolve(), name


def same_step(before: Job, now: Job) -> bool:
    """Whether the train steps of two jobs compute the same; data may differ where its shapes don't."""
    parts = ("model", "task", "optimizer")
    same = all(getattr(before, part) == getattr(now, part) for part in parts)
    return same and before.data.fields() == now.data.fields()
