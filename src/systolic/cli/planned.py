"""``systolic train RECIPE --plan plan.json``: the candidate of a plan as a request to train."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.artifact.chosen import Chosen, read
from systolic.chips import by_device_kind, slice
from systolic.cli.target import Request, request_for
from systolic.core.errors import OptionError, RunError
from systolic.job import Job
from systolic.recipes import Recipe

OPTION = "--plan"


def is_planned(args: Sequence[str]) -> bool:
    """Whether the words after a recipe name a plan; asking for help needs none."""
    named = any(word == OPTION or word.startswith(f"{OPTION}=") for word in args)
    return named and not {"-h", "--help"} & set(args)


def planned(target: str, args: Sequence[str], options: Any) -> Request:
    """The request of a recipe under a plan: its options where they are not given anew, its settings always.

    Raises:
        NotFoundError: there is no such plan.
        DataError: it is no plan, or nothing in it fits.
        OptionError: it is of another recipe, or an option contradicts what it decides.
    """
    recipe = recipes.find(target)
    chosen = _chosen(args)
    if not _same(recipe, chosen.recipe):
        raise OptionError(
            f"{chosen.path} is a plan for {chosen.recipe}, not for {target}; train that one or plan again"
        )
    saved = recipes.typed(recipe, chosen.options)
    asked = request_for(recipe, args, "train", options, saved)
    before, now = recipe(saved), asked.job
    for part in ("layout", "batch", "precision"):
        if getattr(before, part) != getattr(now, part):
            raise OptionError(
                f"the {part} is what {chosen.path} decides; leave its option out, or plan again with it"
            )
    steps = now.steps if _given(args, "--steps") or now.steps != before.steps else chosen.steps
    if not _same_program(before, now):
        print(
            f"systolic: the job is not the one that {chosen.path} forecast, so there is no forecast beside it",
            file=sys.stderr,
        )
        chosen = replace(chosen, forecast={})
    return replace(asked, chosen=replace(chosen, steps=steps))


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


def _chosen(args: Sequence[str]) -> Chosen:
    """The candidate that the words name; read before the options, because it holds their defaults."""
    number = _value(args, "--candidate")
    if number is not None and not number.isdigit():
        raise OptionError(f"candidate is {number!r}; give its rank in the plan, 1 is the best")
    path = _value(args, OPTION)
    if path is None:
        raise OptionError("--plan needs a file; systolic plan RECIPE --on SLICES writes plan.json")
    return read(Path(path), int(number or 1))


def _value(args: Sequence[str], option: str) -> str | None:
    for word, following in zip(args, [*args[1:], None], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _given(args: Sequence[str], option: str) -> bool:
    return _value([*args, ""], option) is not None


def _same(recipe: Recipe, target: str) -> bool:
    """Whether a plan's recipe is this one; a file may be named by another path."""
    if recipe.file is None or recipe.target == target:
        return recipe.target == target
    return _file(recipe.target) == _file(target)


def _file(target: str) -> tuple[Path, str]:
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "job")
    return Path(path).resolve(), name


def _same_program(before: Job, now: Job) -> bool:
    """Whether the train steps of two jobs compute the same; data may differ where its shapes don't."""
    parts = ("model", "task", "optimizer")
    same = all(getattr(before, part) == getattr(now, part) for part in parts)
    return same and before.data.fields() == now.data.fields()
