"""Forecasts of scheduled HLO text that another program dumped."""

import time
from dataclasses import replace
from pathlib import Path

from systolic.aot.kernels import counted_elsewhere
from systolic.chips import Slice
from systolic.core.errors import DataError, OptionError
from systolic.core.origin import Origin
from systolic.core.units import gibibytes
from systolic.forecasting.forecast import LARGEST, Forecast
from systolic.forecasting.memory import MemoryMap, memory_map
from systolic.forecasting.run import assemble, capacity
from systolic.hlo import Module, parse
from systolic.hlo.check import check, platform_of
from systolic.sim import simulate
from systolic.sim.rates import rates_of
from systolic.sim.work import work_of

CMEM = 3
"""Memory space of v4's common memory, which no other generation has."""
LARGE_FLOPS = 1e10
"""FLOPs of a matmul large enough to fill the matrix units, where memory does not bound it."""
BEYOND, SLOW = 1.05, 0.4
"""Best rate of the large matmuls by the dump's cycles, over the chip's: above the first it can't be this chip's
schedule; below the second it resembles a slower chip's."""


def forecast_text(path: Path, on: Slice) -> Forecast:
    """Scheduled HLO text that another program dumped.

    Raises:
        OptionError: the slice is no TPU.
        DataError: the file is no scheduled HLO of a TPU, is damaged, or is for another chip or number of devices.
    """
    begin = time.perf_counter()
    module, text = _read(path, on)
    chip = _chip_note(module, text, path, on)
    timeline = simulate(module, on)
    memory = memory_map(module, None)
    made = assemble(
        module=module,
        timeline=timeline,
        memory=memory,
        facts={
            "notes": [
                chip,
                "devices are taken in JAX's default order",
                "peak memory is from the schedule, not from the compiler",
            ]
        },
        name=path.name,
        on=on,
        compiler={"seconds": round(time.perf_counter() - begin, 3), "cached": True},
        memory_origin=Origin.simulated,
    )
    return made if memory.peak_bytes <= capacity(on) else _refused(made, memory, capacity(on))


def _read(path: Path, on: Slice) -> tuple[Module, str]:
    """The module of a file, and its text."""
    if on.platform != "tpu":
        raise OptionError(
            f"{on.name} is a {on.platform} slice; dumps are forecast for TPU slices only; give a recipe or a function instead"
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} could not be read as text ({error}); give a dump of scheduled HLO"
        ) from error
    text = counted_elsewhere(text)
    module = parse(text)
    if not module.is_scheduled:
        raise DataError(
            f"{path} is not scheduled; dump it after compiling: compiled.as_text(), or XLA's *after_optimizations.txt"
        )
    if (platform := platform_of(text)) != "tpu":
        raise DataError(
            f"{path} is a {platform.upper()}'s schedule (no array in it is tiled) and {on.name} is a TPU slice; compile the program for a TPU and dump that"
        )
    check(module)
    if module.num_partitions not in (1, on.num_devices, on.num_devices // on.num_slices):
        raise DataError(
            f"{path} runs on {module.num_partitions} devices but {on.name} has {on.num_devices}; choose a slice of that size"
        )
    return module, text


def _refused(made: Forecast, memory: MemoryMap, have: int) -> Forecast:
    """A forecast of what needs more memory than there is."""
    return replace(
        made,
        fits=False,
        timeline=None,
        step_seconds=None,
        low=None,
        high=None,
        rejected={
            "space": "hbm",
            "need_bytes": memory.peak_bytes,
            "have_bytes": have,
            "buffers": [
                {"bytes": b.bytes, "op": b.op, "shape": b.shape, "source": b.source, "kind": b.kind}
                for b in memory.buffers[:LARGEST]
            ],
            "remedies": [
                f"{gibibytes(memory.peak_bytes - have)} less: compile it for more devices or a smaller batch, and dump that"
            ],
        },
    )


def _chip_note(module: Module, text: str, path: Path, on: Slice) -> str:
    """Note on the chip that a schedule is for, which its text does not name.

    Raises:
        DataError: it can't be this one.
    """
    if f"S({CMEM})" in text and not on.chip.cmem_bytes:
        raise DataError(
            f"{path} keeps arrays in common memory, which v4 has and {on.chip.name} lacks; choose a v4 slice"
        )
    taken = f"the dump does not name its chip: taken as scheduled for {on.chip.name}"
    best = _best_rate(module, on)
    if best is None:
        return taken
    if best > BEYOND:
        raise DataError(
            f"{path} has matmuls at {best:.1f} times the peak of {on.chip.name} by the compiler's own cycles; it was scheduled for a faster chip, choose a slice of that"
        )
    if best < SLOW:
        return f"{taken}, but its largest matmuls reach {best:.0%} of the peak by the compiler's cycles: it looks like a slower chip's schedule"
    return taken


def _best_rate(module: Module, on: Slice) -> float | None:
    """Highest share of the peak among large matmuls that the compiler gave cycles; None without any."""
    rates = rates_of(on)
    best = None
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.opcode != "fusion" or (cycles := instruction.cycles) is None:
                continue
            work = work_of(module, computation, instruction)
            matrix = work.flops / rates.peak(work.dtype)
            if work.flops >= LARGE_FLOPS and matrix > work.bytes / rates.hbm:
                best = max(best or 0.0, matrix * rates.clock_hz / cycles)
    return best
