"""Forecast of the train step, shown next to the measurement, and the devices that it is for."""

from typing import Any

from systolic.chips import Slice, by_device_kind, slice
from systolic.core.errors import OptionError, RunError
from systolic.runs.plan_choice import Chosen


def expected(chosen: Chosen | None) -> Any:
    """The forecast that is shown while the job trains; None without one, or on other devices than it is for."""
    from systolic.inference.setup import Expected

    if chosen is None or not chosen.forecast or problem(chosen):
        return None
    forecast = chosen.forecast
    assert forecast["step_seconds"] is not None
    return Expected(
        slice=chosen.slice,
        step_seconds=forecast["step_seconds"],
        low=forecast["step_seconds_low"],
        high=forecast["step_seconds_high"],
        mfu=forecast["mfu"],
    )


def check_machine(chosen: Chosen) -> None:
    """Checks that the local devices are those of the plan's slice.

    Raises:
        RunError: they are not; names both.
    """
    if text := problem(chosen):
        raise RunError(text)


def problem(chosen: Chosen) -> str:
    """Why the local devices are not those of the plan's slice; empty when they are."""
    on = slice(chosen.slice)
    both = _difference(on)
    return (
        both
        and f"{chosen.path} is a plan for {both}; train there, or rehearse {on.name} to try it here"
    )


def check_slice(on: Slice) -> None:
    """Checks that the local devices are those of a slice.

    Raises:
        RunError: they are not; names both.
    """
    if both := _difference(on):
        raise RunError(f"on is {both}; train there, or leave on out")


def _difference(on: Slice) -> str:
    """The slice and the local devices, where these are others; else empty."""
    from systolic.steps.machine import LocalDevices

    machine = LocalDevices.here()
    kind = machine.devices[0].device_kind
    known = by_device_kind(kind)
    here = "cpu" if machine.platform == "cpu" else known.name if known is not None else kind
    if here == on.chip.name and len(machine.devices) == on.num_devices:
        return ""
    return f"{on.name} ({on.num_devices} x {on.chip.device_kind or on.chip.name}) and this machine has {machine.name}"


def check_rehearsal(chosen: Chosen, name: str) -> None:
    """Checks that the slice of ``--rehearse`` is the plan's.

    Raises:
        OptionError: it is not; names both.
    """
    if slice(name) != slice(chosen.slice):
        raise OptionError(
            f"the plan's candidate is for {chosen.slice} and --rehearse asks for {name}; rehearse {chosen.slice}, or choose one of {name} with --candidate"
        )
