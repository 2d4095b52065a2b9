"""``systolic calibrations [NAME]``: the user's calibrations, or one with what it rests on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import DataError
from systolic.report.output import print_json, warn


@dataclass(frozen=True, kw_only=True)
class CalibrationsOptions:
    """The calibrations that systolic calibrate made: corrections of the simulator from measured profiles.

    They are files in ~/.config/systolic/calibrations, or under $XDG_CONFIG_HOME; remove one to forget it.

    Args:
        name: A calibration, or the path of its file: what it corrects, and how much each factor rests on.
        json: Print one JSON object.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(CalibrationsOptions, args, "systolic calibrations")
    from systolic.forecasting.calibrations import folder, load, names, path_of
    from systolic.forecasting.display.calibration import print_calibration, print_calibrations

    if options.name is not None:
        record = load(options.name)
        if options.json:
            print_json({**record.to_json(), "file": str(path_of(options.name))})
        else:
            print_calibration(record)
        return 0
    records = []
    for name in names():
        try:
            records.append(load(name))
        except DataError as error:
            warn(str(error))
    if options.json:
        print_json({"folder": str(folder()), "calibrations": [one.to_json() for one in records]})
    else:
        print_calibrations(records, folder())
    return 0
