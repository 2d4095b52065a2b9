"""Forecasts of scheduled HLO text that another program dumped."""

import time
from pathlib import Path

from systolic.chips import Slice
from systolic.core.errors import DataError, OptionError
from systolic.core.origin import Origin
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.memory import memory_map
from systolic.forecasting.run import assemble
from systolic.hlo import parse
from systolic.sim import simulate


def forecast_text(path: Path, on: Slice) -> Forecast:
    """Scheduled HLO text that another program dumped.

    Raises:
        OptionError: the slice is no TPU.
        DataError: the file is no scheduled HLO, or is for another number of devices.
    """
    if on.platform != "tpu":
        raise OptionError(
            f"{on.name} is a {on.platform}: of dumps only TPU slices are forecast; give a recipe or a function instead"
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} could not be read as text ({error}); give a dump of scheduled HLO"
        ) from error
    begin = time.perf_counter()
    module = parse(text)
    if not module.is_scheduled:
        raise DataError(
            f"{path} is not scheduled; dump it after compiling: compiled.as_text(), or XLA's *after_optimizations.txt"
        )
    if module.num_partitions not in (1, on.num_devices, on.num_devices // on.num_slices):
        raise DataError(
            f"{path} runs on {module.num_partitions} devices but {on.name} has {on.num_devices}; choose a slice of that size"
        )
    timeline = simulate(module, on)
    return assemble(
        module=module,
        timeline=timeline,
        memory=memory_map(module, None),
        facts={
            "notes": [
                "devices are taken in JAX's default order",
                "peak memory is from the schedule, not from the compiler",
            ]
        },
        name=path.name,
        on=on,
        compiler={"seconds": round(time.perf_counter() - begin, 3), "cached": True},
        memory_origin=Origin.simulated,
    )
