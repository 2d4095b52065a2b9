"""A calibration from profiles: the corrections with what they rest on."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from systolic import __version__
from systolic.chips import Chip, Slice, slice
from systolic.compiling.kernels import counted_elsewhere
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.units import plural
from systolic.explaining.alone import devices_named, devices_of
from systolic.explaining.correcting import MeasuredOps, fit, measured_ops
from systolic.explaining.profiles import run_of
from systolic.forecasting.calibrations import CalibrationRecord, ProfileSource, check_name
from systolic.forecasting.profiled import programs_of
from systolic.hlo import Module, Shape, parse
from systolic.profile import open_profile
from systolic.profile.table import ProfileTable
from systolic.profile.trace import Backend
from systolic.runs.devices import slice_with
from systolic.runs.run import ENVIRONMENT
from systolic.sim.calibration import Calibration
from systolic.sim.rates import rates_of

COMPILER = "libtpu"


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The profiles and programs that a calibration is to be made of."""

    profiles: Sequence[Path]
    """Files of profiles, or directories with some."""
    name: str
    against: Sequence[Path] = ()
    """Scheduled HLO of programs whose modules the profiles lack."""
    chip: str = ""
    """The devices' chip by its name in the catalogue, for files that do not name it."""
    on: str | Slice = ""
    """The slice that they were recorded on; by default as many of the chip's devices as the programs name."""


def record_of(asked: CalibrationRequest) -> CalibrationRecord:
    """Corrections of the simulator from profiles of one generation of TPUs; nothing is written.

    Raises:
        NotFoundError: there is no such profile or dump.
        DataError: a file is damaged, or no op of the profiles has a price to set its time against.
        OptionError: the chip is not known, is no TPU, or differs between the profiles; or a dump is of another program.
    """
    check_name(asked.name)
    if not asked.profiles:
        raise OptionError("there is no profile to calibrate by; give an xplane.pb or a folder")
    twice = [
        path for path, times in Counter(map(Path.resolve, asked.profiles)).items() if times > 1
    ]
    if twice:
        raise OptionError(f"{twice[0]} is given twice, and would count twice; give it once")
    on_given = asked.on or None
    if isinstance(on_given, str):
        on_given = slice(on_given)
    dumps = _dumps(asked.against)
    tables = _tables(asked.profiles, asked.chip or (on_given.chip.name if on_given else ""))
    for path, module in dumps.values():
        _check_dump(module, path, tables)
    chip = _chip_of(asked.profiles, tables)
    modules = {name: module for name, (_, module) in dumps.items()}
    sources, found = [], []
    for path, table in zip(asked.profiles, tables, strict=True):
        on = on_given or _slice(table, modules, chip)
        _check_devices(on, path, table)
        ops = measured_ops(table, on, {**programs_of(table), **modules})
        found.append(ops)
        sources.append(_source(path, table, ops))
    fitted = fit(found, rates_of(on).host)
    if not fitted.factors:
        raise DataError(_nothing(asked, found, fitted.left_out))
    calibration = Calibration(
        name=asked.name,
        chip=chip.name,
        factors=fitted.factors,
        made=date.today().isoformat(),
        num_profiles=len(sources),
    )
    return CalibrationRecord(
        calibration=calibration,
        sources=sources,
        compiler=_compiler(asked.profiles),
        systolic=__version__,
        left_out=[*fitted.left_out, *(note for ops in found for note in ops.notes)],
    )


def _dumps(paths: Sequence[Path]) -> Mapping[str, tuple[Path, Module]]:
    found: dict[str, tuple[Path, Module]] = {}
    for path in paths:
        if not path.is_file():
            raise NotFoundError(
                f"{path} is no file; give the scheduled HLO that --xla_dump_to wrote"
            )
        module = parse(counted_elsewhere(path.read_text(errors="replace")))
        found[module.name] = path, module
    return found


def _tables(paths: Sequence[Path], chip: str) -> list[ProfileTable]:
    """The ops of profiles; ``chip`` is for those that do not name theirs."""
    found, refused = [], []
    for path in paths:
        try:
            found.append(ProfileTable(open_profile(path, chip)))
        except OptionError as error:  # it names another
            refused.append(error)
            found.append(ProfileTable(open_profile(path)))
    for path, table in zip(paths, found, strict=True):
        if by := table.profile.trace.simulated_by:
            raise DataError(
                f"{path} is a schedule that {by} wrote, no measurement; give a profile of the chip"
            )
    if len(refused) == len(paths):
        raise refused[0]
    return found  # of two generations, where one was refused


def _check_dump(module: Module, path: Path, tables: Sequence[ProfileTable]) -> None:
    """Refuses a dump of a program that the profiles did not run, or of another build of it."""
    ran = list(dict.fromkeys(row.name for table in tables for row in table.programs))
    if module.name not in ran:
        raise OptionError(
            f"{path} is {module.name}, and the profiles ran {', '.join(ran[:4])}; give the dump of one of these"
        )
    held = {one.name: one.shape for of in module.computations.values() for one in of}
    measured = {
        row.op.raw.name: row.op.line.shape
        for table in tables
        for row in table.ops
        if row.program == module.name and row.op.line is not None
    }
    other = [name for name, shape in measured.items() if not _is_alike(held.get(name), shape)]
    if other:
        raise OptionError(
            f"{path} is another build of {module.name}: {plural(len(other), 'op')} of {len(measured)} in the profiles have no such result in it, "
            f"{other[0]} first; give the dump of the program that ran"
        )


def _is_alike(held: Shape | None, measured: Shape) -> bool:
    """Whether a dump's result has the arrays of a measured one."""
    if held is None:
        return False
    of, other = list(held.arrays()), list(measured.arrays())
    return [(one.dtype, one.dims) for one in of] == [(one.dtype, one.dims) for one in other]


def _chip_of(paths: Sequence[Path], tables: Sequence[ProfileTable]) -> Chip:
    """The one generation of all profiles."""
    chips: dict[str, tuple[Path, Chip]] = {}
    for path, table in zip(paths, tables, strict=True):
        chip, backend = table.profile.ceilings.chip, table.profile.trace.backend
        if backend is not Backend.tpu:
            raise OptionError(
                f"{path} is of a {backend.value.upper()}, and only TPUs are simulated; give a TPU's profile"
            )
        if chip is None:
            what = table.profile.trace.kind or "nothing"
            raise OptionError(
                f"{path} does not name its chip (it says {what}), and factors are of one generation; add --chip tpu7x"
            )
        chips.setdefault(chip.name, (path, chip))
    if len(chips) > 1:
        (one, first), (two, second) = list(chips.values())[:2]
        raise OptionError(
            f"{one} is of {first.name} and {two} of {second.name}; make a calibration of each"
        )
    return next(iter(chips.values()))[1]


def _slice(table: ProfileTable, dumps: Mapping[str, Module], chip: Chip) -> Slice:
    """The slice that a profile was recorded on, by the devices that its programs name."""
    modules = [*table.profile.trace.modules.values(), *dumps.values()]
    number = max([devices_of(table), *(module.num_partitions for module in modules)])
    try:
        return slice_with(number, chip.name, chip.device_kind or chip.name)
    except NotFoundError as error:
        raise NotFoundError(f"{error}; or name the slice: --on {chip.name}-8") from error


def _check_devices(on: Slice, path: Path, table: ProfileTable) -> None:
    """Refuses a slice of another size than the collectives of a profile are made for."""
    named = devices_named(table)
    if named not in (0, on.num_devices):
        raise OptionError(
            f"{on.name} has {plural(on.num_devices, 'device')}, and the collectives of {path} are of {named}; leave out --on"
        )


def _source(path: Path, table: ProfileTable, ops: MeasuredOps) -> ProfileSource:
    ways = []
    if ops.simulated:
        ways.append("simulated programs")
    if ops.alone:
        ways.append("their lines, matmuls by the FLOPs and bytes that the profile counts")
    return ProfileSource(
        file=str(path.absolute()),
        devices=len(table.profile.devices),
        programs={row.name: row.runs for row in table.programs},
        priced_by=" and ".join(ways),
        matched_seconds=ops.matched,
        total_seconds=ops.total,
        not_matched=ops.unmatched,
    )


def _compiler(paths: Sequence[Path]) -> str:
    """Version of libtpu by the runs that the profiles lie in; empty where they lie in none, since profiles do not say it."""
    found = []
    for path in paths:
        run = run_of(path)
        try:
            packages = json.loads((run / ENVIRONMENT).read_text())["packages"] if run else {}
        except (OSError, ValueError, KeyError):
            packages = {}
        if COMPILER in packages:
            found.append(f"{COMPILER} {packages[COMPILER]}")
    return ", ".join(dict.fromkeys(found))


def _nothing(
    asked: CalibrationRequest, found: Sequence[MeasuredOps], left_out: Sequence[str]
) -> str:
    which = ", ".join(map(str, asked.profiles))
    if left_out:
        return f"no kind of op of {which} gives a factor: {'; '.join(left_out)}"
    kinds = dict.fromkeys(kind for ops in found for kind in ops.unmatched)
    return f"no op of {which} is a microsecond long and has a price ({', '.join(kinds) or 'it has none'}); give the programs' scheduled HLO: --against DUMP.txt"
