"""``systolic calibrate PROFILE… --name NAME``: corrections of the simulator from what chips measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from systolic.cli.parse import parse, print_verb_help
from systolic.core.arguments import Required
from systolic.report.output import print_json

FORMS = """usage: systolic calibrate PROFILE [PROFILE ...] --name NAME [options]

PROFILE is an XProf xplane.pb or trace.json.gz of a TPU, or a directory with some: RUN/profile after systolic train
--profile N, or what jax.profiler.trace wrote. Each op is set beside its price in the simulated program, which an
xplane.pb holds; without it a dump takes its place (--against), else ops are priced alone from their lines, which fusions
without a matmul and kernels can't be. What comes out are a few factors: measured over simulated seconds of matmuls,
kernels, elementwise fusions, data formatting and each kind of collective, and the bytes a second of the host link.

Passes and formatting in vector memory have factors of their own, and no factor makes an op faster than the published
rates of the matrix units, device memory, links and host link.

systolic forecast, plan and explain take them: --calibration NAME. systolic calibrations lists them."""

NAME = Required("a name; add --name my-v5e, which --calibration my-v5e then takes")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of a calibration.

    Args:
        profiles: Profiles of one generation of TPUs; several are taken together.
        name: The calibration's name; one that is there is replaced.
        against: Scheduled HLO of a program that the profiles ran, where they do not hold it; may be given with several files.
        chip: The devices' chip, such as tpu7x: a trace.json.gz does not name it.
        on: The slice that the profiles were recorded on; by default as many devices of the chip as the programs name.
        json: Print one JSON object on stdout.
    """

    profiles: Annotated[tuple[Path, ...], tyro.conf.Positional]
    name: Annotated[str, NAME]
    against: tuple[Path, ...] = ()
    chip: str = ""
    on: str = ""
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, CalibrateOptions)
    options = parse(CalibrateOptions, args, "systolic calibrate")
    from systolic.forecasting.calibrations import path_of, save
    from systolic.forecasting.display.calibration import print_calibration
    from systolic.session.calibrations import CalibrationRequest, calibrate

    record = calibrate(
        CalibrationRequest(
            profiles=options.profiles,
            name=options.name,
            against=options.against,
            chip=options.chip,
            on=options.on,
        )
    )
    replaced = path_of(options.name).is_file()
    path = save(record)
    if options.json:
        print_json({**record.to_json(), "file": str(path), "replaced": replaced})
        return 0
    print_calibration(record)
    print(f"\nwrote {path}{', in place of an earlier one' if replaced else ''}")
    print(f"use it: systolic forecast RECIPE --on SLICE --calibration {options.name}")
    return 0
