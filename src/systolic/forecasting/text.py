"""Forecasts of scheduled HLO text that another program dumped, and the generation that it was scheduled for.

``compiled.as_text()`` names no chip, but its matmuls have the compiler's cycles: as many as the chip's matrix units
take. XLA's own dump leaves cycles out and writes the topology into files beside the module.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from systolic.chips import Slice, by_device_kind, chips
from systolic.chips import slice as named_slice
from systolic.chips.slices import named_slices
from systolic.compiling.dump import FOR_GPU, REFUSED, USAGE, used_bytes
from systolic.compiling.kernels import counted_elsewhere
from systolic.compiling.traced import ProgramFacts
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.units import Origin, gibibytes, plural
from systolic.forecasting.cost import ForecastCompile
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.memory import MemoryMap, MemoryShortage, memory_map
from systolic.forecasting.op_changes import OpChange, changes_of
from systolic.forecasting.run import assemble, capacity
from systolic.hlo import Module, crosses, crossing_of, parse
from systolic.hlo.parse import check, platform_of
from systolic.hlo.shape import HBM
from systolic.sim.gpu_ops import add_workspaces
from systolic.sim.incomplete import NOTHING, Given
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from systolic.sim.work import work_of

FROM_SCHEDULE = "peak memory is from the schedule, not from the compiler"
CMEM = 3
"""Memory space of v4's common memory, which no other generation has."""
LARGE_FLOPS = 1e10
"""FLOPs of a matmul large enough to fill the matrix units, where memory does not bound it."""
BEYOND, FITTING, SLOW = 1.05, 0.6, 0.55
"""Best rate of the large matmuls by the dump's cycles, over a chip's: above the first it can't be that chip's schedule,
from the second on it may be, below the third it is not where it fits another chip. Recorded schedules reach 0.64 to 0.98."""
VERSIONS = {
    "JELLYFISH": "v2",
    "DRAGONFISH": "v3",
    "PUFFERFISH": "v4",
    "VIPERFISH": "v5p",
    "VIPERFISH lite": "v5e",
    "GHOSTLITE": "v6e",
}
"""Generations by ``version`` and ``variant`` in the ``target_arguments.txt`` that libtpu 0.0.42.1 dumps beside a module."""
_STAGE = re.compile(r"\.[\w-]*after_(?:optimizations|codegen)[\w-]*\.txt$")
_KIND = re.compile(r'platform_version: "TFRT (TPU[^"\\]*)')
_VERSION = re.compile(r"version: TPU_VERSION_(\w+)")
_GPU_KIND = re.compile(r'device_description_str: "([^"]*)"')
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_HEAD = 2**20
"""Characters of a dump in which its module's own attributes are."""
_VARIANT = re.compile(r'variant: "(\w+)"')


def forecast_text(path: Path, on: Slice, given: Given = NOTHING) -> Forecast:
    """Scheduled HLO text that another program dumped.

    Args:
        path: Of the text. Where XLA dumped it, the files beside it name the generation.
        on: The slice that it was compiled for.
        given: Trips and costs that the program leaves open.

    Raises:
        OptionError: the slice is a CPU, or ``given`` has a name that the program has not.
        DataError: the file is no scheduled HLO of the slice's kind, is damaged, or is for another chip or number of devices.
    """
    return forecast_module(path, on, given)[0]


def compare_texts(
    path: Path, against: Path, on: Slice, given: Given = NOTHING
) -> tuple[Forecast, Forecast, Sequence[OpChange]]:
    """Two dumps of one program: the forecasts of ``path`` and of ``against``, and the ops that changed between them.

    Args:
        path: Of the text after a change of the compiler, of a flag or of the program.
        against: Of the text before.
        on: The slice that both were compiled for.
        given: Trips and costs that the programs leave open.

    Raises:
        As :func:`forecast_text`.
    """
    before, after = (forecast_text(each, on, given) for each in (against, path))
    if not before.ops or not after.ops:
        return after, before, ()
    return after, before, changes_of(before.ops, after.ops)


def forecast_module(path: Path, on: Slice, given: Given = NOTHING) -> tuple[Forecast, Module]:
    """The forecast of scheduled HLO text, and the module that was simulated; raises as :func:`forecast_text`."""
    begin = time.perf_counter()
    module, text = _read(path, on)
    if on.platform == "tpu":
        _check_memory(text, path, on)
    joined = _slices(module, on)
    _check_slices(module, joined, path, on)
    target = _target(module, path, on)
    timeline = simulate(module, on, given=given)
    peak_bytes = _reported(path)
    if on.platform == "gpu" and not peak_bytes:
        add_workspaces(module)
    memory = memory_map(module, peak_bytes)
    forecast = assemble(
        module=module,
        timeline=timeline,
        memory=memory,
        facts=ProgramFacts(
            notes=[
                *target.notes,
                "devices are taken in JAX's default order",
                *(() if peak_bytes else (FROM_SCHEDULE,)),
            ]
        ),
        name=path.name,
        on=on,
        compiler=ForecastCompile(seconds=round(time.perf_counter() - begin, 3), cached=True),
        memory_origin=Origin.compiled if peak_bytes else Origin.simulated,
    )
    forecast = replace(
        forecast, compiled_for=target.generation, schedules=[(module, timeline, 1.0)]
    )
    if module.num_partitions == 1 < on.num_devices and not joined:
        forecast = _of_one_device(forecast, on)
    elif joined < on.num_slices and module.num_partitions < on.num_devices:
        forecast = _of_fewer_slices(forecast, on, joined)
    if target.doubt:
        step = f"choose a slice of {target.names}, or compile it for {on.chip.name} and dump that"
        forecast = replace(
            forecast,
            origin=Origin.assumed,
            timeline=replace(timeline, origin=Origin.assumed),
            doubt=f"scheduled for {target.names}, not {on.chip.name}: the time is assumed",
            cautions=(f"{target.doubt}: {step}", *forecast.cautions),
        )
    have = capacity(on)
    if memory.peak_bytes <= have:
        return forecast, module
    if peak_bytes or path.name.endswith(REFUSED) or _least(module) > have:
        return refused(forecast, memory, have), module
    caution = f"the schedule's arrays are {gibibytes(memory.peak_bytes)} at their peak, {gibibytes(memory.peak_bytes - have)} more than {on.chip.name} has, by their lifetimes alone; the compiler, whose {USAGE} is not beside the dump, shares memory better and may have fitted them"
    return replace(forecast, cautions=(*forecast.cautions, caution)), module


def _of_one_device(forecast: Forecast, on: Slice) -> Forecast:
    """The forecast of a program for one of a slice's devices: FLOPs are the mean over all, and the bill is for all."""
    share = 1 / on.num_devices
    caution = f"{forecast.recipe} runs on one of the {on.num_devices} devices of {on.name}, and MFU, HFU and the bill are of all: compile it over a mesh of all, or choose a slice of one device"
    return replace(
        forecast,
        hardware_flops=share * forecast.hardware_flops,
        flops_by_format={name: share * n for name, n in forecast.flops_by_format.items()},
        cautions=(caution, *forecast.cautions),
    )


def _slices(module: Module, on: Slice) -> int:
    """Slices that the program's transfers join, all of them where one is not understood; 0 without transfers between slices."""
    crossings = [
        crossing_of(instruction)
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode in ("send", "recv") and crosses(instruction)
    ]
    if None in crossings:
        return max(on.num_slices, 2)
    return len({number for each in crossings if each for number in each.slices})


def _check_slices(module: Module, joined: int, path: Path, on: Slice) -> None:
    each = module.num_partitions
    if joined > on.num_slices or (joined and each != on.devices_per_slice):
        raise DataError(
            f"{path} runs on {joined} slices of {plural(each, 'device')} but {on.name} has {on.num_slices} of {on.devices_per_slice}; choose {joined} slices of that size"
        )


def _of_fewer_slices(forecast: Forecast, on: Slice, joined: int) -> Forecast:
    """The forecast of a program that has no traffic with some slices, which the bill counts."""
    single = on.name.partition("x")[2]
    caution = (
        f"{forecast.recipe} runs on {joined} of the {on.num_slices} slices of {on.name}, and the bill is for all: choose {joined}x{single}, or compile it for {on.name}"
        if joined
        else f"{forecast.recipe} has no traffic between the {on.num_slices} slices of {on.name}, and the bill is for all: each does the same work, as copies whose gradients are never summed; choose {single}, or compile it for {on.name}"
    )
    return replace(forecast, cautions=(caution, *forecast.cautions))


def _reported(path: Path) -> int | None:
    """Device memory by the compiler's report beside a dump; None without one."""
    ending = f"gpu_{USAGE}" if path.name.endswith(FOR_GPU) else f".{USAGE}"
    stem = path.name.removesuffix(FOR_GPU) if ending[0] != "." else _STAGE.sub("", path.name)
    return used_bytes(_text_of(path.with_name(f"{stem}{ending}")))


def _least(module: Module) -> int:
    """Bytes that any compiler needs: the program's inputs."""
    return sum(parameter.shape.bytes_in(HBM) for parameter in module.entry.parameters)


def _read(path: Path, on: Slice) -> tuple[Module, str]:
    """The module of a file, and its text."""
    if on.platform == "cpu":
        raise OptionError(
            f"{on.name} is a CPU, whose schedules are not simulated; give the TPU or GPU slice that the dump is for, or a recipe or a function instead"
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
    if (platform := platform_of(text)) != on.platform:
        why = "" if platform == "tpu" else " (no array in it is tiled)"
        raise DataError(
            f"{path} is a {platform.upper()}'s schedule{why} and {on.name} is a {on.platform.upper()} slice; compile the program for a {on.platform.upper()} and dump that"
        )
    check(module)
    if module.num_partitions not in (1, on.num_devices, on.num_devices // on.num_slices):
        raise DataError(
            f"{path} runs on {module.num_partitions} devices but {on.name} has {on.num_devices}; choose a slice of that size"
        )
    return module, text


def refused(forecast: Forecast, memory: MemoryMap, have: int, remedy: str = "") -> Forecast:
    """A forecast of what needs more memory than there is; ``remedy`` is the next step, by default of a dump."""
    remedy = remedy or "compile it for more devices or a smaller batch, and dump that"
    return replace(
        forecast,
        fits=False,
        timeline=None,
        step_seconds=None,
        low=None,
        high=None,
        rejected=MemoryShortage.of(memory, have, remedy),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _DumpTarget:
    """The generation that a dump was scheduled for."""

    generations: tuple[str, ...] = ()
    """The one, or all that fit."""
    doubt: str = ""
    """Evidence that it is another than the slice's; empty without any."""
    notes: tuple[str, ...] = ()

    @property
    def generation(self) -> str | None:
        """None where several fit, or none is known."""
        return self.generations[0] if len(self.generations) == 1 else None

    @property
    def names(self) -> str:
        """``v5e``, ``v4 or v5e``."""
        return " or ".join(self.generations)


def _check_memory(text: str, path: Path, on: Slice) -> None:
    if f"S({CMEM})" in text and not on.chip.cmem_bytes:
        raise DataError(
            f"{path} keeps arrays in common memory, which v4 has and {on.chip.name} lacks; choose a v4 slice"
        )


def _target(module: Module, path: Path, on: Slice) -> _DumpTarget:
    """The generation by the files beside a dump, else by its cycles.

    Raises:
        DataError: by its cycles it is for a faster chip.
    """
    here = on.chip.name
    beside = _gpu_beside(path) if on.platform == "gpu" else _beside(path)
    if (generation_file := beside) is not None:
        file, name = generation_file
        scheduled = f"scheduled for {name}, as {file} beside it says"
        if name == here:
            return _DumpTarget(generations=(name,), notes=(f"the dump was {scheduled}",))
        return _DumpTarget(
            generations=(name,),
            doubt=f"the dump was {scheduled}, and is priced as if {here} ran it",
        )
    taken = f"the dump does not name its chip: taken as scheduled for {here}"
    if on.platform == "gpu":
        return _DumpTarget(notes=(taken,))
    shares = _shares(module)
    best = shares.get(here)
    if best is None:
        return _DumpTarget(notes=(taken,))
    fitting = [name for name, share in shares.items() if FITTING <= share <= BEYOND]
    if best > BEYOND:
        named = f" such as {' or '.join(fitting)}" if fitting else ""
        raise DataError(
            f"{path} has matmuls at {best:.1f} times the peak of {here} by the compiler's own cycles; it was scheduled for a faster chip{named}, choose a slice of that"
        )
    if best < SLOW and fitting:
        reached = " or ".join(f"{shares[name]:.0%} of {name}'s peak" for name in sorted(fitting))
        doubt = f"the dump was scheduled for {' or '.join(sorted(fitting))} by the compiler's own cycles (its largest matmuls reach {reached}, {best:.0%} of {here}'s), and is priced as if {here} ran it"
        return _DumpTarget(generations=tuple(sorted(fitting)), doubt=doubt)
    if here in fitting:
        fits = f"the dump does not name its chip; its cycles fit {' and '.join(sorted(fitting))}"
        return _DumpTarget(generations=tuple(sorted(fitting)), notes=(fits,))
    return _DumpTarget(notes=(taken,))


def _beside(path: Path) -> tuple[str, str] | None:
    """A file that XLA dumped beside a module and the generation that it names; None without one."""
    stem = _STAGE.sub("", path.name)
    topology = path.parent / stem / "topology.textproto"
    if kind := _KIND.search(_text_of(topology)):
        chip = by_device_kind(kind[1].strip())
        if chip is not None:
            return f"{stem}/{topology.name}", chip.name
    arguments = path.parent / f"{stem}.target_arguments.txt"
    text = _text_of(arguments)
    if version := _VERSION.search(text):
        variant = _VARIANT.search(text)
        name = VERSIONS.get(f"{version[1]} {variant[1]}" if variant else version[1])
        return None if name is None else (arguments.name, name)
    return None


def _gpu_beside(path: Path) -> tuple[str, str] | None:
    """The description of its GPU that XLA dumped beside a module, and the chip that it names; None without one."""
    stem = re.sub(r"\.sm_[^/]*$", "", path.name)
    described = path.with_name(f"{stem}.gpu_target_config.pbtxt")
    kind = _GPU_KIND.search(_text_of(described))
    chip = by_device_kind(kind[1]) if kind else None
    return None if chip is None else (described.name, chip.name)


def gpus_of(path: Path) -> Slice:
    """The GPUs that a dump runs on, by the description of its GPU that XLA writes beside it.

    Raises:
        OptionError: nothing beside the dump names a GPU.
    """
    beside, count = _gpu_beside(path), _PARTITIONS.search(_text_of(path)[:_HEAD])
    if beside is None:
        raise OptionError(
            f"{path} does not name its chip; add --on v5e-16, systolic chips lists slices"
        )
    return named_slice(f"{count[1] if count else 1}x{beside[1]}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def _shares(module: Module) -> Mapping[str, float]:
    """Best share of each TPU generation's peak, the highest up to :data:`BEYOND` first; empty without large matmuls."""
    shares = {}
    for known in chips():
        if known.slice_rule is not None and (named := named_slices(known)):
            share = _best_rate(module, named[0])
            if share is not None:
                shares[known.name] = share
    return dict(sorted(shares.items(), key=lambda item: (item[1] > BEYOND, -item[1])))


def _best_rate(module: Module, on: Slice) -> float | None:
    """Highest share of the peak among large matmuls that the compiler gave cycles; None without any."""
    try:
        rates = rates_of(on)
    except NotFoundError:  # the catalogue lacks a rate of this generation
        return None
    best = None
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.opcode != "fusion" or (cycles := instruction.cycles) is None:
                continue
            work = work_of(module, computation, instruction)
            matrix = work.passes * work.flops / rates.peak(work.dtype)
            if work.flops >= LARGE_FLOPS and matrix > work.bytes / rates.hbm:
                best = max(best or 0.0, matrix * rates.clock_hz / cycles)
    return best
