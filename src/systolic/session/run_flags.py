"""Compiler flags of a run: what ``--flags``, its plan and its own record say of them."""

from collections.abc import Mapping
from typing import Any

from systolic.artifact.chosen import Chosen
from systolic.chips import slice
from systolic.chips.flags import NONE, resolved


def settled(given: str, chosen: Chosen | None) -> dict[str, Any]:
    """The flags of a new run on these devices, as its job.json keeps them: ``given``, ``chip`` and ``compiler``.

    Args:
        given: What ``--flags`` says.
        chosen: A plan's candidate, whose flags take the place of the shared set.

    Raises:
        OptionError: a word of ``given`` is no flag.
    """
    from systolic.training.machine import LocalDevices

    chip = LocalDevices.here().chip
    same = chosen is not None and (chip is None or slice(chosen.slice).chip.name == chip.name)
    base = chosen.flags if chosen is not None and same else None
    return {
        "given": given,
        "chip": None if chip is None else chip.name,
        "compiler": list(resolved(given, chip, base)),
    }


def kept(record: Mapping[str, Any], chosen: Chosen | None, given: str | None) -> dict[str, Any]:
    """The flags of a run that is used again: its own, unless others are given or these are other devices.

    Args:
        record: The run's job.json; one of a version that kept no flags had the compiler's defaults.
        chosen: What still holds of its plan.
        given: What ``--flags`` says, None where it was left out.

    Raises:
        OptionError: a word of ``given`` is no flag.
    """
    before = record.get("flags")
    if given is not None:
        return settled(given, chosen)
    if before is None:
        return {**settled(NONE, None), "compiler": [] if chosen is None else list(chosen.flags)}
    now = settled(before["given"], chosen)
    return before if before["chip"] == now["chip"] else now


def compiled_with(record: Mapping[str, Any], chosen: Chosen | None) -> tuple[str, ...]:
    """The compiler flags that a run was last compiled with.

    Args:
        record: The run's job.json; one of a version that kept no flags had its plan's, or none.
        chosen: What holds of its plan.
    """
    before = record.get("flags")
    if before is not None:
        return tuple(before["compiler"])
    return () if chosen is None else tuple(chosen.flags)
