"""The rates of one device of a slice, from the catalogue."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from systolic.chips import Chip, Slice, known, usual
from systolic.core.errors import NotFoundError

_NARROW = {"s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4"}
SUBLANES, LANES = usual("tpu")["vpu_shape"].value
"""Rows and columns of a vector register, and of the tiles that arrays lie in."""
REGISTER = SUBLANES * LANES
"""Elements of a vector register, 32 bits each."""
_STATE = re.compile(r"--xla_tpu_dvfs_p_state=(\d+)")
_SCOPED = re.compile(r"--xla_tpu_scoped_vmem_limit_kib=(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """One JAX device: a chip with megacore, else a TensorCore. Bytes/s one way, FLOP/s dense."""

    chip: Chip
    clock_hz: float
    peaks: dict[str, float] = field(default_factory=dict)
    """``bf16``, ``fp8``, ``int8``, ``int4``: operations per second, where the chip has them."""
    hbm: float
    link: float
    """One ICI link, one way."""
    axes: int
    """Torus axes of the interconnect."""
    hop_seconds: float
    collective_seconds: float
    """Fixed cost of a collective."""
    dcn: float
    """Per device, one way."""
    host: float
    """Per device, one way."""
    scoped: float = 0.0
    """Vector memory that the flags let one op's windows have, bytes; 0 where they don't say."""

    def peak(self, dtype: str) -> float:
        """Peak of a matmul with operands of that HLO dtype; f32 runs as bf16 passes."""
        return self.peaks.get(number_format(dtype), self.peaks["bf16"])


def number_format(dtype: str) -> str:
    """Format in which matrix units take operands of an HLO dtype: ``bf16``, ``fp8``, ``int8``, ``int4``."""
    return "fp8" if dtype.startswith("f8") else _NARROW.get(dtype, "bf16")


def peaks_of(chip: Chip) -> dict[str, float]:
    """Operations per second of a chip by number format: ``bf16``, ``fp8``, ``int8``, ``int4``, where it has them."""
    peaks = {
        "bf16": chip.peak_bf16_flops_per_second,
        "fp8": chip.peak_fp8_flops_per_second,
        "int8": chip.peak_int8_ops_per_second,
        "int4": chip.peak_int4_ops_per_second,
    }
    return {name: peak for name, peak in peaks.items() if peak is not None}


def matrix_width(chip: Chip | None) -> int:
    """Rows and columns of a chip's matrix units; the narrowest there are where they are not known."""
    shape = chip.mxu_shape if chip is not None else None
    return (shape or usual("tpu")["mxu_shape"].value)[0]


def f32_passes(rates: "Rates") -> float:
    """Times that a kernel's matmul of f32 operands takes of one of bf16 operands, at the default precision.

    f32 operands go to the matrix units in tiles of 8 x 128, half as many rows as bf16 ones have, and fill a corner of a
    wider array. On v6e (256 wide) that is 1/8 of the bf16 rate; 8.1 was measured there on a Pallas matmul
    (vlasenkoalexey/xprof-cli, tests/fixtures). Assumed for other generations.
    """
    return 2.0 * (matrix_width(rates.chip) / LANES) ** 2


def vector_rate(rates: Rates) -> float:
    """f32 operations per second of a device's vector units: lanes x ALUs x clock."""
    alus = known(rates.chip, "vpu_alus_per_lane")
    return REGISTER * alus * cores(rates) * rates.clock_hz


def cores(rates: Rates) -> int:
    """TensorCores of a device: two with megacore."""
    return max((rates.chip.num_cores or 1) // (rates.chip.devices_per_chip or 1), 1)


def cores_used(parallel: Sequence[int], rates: Rates) -> float:
    """TensorCores at work on a kernel whose grid has these dims that cores may share.

    One with none of them or of size one; with an odd one the cores wait for each other at its end.
    """
    largest = max([1, *parallel])
    return largest / -(-largest // cores(rates))


def asked_state(flags: Sequence[str]) -> int | None:
    """The power state that the compiler's flags ask for; None where they don't."""
    states = [int(match[1]) for flag in flags if (match := _STATE.fullmatch(flag))]
    return states[-1] if states else None


def scoped_bytes(flags: Sequence[str]) -> float:
    """Vector memory that the compiler's flags let one op's windows have; 0 where they don't say."""
    sizes = [int(match[1]) for flag in flags if (match := _SCOPED.fullmatch(flag))]
    return 1024.0 * sizes[-1] if sizes else 0.0


def clocks(chip: Chip, power_state: int | None = None) -> tuple[float | None, float | None]:
    """Clock of a chip at a power state, its default one for None, and at that of its published peaks; Hz.

    Raises:
        NotFoundError: the chip has power states, and the catalogue no clock of that one.
    """
    states = dict(chip.clock_hz_by_power_state)
    if not states:
        return chip.clock_hz, chip.clock_hz
    state = chip.default_power_state if power_state is None else power_state
    clock = chip.clock_hz if state is None else states.get(state)
    if clock is None:
        known = ", ".join(map(str, sorted(states)))
        raise NotFoundError(
            f"the catalogue has no clock of {chip.name} at power state {state}, only at {known}; choose one of these, or leave the flag out"
        )
    return clock, states.get(chip.peak_power_state or -1, clock)


def clock_note(chip: Chip, flags: Sequence[str]) -> list[str]:
    """Note on the clock that stands for a power state which the flags leave open; none of a chip without such states."""
    states, state, peak = (
        dict(chip.clock_hz_by_power_state),
        chip.default_power_state,
        chip.peak_power_state,
    )
    if state is None or peak is None or asked_state(flags) is not None:
        return []
    return [
        f"assumes {chip.name}'s default power state {state}, {states[state] / 1e9:g} GHz; published peaks, and many benchmarks, have state {peak}, {states[peak] / 1e9:g} GHz: --flags=--xla_tpu_dvfs_p_state={peak}, or flags=[...] in Python, forecasts that"
    ]


def rates_of(on: Slice, power_state: int | None = None, flags: Sequence[str] = ()) -> Rates:
    """The rates of one device of a TPU slice; ``flags`` are those that the program was compiled with.

    The power state is the one given, else that of the flags, else the chip's default: clock and peaks are of
    the same state.

    Raises:
        NotFoundError: the catalogue lacks a number that a simulation needs, or the power state's clock.
    """
    chip = on.chip
    devices = chip.devices_per_chip or 1
    clock, peak_clock = clocks(chip, power_state if power_state is not None else asked_state(flags))
    needed = {
        "clock_hz": clock,
        "peak_bf16_flops_per_second": chip.peak_bf16_flops_per_second,
        "hbm_bytes_per_second": chip.hbm_bytes_per_second,
        "ici_bytes_per_second_per_link": chip.ici_bytes_per_second_per_link,
    }
    for name, value in needed.items():
        if value is None:
            raise NotFoundError(
                f"the catalogue has no {name} of {chip.name}, which a simulation needs; choose another chip"
            )
    dcn = chip.measured_dcn_bytes_per_second_per_chip or (
        known(chip, "dcn_bytes_per_second_per_host") / known(chip, "chips_per_host")
    )
    return Rates(
        chip=chip,
        clock_hz=needed["clock_hz"] or 0.0,
        # The matrix units follow the clock; device memory and links do not.
        peaks={
            name: peak / devices * (clock / peak_clock if clock and peak_clock else 1.0)
            for name, peak in peaks_of(chip).items()
        },
        hbm=(chip.hbm_bytes_per_second or 0.0) / devices,
        link=(
            chip.measured_ici_bytes_per_second_per_link
            or needed["ici_bytes_per_second_per_link"]
            or 0.0
        ),
        axes=known(chip, "ici_axes"),
        hop_seconds=known(chip, "ici_hop_seconds"),
        collective_seconds=known(chip, "measured_all_gather_fixed_seconds"),
        dcn=dcn / devices,
        host=known(chip, "pcie_bytes_per_second_per_chip") / devices,
        scoped=scoped_bytes(flags),
    )
