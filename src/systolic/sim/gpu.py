"""Prices of a GPU's kernels and collectives, in seconds."""

from systolic.chips import Chip, Slice
from systolic.chips.slices import slice as slice_named
from systolic.hlo import Groups
from systolic.sim.network import switched
from systolic.sim.roofline import LAUNCH_SECONDS, _share, gpu_peaks


def matmul_seconds(
    chip: Chip, batch: int, m: int, n: int, k: int, lhs: str, rhs: str, out: str
) -> float:
    """Seconds of a matmul of m x k by k x n, ``batch`` times, for operands and a result of these HLO dtypes."""
    peaks = gpu_peaks(slice_named(chip.name))
    size = {"f32": 4, "bf16": 2, "f16": 2}
    moved = batch * (m * k * size.get(lhs, 1) + k * n * size.get(rhs, 1) + m * n * size.get(out, 2))
    return max(2.0 * batch * m * n * k / peaks.of(lhs), moved / peaks.memory)


def attention_seconds(  # noqa: PLR0913
    chip: Chip,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
    window: int,
    backward: bool,
    dtype: str,
) -> float:
    """Seconds of cuDNN's attention."""
    flops = 4.0 * batch * heads * q_len * kv_len * head_dim
    flops *= (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return flops / (gpu_peaks(slice_named(chip.name)).attention * _share(head_dim))


def elementwise_seconds(
    chip: Chip, read_bytes: float, written_bytes: float, flops: float, transcendental: float
) -> float:
    """Seconds of a pass over memory."""
    return (read_bytes + written_bytes) / gpu_peaks(slice_named(chip.name)).memory


def collective_seconds(on: Slice, kind: str, bytes: float, groups: Groups) -> float:
    """Seconds of a collective whose gathered array has so many bytes on one device."""
    return switched(on).collective(kind, groups, bytes, bytes).seconds


def launch_seconds(chip: Chip) -> float:
    """Least seconds from one kernel to the next."""
    return LAUNCH_SECONDS
