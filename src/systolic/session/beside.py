"""``systolic explain PROFILE --against DUMP.txt|program|lines``: the forecast of a program beside what a chip measured of it."""

from dataclasses import replace
from pathlib import Path

from systolic.chips import ChipKind, Slice
from systolic.core.errors import NotFoundError, OptionError
from systolic.core.units import plural
from systolic.explaining.alone import devices_of, priced_alone
from systolic.explaining.beside import Beside, Key, beside, by_name
from systolic.explaining.programs import programs_of
from systolic.forecasting.text import forecast_text
from systolic.hlo import parse
from systolic.profile.table import ProfileTable
from systolic.session.profiles import ProfileExplanation, slice_with
from systolic.sim.simulate import simulate

LINES = "lines"
"""In place of a dump: each op from its own line in the profile."""
PROGRAM = "program"
"""In place of a dump: the programs that the profile holds."""


def explain_beside(made: ProfileExplanation, against: str) -> Beside:
    """Ops of a profile beside the simulation of its program.

    Args:
        made: The profile, explained.
        against: Path of the program's scheduled HLO; ``program``, for those that the profile holds; or ``lines``: then each
            op is priced alone, from its line.

    Raises:
        NotFoundError: there is no such file, or the catalogue has no such slice.
        OptionError: the chip is not known, or no TPU; or the program is not in the profile.
        DataError: the file is no scheduled HLO, or damaged.
    """
    table = made.table
    if against == LINES:
        on = _slice(made, devices_of(table))
        seconds, left = priced_alone(table, on)
        if not seconds:
            # A file of XProf's trace viewer holds no program.
            own = (
                f"--against {PROGRAM}"
                if programs_of(table)
                else "the program's dump, --against DUMP.txt"
            )
            raise OptionError(
                f"no op of the profile is priced by its line alone: kernels, and fusions without a matmul, need their program; give {own}"
            )
        note = f"each op alone, from its line in the profile, on {on.name}: {plural(left, 'op')} that are kernels or fusions without a matmul, or were never waited for, are not priced"
        return replace(beside(table, seconds, whole=False), notes=[note])
    if against == PROGRAM:
        return _beside_own(made)
    check(against)
    path = Path(against)
    module = parse(path.read_text(errors="replace"))
    program = _program(table, module.name, against)
    on = _slice(made, max(module.num_partitions, 1))
    forecast = forecast_text(path, on)
    if forecast.timeline is None:
        raise OptionError(
            f"{against} has no simulated schedule on {on.name}: {forecast.rejected or 'it does not fit'}"
        )
    found = beside(table, by_name(forecast.timeline, program), forecast.timeline.seconds)
    return replace(found, notes=[f"simulated on {on.name}", *forecast.cautions])


def _beside_own(made: ProfileExplanation) -> Beside:
    """Ops beside the simulation of the programs that the profile holds."""
    table, programs = made.table, programs_of(made.table)
    if not programs:
        raise OptionError(
            f"the profile does not hold its programs; give the program's dump, --against DUMP.txt, or --against {LINES}"
        )
    on = _slice(made, max(devices_of(table), *(one.num_partitions for one in programs.values())))
    timelines = {name: simulate(module, on) for name, module in programs.items()}
    seconds: dict[Key, float] = {}
    for name, timeline in timelines.items():
        seconds |= by_name(timeline, name)
    main = next(row.name for row in table.programs if row.name in timelines)
    note = f"the programs that the profile holds, simulated on {on.name}: {', '.join(timelines)}"
    return replace(beside(table, seconds, timelines[main].seconds), notes=[note])


def check(against: str) -> None:
    """Refuses what can't be set beside a profile, before the profile is read.

    Raises:
        NotFoundError: there is no such file.
    """
    if against not in (LINES, PROGRAM) and not Path(against).is_file():
        raise NotFoundError(
            f"{against} is no file; give the scheduled HLO that --xla_dump_to wrote, --against {PROGRAM} or --against {LINES}"
        )


def _program(table: ProfileTable, name: str, path: str) -> str:
    """The program of the profile that a dump is of, by its name."""
    names = [row.name for row in table.programs]
    if name in names:
        return name
    raise OptionError(
        f"{path} is {name}, and the profile ran {', '.join(names[:4])}; give the dump of one of these"
    )


def _slice(made: ProfileExplanation, number: int) -> Slice:
    chip = made.profile.ceilings.chip
    if chip is None:
        raise OptionError(
            f"the simulator needs the chip, and the profile does not name it (it says {made.figures['device']}); add --chip tpu7x"
        )
    if chip.kind is not ChipKind.tpu:
        raise OptionError(
            f"only TPUs are simulated, and the profile is of {chip.name}; give a TPU's profile"
        )
    return slice_with(number, chip.name, chip.device_kind or chip.name)
