"""Compiler flags of a run: what ``--flags``, its plan and its own record say of them."""

from systolic.chips import slice
from systolic.chips.flags import NONE, resolved
from systolic.runs.job_record import JobRecord, RunFlags
from systolic.runs.plan_choice import Chosen


def new_flags(words: str, chosen: Chosen | None) -> RunFlags:
    """Flags of a new run on these devices.

    Args:
        words: What ``--flags`` says.
        chosen: A plan's candidate, whose flags take the place of the shared set.

    Raises:
        OptionError: a word of ``words`` is no flag.
    """
    from systolic.steps.machine import LocalDevices

    chip = LocalDevices.here().chip
    same = chosen is not None and (chip is None or slice(chosen.slice).chip.name == chip.name)
    base = chosen.flags if chosen is not None and same else None
    return RunFlags(
        given=words,
        chip=None if chip is None else chip.name,
        compiler=tuple(resolved(words, chip, base)),
    )


def kept_flags(record: JobRecord, chosen: Chosen | None, words: str | None = None) -> RunFlags:
    """Flags of a run that is used again: its own, unless others are given or these are other devices.

    Args:
        record: The run's; one of a version that kept no flags had the compiler's defaults.
        chosen: What still holds of its plan.
        words: What ``--flags`` says, None where it was left out.

    Raises:
        OptionError: a word of ``words`` is no flag.
    """
    before = record.flags
    if words is not None:
        return new_flags(words, chosen)
    now = new_flags(NONE if before is None else before.given, None if before is None else chosen)
    if before is None:
        compiler = () if chosen is None else tuple(chosen.flags)
        return RunFlags(given=NONE, chip=now.chip, compiler=compiler)
    return before if before.chip == now.chip else now
