"""Devices that a run was trained on, as a slice of the catalogue."""

import contextlib
from collections.abc import Mapping
from typing import Any

from systolic.chips import Slice, by_device_kind, slice
from systolic.core.errors import NotFoundError, SystolicError
from systolic.runs.record import load_run
from systolic.runs.run import Run


def slice_of(run: Run) -> Slice:
    """The devices that a run was last trained on.

    Raises:
        NotFoundError: the catalogue has no such chip, or no slice of so many.
    """
    start = load_run(run.path).start
    if not start:
        raise NotFoundError(f"{run.path} has no session on record; train it first")
    number, kind = _devices(start)
    chip = by_device_kind(kind)
    name = "cpu" if kind == "cpu" else chip.name if chip else ""
    if not name:
        raise NotFoundError(
            f"the catalogue has no {kind}; forecast on another: systolic explain RECIPE --on v5e-16"
        )
    return slice_with(number, name, kind)


def slice_with(number: int, name: str, kind: str) -> Slice:
    """The slice of so many devices of a chip.

    Args:
        number: Devices.
        name: The chip's in the catalogue.
        kind: The chip's for people.

    Raises:
        NotFoundError: there is none of so many.
    """
    # Slices of some generations are named by cores, of which a chip has two.
    for text in (f"{number}x{name}", f"{name}-{number}", f"{name}-{2 * number}"):
        with contextlib.suppress(SystolicError):
            on = slice(text)
            if on.num_devices == number:
                return on
    raise NotFoundError(
        f"the catalogue has no slice of {number} x {kind}; systolic chips {name} lists those that it has"
    )


def _devices(start: Mapping[str, Any]) -> tuple[int, str]:
    """Number and kind of the devices of a session."""
    if "num_devices" in start:
        return start["num_devices"], start["device_kind"]
    count, _, kind = start["devices"].partition(" x ")  # of an earlier version
    return int(count), kind
