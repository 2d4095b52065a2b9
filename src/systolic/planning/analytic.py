"""Time and memory of a candidate without a compiler: bounds to reject by, estimates to search by.

Microseconds a candidate, plain Python. A bound is never above what the simulation of the compiled
program says (tests/planning/test_analytic.py holds it against the store); an estimate is not a bound.
Rules: How to Scale Your Model (jax-ml.github.io/scaling-book), training and sharding chapters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from systolic.chips import Slice
from systolic.job import (
    AdapterKind,
    Axis,
    Job,
    Layout,
    ModelStats,
    Optimizer,
    OptimizerKind,
    Precision,
    Remat,
    Residual,
)
from systolic.planning.candidate import Candidate
from systolic.sim.calibration import constant
from systolic.sim.rates import rates_of
from systolic.sim.roofline import gpu_peaks

_MOMENTS: Mapping[OptimizerKind, int] = {
    OptimizerKind.adamw: 2,
    OptimizerKind.lamb: 2,
    OptimizerKind.sgd: 1,
    OptimizerKind.lars: 1,
    OptimizerKind.lion: 1,
    OptimizerKind.muon: 1,
    OptimizerKind.adafactor: 0,
}
"""Full moments per parameter of an optimizer; adafactor's factored ones are small."""
_FROZEN_BYTES: Mapping[AdapterKind, float] = {
    AdapterKind.none: 0.0,
    AdapterKind.lora: 2.0,
    AdapterKind.qlora: 0.5 + 2.0 / 64,
}
"""Bytes per frozen parameter in bf16, or in 4 bits with a scale for 64: a lower bound, since embeddings are not in 4 bits."""
FOLDER = Path(__file__).parent
EFFICIENCY: float = constant("analytic.efficiency", FOLDER)
REREAD: float = constant("analytic.reread", FOLDER)
HIDDEN: float = constant("analytic.hidden", FOLDER)
EXPOSED: float = constant("analytic.exposed", FOLDER)
WORKING: float = constant("analytic.working", FOLDER)
LIVE_LOGIT: float = constant("analytic.live_logit", FOLDER)
GATHERED: float = constant("analytic.gathered", FOLDER)
VISIBLE = {Axis[name]: share for name, share in constant("analytic.visible", FOLDER).items()}
HALF = 2.0
"""Bytes of a bf16 element."""
WHOLE = 4.0
"""Bytes of an f32 element."""
LOGIT_BYTES = 8.0
"""Bytes of a logit in bf16 and in f32, and of its gradient."""
ACCUMULATES = 4.0
"""Memory moves of a pass's gradients when they are summed: write, read both, write."""
RESERVED = 1.005
"""Tolerance for rounding by which a memory bound may exceed the compiler's need."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of one job that do not depend on the layout."""

    job: Job
    unit: str
    """``tokens`` or ``examples``."""
    units_per_example: int
    forward_flops: float
    """Matmul FLOPs of one example's forward pass."""
    parameters: int

    @cached_property
    def state_bytes(self) -> float:
        """Bytes per parameter kept for the whole run: master weight, optimizer state, average; with adapters the frozen weights, and these of the adapters."""
        return _FROZEN_BYTES[self.job.adapter.kind] + self.trained_share * self._trained_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes of a checkpoint: what trains, its optimizer state and its average."""
        return self.trained_share * self._trained_bytes * self.parameters

    @property
    def trained_share(self) -> float:
        """Parameters that train over those of the model: 1 without adapters."""
        return self.job.adapter_parameters / self.parameters if self.job.adapter else 1.0

    @property
    def _trained_bytes(self) -> float:
        optimizer: Optimizer = self.job.optimizer
        average = 4.0 if optimizer.ema else 0.0
        return self.job.dtypes.parameters.bytes + self._moment_bytes + average

    @cached_property
    def update_bytes(self) -> float:
        """HBM bytes of an update per parameter: weight and moments read and written, the gradient read."""
        each = 2.0 * self._trained_bytes + self.job.dtypes.gradients.bytes
        return self.trained_share * each

    @property
    def _moment_bytes(self) -> float:
        return _MOMENTS[self.job.optimizer.kind] * self.job.dtypes.moments.bytes

    def outline(self, layout: Layout) -> ModelStats:
        """The model's statistics; with parameters only where it has none."""
        key = (layout.remat_names, layout.saved_names)
        if key not in self._outlines:
            self._outlines[key] = self.job.model.outline(layout) or self._bare
        return self._outlines[key]

    @cached_property
    def _outlines(self) -> dict[tuple[tuple[str, ...], ...], ModelStats]:
        return {}

    @cached_property
    def _bare(self) -> ModelStats:
        return ModelStats(
            parameters=self.parameters,
            kept=dict.fromkeys(Remat, (0, 0)),
            repeated={remat: 1.0 if remat is Remat.full else 0.0 for remat in Remat},
        )

    @property
    def train_flops(self) -> float:
        """Model FLOPs of one example's train step: forward, and backward at twice that, less gradients of frozen weights."""
        frozen = self.job.model.weight_flops(self.job.data.fields()) if self.job.adapter else 0.0
        return 3.0 * self.forward_flops - frozen


def facts_of(job: Job) -> Facts:
    """Facts of a job; imports jax for models that have no statistics.

    Raises:
        LayoutError: the data's fields contradict the model.
    """
    fields = job.data.fields()
    unit = "tokens" if "tokens" in fields else "examples"
    per_example = fields["tokens"].shape[0] if unit == "tokens" else 1
    known, flops = job.model.outline(Layout()), job.forward_flops
    if known is None or flops is None:
        from systolic.steps.step_functions import parameters_and_flops

        parameters, forward = parameters_and_flops(job)
    else:
        parameters, forward = known.parameters, flops
    return Facts(
        job=job,
        unit=unit,
        units_per_example=per_example,
        forward_flops=forward,
        parameters=parameters,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """Analysis of one candidate; bytes of one device, seconds of a step."""

    bytes_bound: float
    bytes_estimate: float
    seconds_bound: float
    seconds_estimate: float
    largest: str
    """The longest part of the estimate besides compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Rates of one device in operations and bytes a second, the same as in the simulation."""

    peaks: Mapping[str, float]
    hbm: float
    link: float
    """Bytes/s in one direction of a torus link, or of a GPU's link into its switch."""
    axes: int
    """Torus axes."""
    dcn: float


@cache
def _speeds(on_name: str) -> Speeds:
    from systolic.chips import slice

    on = slice(on_name)
    if on.platform == "gpu":
        peaks = gpu_peaks(on)
        link = peaks.links.link if peaks.links is not None else None
        card = peaks.links.card if peaks.links is not None else None
        slowest = min(peaks.memory, link or card or peaks.memory)
        return Speeds(
            peaks=peaks.matmul, hbm=peaks.memory, link=slowest, axes=1, dcn=card or slowest
        )
    rates = rates_of(on)
    return Speeds(peaks=rates.peaks, hbm=rates.hbm, link=rates.link, axes=rates.axes, dcn=rates.dcn)


def analyse(facts: Facts, candidate: Candidate) -> Analysis:
    """Bounds and estimates of a candidate.

    Raises:
        NotFoundError: the catalogue lacks a rate of the chip.
    """
    rates = _speeds(candidate.on.name)
    bytes_bound, bytes_estimate = _memory(facts, candidate)
    bound, estimate, largest = _time(facts, candidate, rates)
    return Analysis(
        bytes_bound=bytes_bound / RESERVED,
        bytes_estimate=bytes_estimate,
        seconds_bound=bound,
        seconds_estimate=estimate,
        largest=largest,
    )


def capacity(on: Slice) -> float:
    """Device memory of one JAX device, bytes."""
    return float(on.program_bytes)


def _shards(facts: Facts, candidate: Candidate) -> float:
    """Parameters on one device: all axes split them but data and the copies of a pipeline (steps/target.py)."""
    layout = candidate.layout
    ways = layout.fsdp * layout.context * layout.tensor * layout.pipeline * layout.expert
    return facts.outline(layout).parameters / ways


def _passed(facts: Facts, candidate: Candidate) -> float:
    """Tokens of a step divided by the devices."""
    return candidate.batch * facts.units_per_example / candidate.on.num_devices


def _tokens(facts: Facts, candidate: Candidate) -> float:
    """Tokens (or examples) on one device in one pass; the tensor axis does not split them."""
    layout = candidate.layout
    examples = candidate.batch / (layout.batch_ways * layout.accumulate)
    return examples * facts.units_per_example / layout.context


def _stream_ways(facts: Facts, candidate: Candidate) -> int:
    """Parts that the tensor axis splits the residual stream into; 1 where it is whole."""
    layout = candidate.layout
    match layout.residual:
        case Residual.whole:
            return 1
        case Residual.sequence:
            dim, ways = facts.units_per_example, layout.context * layout.tensor
        case Residual.embed:
            dim, ways = facts.outline(layout).stream, layout.tensor
    return 1 if dim % ways else layout.tensor


def _element(candidate: Candidate) -> float:
    """Bytes of an element of activations and of gathered weights."""
    return WHOLE if candidate.precision is Precision.f32 else HALF


def _rows(outline: ModelStats, layout: Layout) -> float:
    """Rows that a device has for its experts' tokens, over those that a uniform choice fills."""
    if not outline.experts:
        return 1.0
    own = max(outline.experts // layout.expert, 1)
    return layout.expert * min(outline.routed, own) / max(outline.routed, 1)


def _memory(facts: Facts, candidate: Candidate) -> tuple[float, float]:
    layout, outline = candidate.layout, facts.outline(candidate.layout)
    element = _element(candidate)
    parameters, tokens = _shards(facts, candidate), _tokens(facts, candidate)
    state = facts.state_bytes * parameters
    layers = outline.layers / layout.pipeline
    offloaded = layout.remat is Remat.offload and "layer_input" in layout.remat_names
    inputs = 0.0 if offloaded else layers * tokens * outline.stream * HALF
    bound = state + inputs / layout.tensor
    whole, split = outline.kept.get(layout.remat, (outline.stream, 0))
    ways = _stream_ways(facts, candidate)
    empty = _rows(outline, layout) - 1.0
    split += empty * outline.hidden.get(layout.remat, 0)
    kept = layers * tokens * (whole / ways + split / layout.tensor) * element
    once = outline.kept.get(Remat.none, (0, 0))
    # Gathered weights of a layer are whole while its matmuls run.
    spread = once[1] + empty * outline.hidden.get(Remat.none, 0)
    working = (
        WORKING * tokens * (once[0] / ways + outline.stream + spread / layout.tensor) * element
    )
    summed = facts.job.dtypes.gradients.bytes if layout.accumulate > 1 else element
    gradients = summed * parameters * facts.trained_share
    matrices = layout.tensor * layout.pipeline * layout.expert
    gathered = GATHERED * element * outline.parameters / max(outline.layers, 1) / matrices
    chunks = layout.loss_chunks
    logits = tokens / layout.pipeline * outline.vocab / layout.tensor / chunks * LIVE_LOGIT
    return bound, state + gradients + kept + gathered + max(working, logits)


def _time(facts: Facts, candidate: Candidate, rates: Speeds) -> tuple[float, float, str]:
    layout, on = candidate.layout, candidate.on
    outline = facts.outline(layout)
    matmul_format = candidate.precision.matmul_format
    element = _element(candidate)
    best_peak = max(rates.peaks.values()) if matmul_format else rates.peaks["bf16"]
    # A TPU multiplies f32 operands in one pass of bf16; what they cost is their bytes.
    peak = rates.peaks["bf16"]
    if candidate.precision is Precision.f32:
        peak = rates.peaks.get("f32", peak)
    model = facts.train_flops * candidate.batch / on.num_devices
    state = facts.state_bytes * _shards(facts, candidate)
    bound = max(model / best_peak, state / rates.hbm)

    ways = _stream_ways(facts, candidate)
    repeated = outline.repeated.get(layout.remat, 0.0)
    fast = best_peak if matmul_format == "int8" or "fp8" in rates.peaks else peak
    flops = model + repeated * facts.forward_flops * candidate.batch / on.num_devices
    if layout.loss_chunks > 1:  # logits are recomputed for the gradient
        flops += 2.0 * outline.vocab * outline.stream * _passed(facts, candidate)
    compute = flops / (EFFICIENCY * (0.5 * fast + 0.5 * peak if matmul_format else peak))
    once = outline.kept.get(Remat.none, (0, 0))
    spread = once[1] + (_rows(outline, layout) - 1.0) * outline.hidden.get(Remat.none, 0)
    elements = outline.layers * (once[0] / ways + spread / layout.tensor) / layout.pipeline
    elements += outline.vocab / layout.tensor / layout.pipeline
    touched = _tokens(facts, candidate) * layout.accumulate * elements * element
    compute += REREAD * (1 + repeated / 3) * touched / rates.hbm
    weights = element * outline.parameters / (layout.tensor * layout.pipeline * layout.expert)
    # Each pass writes and reads the gathered weights again, for any number of tokens.
    compute = max(compute, 6.0 * weights * layout.accumulate / rates.hbm)
    passes = layout.accumulate * layout.pipeline
    micro = layout.num_microbatches(candidate.batch // layout.accumulate)
    compute *= 1 + (layout.pipeline - 1) / max(micro, 1)

    parts = _traffic(facts, candidate, rates, weights, passes)
    moved = parts.pop("weights") + parts.pop("gradients") * facts.trained_share
    shown = max(EXPOSED * moved, moved - HIDDEN * compute)
    costs = {
        "weights and gradients between chips": shown,
        **{f"{name} axis": seconds for name, seconds in parts.items()},
        "optimizer update": facts.update_bytes * _shards(facts, candidate) / rates.hbm,
        "accumulation": ACCUMULATES
        * facts.job.dtypes.gradients.bytes
        * facts.trained_share
        * _shards(facts, candidate)
        * (layout.accumulate if layout.accumulate > 1 else 0)
        / rates.hbm,
    }
    return bound, compute + sum(costs.values()), max(costs, key=lambda name: costs[name])


def _traffic(
    facts: Facts, candidate: Candidate, rates: Speeds, weights: float, passes: float
) -> dict[str, float]:
    """Seconds on the links by traffic, before overlap with compute; tensor, context and expert after it."""
    layout, outline = candidate.layout, facts.outline(candidate.layout)
    tokens = _tokens(facts, candidate)
    layers = outline.layers / layout.pipeline
    element = _element(candidate)
    stream = tokens * outline.stream * element * layout.accumulate
    slices = candidate.on.num_slices
    crossing = layout.slices
    inside = {axis: layout.size(axis) for axis in Axis}
    inside[crossing] = max(inside[crossing] // slices, 1)

    def seconds(axis: Axis, whole_bytes: float) -> float:
        """Seconds of a gather (or scatter) of ``whole_bytes`` along an axis within a slice."""
        ways = inside[axis]
        if ways == 1:
            return 0.0
        order = list(Axis)
        stride = math.prod(inside[inner] for inner in order[order.index(axis) + 1 :])
        return whole_bytes * (ways - 1) / ways / _rate(candidate.on, rates, ways, stride)

    again = 1.0 if layout.remat in (Remat.full, Remat.offload) else 0.0
    # Four gathers and scatters of the stream a block, again for its gradient. A mixture that drops no token sums whole
    # results over the tensor axis, of all tokens of the expert axis, which it gathers and scatters once.
    tensor, expert = 8.0 + 4.0 * again, (4.0 + 2.0 * again) * outline.routed
    if outline.experts:
        tensor = (0.5 + layout.expert) * tensor
        expert = (4.0 + 2.0 * again) * layout.expert
    sharded = weights / max(inside[Axis.fsdp], 1)
    by_traffic = {
        "weights": seconds(Axis.fsdp, 2.0 * weights) * passes,
        "gradients": seconds(Axis.fsdp, weights) * passes + seconds(Axis.data, 4.0 * sharded),
        "tensor": VISIBLE[Axis.tensor] * seconds(Axis.tensor, tensor * layers * stream),
        "context": VISIBLE[Axis.context]
        * seconds(
            Axis.context,
            (2.0 + again)
            * layers
            * tokens
            * layout.context
            * outline.keys
            * element
            * layout.accumulate,
        ),
        "expert": VISIBLE[Axis.expert]
        * seconds(Axis.expert, expert * layers * stream)
        / (1.0 if outline.experts else max(inside[Axis.expert] / 4, 1)),
    }
    if slices > 1:
        share = 4.0 * _shards(facts, candidate) if crossing is Axis.data else 6.0 * weights * passes
        by_traffic["gradients"] += share * (slices - 1) / slices / rates.dcn
    return by_traffic


def _rate(on: Slice, rates: Speeds, ways: int, stride: int) -> float:
    """Bytes/s of a gather along a mesh axis whose neighbours are ``stride`` devices apart.

    On a torus, both directions of as many of its axes as it is likely to span; between GPUs on several
    switches, the network cards of the GPUs on one.
    """
    if on.platform == "gpu":
        domain = on.chip.max_pod_chips or on.chip.chips_per_host or on.num_chips
        if ways * stride <= domain:
            return rates.link
        return min(rates.link, rates.dcn * max(domain // stride, 1))
    chips = max(on.num_chips // on.num_slices, 2)
    spanned = max(1, round(rates.axes * math.log(ways) / math.log(chips)))
    ring = 2.0 if any(on.wrap) else 1.0
    return rates.link * min(spanned, rates.axes) * ring
