"""What ``systolic train --profile N`` traced, beside the forecast of the same program on the devices that ran it."""

from dataclasses import replace
from pathlib import Path

from systolic.chips import Slice
from systolic.compiling.host_backend import measured_rates
from systolic.core.errors import NotFoundError
from systolic.explaining.beside import Beside, beside, by_name
from systolic.explaining.programs import programs_of
from systolic.forecasting.platforms import cpu_peaks
from systolic.hlo import Module
from systolic.profile import open_profile
from systolic.profile.table import ProfileTable
from systolic.runs.job_record import JobRecord
from systolic.runs.run import Run
from systolic.session.profiles import slice_of
from systolic.session.run_flags import compiled_with
from systolic.sim.roofline import ModuleSource, gpu_peaks, roofline
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Timeline


def traced_beside(run: Run, folder: Path) -> Beside:
    """The step of a run, measured in its profile and forecast on its devices, op by op.

    The program is the one that the profile holds, so that nothing is compiled again. A TPU's schedule is simulated; on a
    CPU and a GPU the forecast is a roofline, at rates of this CPU that are measured here.

    Args:
        run: The run.
        folder: Its profile.

    Raises:
        NotFoundError: there is no profile, it does not hold the program, or the catalogue has no such devices.
        DataError: it is damaged.
    """
    table = ProfileTable(open_profile(folder))
    programs = programs_of(table)
    main = next((row.name for row in table.programs if row.name in programs), None)
    if main is None:
        raise NotFoundError(
            f"{folder} does not hold the program of its steps; systolic explain {folder} shows what it measured"
        )
    on = slice_of(run)
    forecast, note = _forecast(programs[main], on, run)
    found = beside(table, by_name(forecast, main), forecast.seconds)
    return replace(found, notes=[note])


def _forecast(module: Module, on: Slice, run: Run) -> tuple[Timeline, str]:
    if on.platform == "tpu":
        flags = compiled_with(JobRecord.from_json(run.read_job()))
        return simulate(module, on, flags=flags), f"simulated on {on.name}"
    if on.platform == "gpu":
        peaks, note = gpu_peaks(on), f"forecast for {on.name}: a roofline, op after op"
    else:
        peaks = cpu_peaks(measured_rates(on.num_devices))
        note = "forecast for this CPU: a roofline, op after op, at rates measured after the training; its ops run on several threads, which a profile counts beside each other"
    return roofline(module, peaks, on.num_devices, ModuleSource.compiled), note
