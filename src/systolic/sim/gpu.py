"""Seconds of a GPU's kernels and collectives, from the catalogue and what others measured.

Matmuls are cuBLASLt's, attention is cuDNN's, collectives are NCCL's. A kernel's own speed was fitted to kernels that ran alone
for a moment; within a step they share power, memory and multiprocessors with collectives, which ``gpu.step_share`` of
constants.toml counts with.
The measurements, their sources and the errors on both halves are in ``benchmarks/gpu``.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from systolic.chips import Chip, Slice
from systolic.core.errors import NotFoundError
from systolic.hlo import Groups
from systolic.hlo.shape import bits_of
from systolic.sim.calibration import constant
from systolic.sim.network import switched

MATMUL_SECONDS: float = constant("gpu.matmul_seconds")
WAVE_SECONDS: float = constant("gpu.wave_seconds")
WAVE_SHARE: float = constant("gpu.wave_share")
TILES: tuple[tuple[int, int, float], ...] = constant("gpu.tiles")
"""Rows and columns of the result that a multiprocessor computes at once, and its speed with them over the best."""
SPLITS: tuple[int, ...] = tuple(constant("gpu.splits"))
"""Parts that the contracted dim is cut into where there are fewer tiles than multiprocessors."""
SPLIT_SECONDS: float = constant("gpu.split_seconds")
LEAST_DEPTH: int = constant("gpu.split_depth")
"""Least contracted dim of a part."""
MATMUL_SHARE: Mapping[str, Mapping[str, float]] = constant("gpu.matmul_share")
TF32_SHARE: float = constant("gpu.tf32_share")
F64_LANES: Mapping[str, int] = constant("gpu.f64_lanes")
"""Multiply-adds of f64 a clock and multiprocessor, by compute capability; elsewhere as many as f32 lanes."""
INTEGER_LANES: int = constant("gpu.integer_lanes")
_NARROW = ("s8", "u8", "s4", "u4")
_INTEGERS = frozenset({"s16", "u16", "s32", "u32", "s64", "u64", "pred", *_NARROW})
STEP_SHARE: float = constant("gpu.step_share")
SUSTAINED_SHARE: Mapping[str, Mapping[str, float]] = constant("gpu.sustained_share")
MEMORY_SHARE: float = constant("gpu.memory_share")
MEMORY_SECONDS: float = constant("gpu.memory_seconds")
LAUNCH_SECONDS: float = constant("roofline.launch_seconds")
ATTENTION_SHARE: Mapping[str, Mapping[str, Any]] = constant("gpu.attention_share")
ATTENTION_SECONDS: float = constant("gpu.attention_seconds")
ATTENTION_EDGE: tuple[float, float] = constant("gpu.attention_edge")
"""Keys a query, forward and backward, whose time a tile loses at its ends."""
DIAGONAL: float = constant("gpu.attention_diagonal")
TRANSCENDENTAL_LANES: float = constant("gpu.transcendental_lanes")
BACKWARD_PRODUCTS = 2.5
"""Matmuls of attention's backward pass over those of the forward pass: five and two."""
BACKWARD_KERNELS = 3
"""Kernels of the backward pass: the sums over a row of the result and its gradient, the gradients, the queries' in their own format."""


class AttentionCall(TypedDict):
    """Sizes of an attention kernel."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool
    window: int
    """Keys that a query sees at most; 0 for all."""
    backward: bool
    """Whether it is the pass that computes the gradients, without the forward pass."""
    dtype: str
    """HLO dtype of queries, keys and values."""


def matmul_seconds(
    chip: Chip, batch: int, m: int, n: int, k: int, *dtypes: str, highest: bool = False
) -> float:
    """Seconds of ``batch`` products ``[m, k] @ [k, n]``, of HLO dtypes of operands and result, in a step that keeps all GPUs at work.

    No less than its FLOPs take at the clock that the power limit leaves, beside the collectives. A convolution is the product
    of its window's elements: ``m`` output positions, ``k`` window elements x channels.
    """
    lhs, rhs, _ = dtypes
    flops = 2.0 * real_products(lhs, rhs) * batch * m * n * k
    in_step = flops / (sustained_flops(chip, lhs, rhs, highest) * STEP_SHARE)
    alone = matmul_alone_seconds(chip, batch, m, n, k, *dtypes, highest=highest)
    return max(alone, in_step)


def matmul_alone_seconds(
    chip: Chip, batch: int, m: int, n: int, k: int, *dtypes: str, highest: bool = False
) -> float:
    """Seconds of these products at the highest clock, as a kernel has them that runs alone for a moment.

    The result is cut into tiles, which the multiprocessors take in waves; ``k`` too, where there are too few tiles for them. The
    fastest cut counts, or the bytes where they take longer.
    """
    lhs, rhs, out = dtypes
    reached = peak_flops(chip, lhs, rhs, highest) * _share(MATMUL_SHARE, chip, lhs, rhs, highest)
    of_one = reached / real_products(lhs, rhs) / _num_sms(chip)
    tiled = min(
        _tiled(chip, of_one, (batch, m, n, k), tile, parts)
        for tile in TILES
        for parts in SPLITS
        if parts == 1 or k / parts >= LEAST_DEPTH
    )
    moved = batch * (m * k * _bytes(lhs) + k * n * _bytes(rhs) + m * n * _bytes(out))
    return MATMUL_SECONDS + max(tiled, moved / memory_rate(chip))


def _tiled(
    chip: Chip,
    of_one: float,
    product: tuple[int, int, int, int],
    tile: tuple[int, int, float],
    parts: int,
) -> float:
    """Seconds of a product cut into such tiles, at ``of_one`` FLOP/s of a multiprocessor.

    The last wave of many counts in part: kernels that stay on a multiprocessor begin the next tile while others end theirs.
    """
    batch, m, n, k = product
    rows, columns, speed = tile
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns) * parts
    full = tiles / _num_sms(chip)
    waves = 1.0 if full <= 1 else full + WAVE_SHARE * (math.ceil(full) - full)
    of_tile = 2.0 * rows * columns * math.ceil(k / parts) / (of_one * speed)
    ends = WAVE_SECONDS * rows * columns / (TILES[0][0] * TILES[0][1])
    seconds = waves * (of_tile + ends)
    if parts > 1:
        # Partial sums are written and read once more, in f32, mostly by the second-level cache.
        seconds += SPLIT_SECONDS + parts * batch * m * n * 4 / memory_rate(chip)
    return seconds


def attention_seconds(chip: Chip, **call: Unpack[AttentionCall]) -> float:
    """Seconds of an attention kernel in a step that keeps all GPUs at work."""
    return _attention(chip, call, STEP_SHARE)


def attention_alone_seconds(chip: Chip, **call: Unpack[AttentionCall]) -> float:
    """Seconds of an attention kernel that runs alone for a moment."""
    return _attention(chip, call, 1.0)


def _attention(chip: Chip, call: AttentionCall, pace: float) -> float:
    """FLOPs of the scores that the mask leaves, at ``pace`` of the share of the peak that cuDNN's kernels reach with this head dim.

    A tile of queries loses the time of some keys at its ends, and computes the whole tile that the diagonal crosses.
    """
    q_len, kv_len, dtype = call["q_len"], call["kv_len"], call["dtype"]
    backward = call["backward"]
    seen = keys_seen(q_len, kv_len, call["causal"], call["window"])
    width = call["batch"] * call["head_dim"]
    products = BACKWARD_PRODUCTS if backward else 1.0
    flops = 4.0 * products * width * call["heads"] * q_len * seen
    edge = 1 + ATTENTION_EDGE[backward] / seen
    share = _attention_share(chip, call["head_dim"], backward, dtype) * pace
    elements = width * (q_len * call["heads"] + kv_len * call["kv_heads"])
    moved = 2.0 * elements * _bytes(dtype) * (2 if backward else 1)
    seconds = flops * edge / (peak_flops(chip, dtype, dtype) * share)
    kernels = BACKWARD_KERNELS if backward else 1
    return ATTENTION_SECONDS * kernels + max(seconds, moved / memory_rate(chip))


def keys_seen(q_len: int, kv_len: int, causal: bool, window: int) -> float:
    """Keys that a query computes scores with, on average: its tile on the diagonal counts whole."""
    seen = pairs_seen(q_len, kv_len, causal, window) / q_len
    if seen < kv_len:
        seen += DIAGONAL / 2 * min(q_len, kv_len) / q_len
    return min(seen, kv_len)


def pairs_seen(q_len: int, kv_len: int, causal: bool, window: int) -> float:
    """Pairs of a query and a key that a mask leaves, half of those on its diagonal.

    Query ``i`` sees keys up to ``i`` and its window's last ones, whatever the numbers of both, as :mod:`jax.nn`'s masks and
    cuDNN's have it: the first query sees the first key only.
    """
    if not causal and not window:
        return float(q_len * kv_len)
    before = _below_diagonal(max(q_len - window, 0), kv_len) if window else 0.0
    return _below_diagonal(q_len, kv_len) - before


def _below_diagonal(q_len: int, kv_len: int) -> float:
    square = min(q_len, kv_len)
    return square * square / 2 + (q_len - square) * kv_len


def elementwise_seconds(
    chip: Chip,
    read_bytes: float,
    written_bytes: float,
    flops: float = 0.0,
    transcendental: float = 0.0,
) -> float:
    """Seconds of a fusion without a matmul: its bytes, or its arithmetic in f32 where that takes longer.

    Args:
        chip: The GPU.
        read_bytes: From device memory.
        written_bytes: To device memory.
        flops: Operations of the f32 lanes.
        transcendental: Exponentials, logarithms, roots and their kind, on the special units.
    """
    lanes = _num_sms(chip) * (chip.f32_lanes_per_sm or 0) * (chip.clock_hz or 0.0)
    arithmetic = 0.0
    if lanes:
        arithmetic = flops / lanes + transcendental / (lanes * TRANSCENDENTAL_LANES)
    moved = (read_bytes + written_bytes) / memory_rate(chip)
    return max(LAUNCH_SECONDS, MEMORY_SECONDS + max(moved, arithmetic))


def collective_seconds(on: Slice, kind: str, num_bytes: float, groups: Groups) -> float:
    """Seconds of a collective over NVLink, and over the network where a group lies in several domains.

    Args:
        on: The slice.
        kind: HLO opcode, without ``-start``.
        num_bytes: The larger of operand and result, of one GPU.
        groups: Devices that take part.

    Raises:
        NotFoundError: the catalogue lacks the rate of a link that it needs.
    """
    return switched(on).collective(kind, groups, num_bytes, num_bytes).seconds


def memory_rate(chip: Chip) -> float:
    """Bytes/s that kernels reach of the device memory, reads and writes together.

    Raises:
        NotFoundError: the catalogue lacks the bandwidth.
    """
    return _known(chip, "hbm_bytes_per_second") * MEMORY_SHARE


def peak_flops(chip: Chip, lhs: str, rhs: str, highest: bool = False) -> float:
    """Dense peak of matmuls with operands of these HLO dtypes, in real operations.

    f32 runs as TF32, JAX's default, or on the f32 lanes at the precision ``highest``.

    Raises:
        NotFoundError: the catalogue lacks the peak.
    """
    return format_peak(chip, matmul_format(lhs, rhs, highest))


def format_peak(chip: Chip, form: str) -> float:
    """Dense peak of matmuls in a format that :func:`matmul_format` names.

    Raises:
        NotFoundError: the catalogue lacks the peak in bf16.
    """
    bf16 = _known(chip, "peak_bf16_flops_per_second")
    match form:
        case "f64":
            # Where no table says else, as many as f32 lanes have, on the tensor cores (66.9e12 of H100, both).
            lanes = F64_LANES.get(chip.compute_capability or "", chip.f32_lanes_per_sm or 0)
            return _on_lanes(chip, lanes) or bf16 / 32
        case "f32":
            return _on_lanes(chip, chip.f32_lanes_per_sm or 0) or bf16 / 16
        case "integer":
            return _on_lanes(chip, INTEGER_LANES) or bf16 / 32
        case "tf32":
            return chip.peak_tf32_flops_per_second or bf16 * TF32_SHARE
        case "fp8":
            return chip.peak_fp8_flops_per_second or bf16
        case "int8":
            return chip.peak_int8_ops_per_second or bf16
    return bf16


def _on_lanes(chip: Chip, lanes: int) -> float:
    """Operations/s of so many lanes of each multiprocessor, 2 a multiply-add; 0 where the clock is not known."""
    return 2.0 * (chip.num_sms or 0) * lanes * (chip.clock_hz or 0.0)


def sustained_flops(chip: Chip, lhs: str, rhs: str, highest: bool = False) -> float:
    """FLOP/s of matmuls in these dtypes under the power limit, whatever their shape."""
    share = _share(SUSTAINED_SHARE, chip, lhs, rhs, highest)
    return peak_flops(chip, lhs, rhs, highest) * share


def real_products(lhs: str, rhs: str) -> int:
    """Real multiply-adds of a multiply-add of these dtypes: four of complex numbers."""
    return 4 if lhs.startswith("c") or rhs.startswith("c") else 1


def matmul_format(lhs: str, rhs: str, highest: bool = False) -> str:
    """Number format in which a matmul computes, that of the wider operand: ``integer`` and ``f32`` are not the tensor cores'."""
    operands = {lhs, rhs}
    if lhs.startswith("f8") and rhs.startswith("f8"):
        return "fp8"
    if operands <= set(_NARROW):
        return "int8"
    if operands <= _INTEGERS:
        return "integer"
    if operands & {"f64", "c128"}:
        return "f64"
    if operands & {"f32", "c64"}:
        return "f32" if highest else "tf32"
    return "bf16"


def _share(
    table: Mapping[str, Mapping[str, float]], chip: Chip, lhs: str, rhs: str, highest: bool
) -> float:
    """Share of the peak by compute capability and number format; that of ``all`` where one was not measured.

    The tables' f32 is TF32. The lanes' share is assumed to be that of f64, which power does not hold either.
    """
    row = table.get(chip.compute_capability or "", {})
    form = matmul_format(lhs, rhs, highest)
    form = {"tf32": "f32", "f32": "f64", "integer": "f64"}.get(form, form)
    return row.get(form) or table["all"].get(form) or table["all"]["bf16"]


def _attention_share(chip: Chip, head_dim: int, backward: bool, dtype: str) -> float:
    """Share of the peak for a head dim, between and beyond those that were measured."""
    row = ATTENTION_SHARE.get(chip.compute_capability or "", ATTENTION_SHARE["all"])
    name = ("fp8_" if dtype.startswith("f8") else "") + ("backward" if backward else "forward")
    points = row.get(name) or ATTENTION_SHARE["all"][name]
    low, high = points[0], points[-1]
    if head_dim <= low[0]:
        return low[1] * max(head_dim / low[0], 0.25)
    for (left, small), (right, large) in itertools.pairwise(points):
        if head_dim <= right:
            return small + (large - small) * (head_dim - left) / (right - left)
    return high[1]


def _bytes(dtype: str) -> float:
    return bits_of(dtype) / 8


def _num_sms(chip: Chip) -> int:
    return int(_known(chip, "num_sms"))


def _known(chip: Chip, name: str) -> float:
    value = getattr(chip, name)
    if value is None:
        raise NotFoundError(
            f"the catalogue has no {name} of {chip.name}; add it to your own catalogue"
        )
    return value
