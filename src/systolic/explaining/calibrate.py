"""``systolic calibrate`` and ``systolic calibrations``, :func:`systolic.calibrate` and :func:`systolic.calibrations`: corrections of the simulator from what chips measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from systolic.chips import SLICE, Slice
from systolic.core.arguments import OptionWords, Required, command_of
from systolic.core.errors import DataError
from systolic.core.reporter import reporter
from systolic.forecasting.calibrations import CalibrationRecord, load, names, path_of, save

USAGE = """usage: systolic calibrate PROFILE [PROFILE ...] --name NAME [options]

PROFILE is an XProf xplane.pb or trace.json.gz of a TPU, or a directory with such files: RUN/profile after systolic
train --profile N, or the output of jax.profiler.trace. Each op is compared with its price in the simulated program,
which an xplane.pb contains. Without it, --against names a dump of the program; without that, ops are priced from
their lines, except for kernels and for fusions without a matmul. The result is a few factors, measured over simulated
seconds of matmuls, kernels, elementwise fusions, data formatting and each kind of collective, and the bytes per
second of the host link.

Passes and formatting in vector memory have their own factors. No factor makes an op faster than the published
rates of the matrix units, device memory, links and host link.

Use it with systolic forecast, plan and explain --calibration NAME. systolic calibrations lists all."""

LIST_USAGE = """usage: systolic calibrations [NAME] [options]

Lists the calibrations of systolic calibrate: corrections of the simulator from measured profiles.

They are files in ~/.config/systolic/calibrations, or under $XDG_CONFIG_HOME; remove a file to delete one."""

NAME = Required("a name; add --name my-v5e, which --calibration my-v5e then takes")
PATHS = OptionWords(tuple[Path, ...])


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A calibration that was made."""

    record: CalibrationRecord
    file: Path
    replaced: bool
    """Whether an earlier one of the name was there."""


@command_of
def calibrate(
    profiles: Annotated[Path | str | Sequence[Path | str], PATHS],
    *,
    name: Annotated[str, NAME],
    against: Annotated[Sequence[Path | str], PATHS] = (),
    chip: str = "",
    on: Annotated[str | Slice, SLICE] = "",
) -> Calibrated:
    """Corrects the simulator with profiles of TPUs, and writes the corrections to the user's folder.

    Args:
        profiles: Profiles of one generation of TPUs; several are combined.
        name: Name of the calibration; an existing one is replaced.
        against: Scheduled HLO of the profiled program, if the profiles do not contain it; may be several files.
        chip: The devices' chip, such as tpu7x: a trace.json.gz does not name it.
        on: The slice that the profiles were recorded on; by default as many devices of the chip as the programs name.

    Raises:
        NotFoundError: there is no such profile or dump.
        DataError: a file is damaged, or no op of the profiles has a price to compare with its time.
        OptionError: the chip is not known, is no TPU, or differs between the profiles; or a dump is of another program.
        RunError: the calibration can't be written.
    """
    from systolic.explaining.calibrating import CalibrationRequest, record_of

    paths = [profiles] if isinstance(profiles, str | Path) else profiles
    record = record_of(
        CalibrationRequest(
            profiles=[Path(path) for path in paths],
            name=name,
            against=[Path(path) for path in against],
            chip=chip,
            on=on,
        )
    )
    replaced = path_of(name).is_file()
    return Calibrated(record=record, file=save(record), replaced=replaced)


@command_of
def calibrations(
    name: Annotated[Path | str | None, OptionWords(str | None)] = None,
) -> Sequence[CalibrationRecord] | CalibrationRecord:
    """Lists the calibrations that systolic calibrate made.

    Args:
        name: A calibration, or the path of its file: what it corrects, and how much each factor rests on.

    Returns:
        All calibrations, or the named one. A damaged file is left out of the list, with a warning.

    Raises:
        NotFoundError: no calibration has that name.
        DataError: its file is damaged.
    """
    if name is not None:
        return load(name)
    records = []
    for stem in names():
        try:
            records.append(load(stem))
        except DataError as error:
            reporter().warn(str(error))
    return records
