"""Causes from gradient probes of layers: dead or uneven gradients, update ratios, lost updates, noise."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from systolic.explaining.settings import advise, changes, settings_of
from systolic.explaining.step import Cause
from systolic.runs.metrics import ProbedParameter, ProbeRecord
from systolic.runs.record import RunRecord

DEAD = 1e-8
"""Ratio to the model's median gradient (per element) below which a gradient counts as none."""

UNEVEN = 1e3
"""Ratio of gradients (per element) between a stack's first and last layers that counts as uneven."""

GROWN = 30.0
"""Ratio of a gradient norm to its early value that counts as exploding."""

USUAL_RATIO = 1e-3
"""Usual ratio of an update to its weights, a rule of thumb (Karpathy, CS231n notes, "Ratio of weights:updates")."""

HIGH_RATIO, LOW_RATIO = 1e-1, 1e-5
"""Ratios outside of which the learning rate is the likely cause; wide, since healthy runs with Muon reach 5e-2."""

NEAR_PEAK = 0.5
"""Share of the peak learning rate from which a probe counts for the peak."""

SOME_RATE = 0.1
"""Share of the peak learning rate below which a probe is of the end of the decay."""

LOST = 0.25
"""Share of lost updates from which they are reported."""

ADAPTERS = ("lora_a", "lora_b")
"""Last names of the paths of adapters."""

LARGE_BATCH = 4.0
"""Ratio of batch to noise scale that counts as too large: it needs 1 + 4 times the fewest examples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShare:
    """One layer's share of one parameter, at one probe."""

    path: str
    layer: int | None
    """The layer's number where the parameter stacks the layers."""
    is_matrix: bool
    size: int
    dtype: str
    gradient: float
    weight: float
    update: float
    lost: float

    @property
    def name(self) -> str:
        """``blocks/mlp/up[3]``."""
        return self.path if self.layer is None else f"{self.path}[{self.layer}]"

    @property
    def group(self) -> tuple[str, int | None]:
        """The stack it belongs to and its place in it: (``blocks``, 3); a path without numbers is its own group."""
        if self.layer is not None:
            return self.path.split("/")[0], self.layer
        match = re.match(r"(.*?)/(\d+)/", self.path)
        return (match[1], int(match[2])) if match else (self.path.split("/")[0], None)

    @property
    def is_weight(self) -> bool:
        """Whether it is a matrix of the model, and no adapter beside one."""
        return self.is_matrix and self.path.rpartition("/")[2] not in ADAPTERS

    @property
    def slope(self) -> float:
        """The gradient per element (root mean square)."""
        return self.gradient / math.sqrt(self.size)

    @property
    def ratio(self) -> float:
        """Ratio of the update to the weights."""
        return self.update / self.weight if self.weight else math.nan


def parts(probe: ProbeRecord) -> list[LayerShare]:
    """The layers of one probe."""
    return [part for path, probed in probe.parameters.items() for part in _parts(path, probed)]


def _parts(path: str, probed: ProbedParameter) -> Iterable[LayerShare]:
    stacked = isinstance(probed.gradient, list)
    own = probed.shape[1:] if stacked else probed.shape

    def of(figure: float | list[float], layer: int) -> float:
        return figure[layer] if isinstance(figure, list) else figure

    for layer in range(probed.shape[0] if stacked else 1):
        yield LayerShare(
            path=path,
            layer=layer if stacked else None,
            is_matrix=len(own) > 1,
            size=math.prod(own),
            dtype=probed.dtype,
            gradient=of(probed.gradient, layer),
            weight=of(probed.weight, layer),
            update=of(probed.update, layer),
            lost=of(probed.lost, layer),
        )


def causes(history: RunRecord) -> list[Cause]:
    """Causes that the probes show."""
    if not history.diagnoses:
        return []
    shown = (dead(history), uneven(history), exploding(history), rate(history))
    return [cause for cause in (*shown, lost(history), batch(history)) if cause is not None]


def dead(history: RunRecord) -> Cause | None:
    """Matrices without a gradient in every probe of the later half."""
    probes = _late(history)
    silent: set[str] | None = None
    for probe in probes:
        matrices = [part for part in parts(probe) if part.is_matrix]
        if not all(math.isfinite(part.gradient) for part in matrices):
            continue
        usual = _median(part.slope for part in matrices if part.slope > 0)
        now = {part.name for part in matrices if not part.slope > DEAD * usual}
        silent = now if silent is None else silent & now
    if not silent:
        return None
    last = [part for part in parts(probes[-1]) if part.name in silent]
    total = sum(part.is_matrix for part in parts(probes[-1]))
    evidence = [
        f"{_names(last)}: gradient 0 in {_times(len(probes))}, step {probes[-1].step} the last"
    ]
    alive = [
        x.step
        for x in history.diagnoses
        if any(p.gradient > 0 and p.name in silent for p in parts(x))
    ]
    settings = settings_of(history)
    advice = []
    if alive:
        evidence.append(f"they had one at step {alive[-1]}, so they died in training")
        advice.append(settings.learning_rate(history.peak_rate / 3))
    if settings.get("model.mlp") == "relu":
        advice.append(settings.change("model.mlp", value="swiglu"))
    advice.append(
        "check the outputs of these layers: a ReLU whose inputs are all negative, an output scale of 0, an unused path"
    )
    title = f"{len(last)} of {total} weight matrices get no gradient"
    return _cause("dead-gradients", title, evidence, advice)


def uneven(history: RunRecord) -> Cause | None:
    """Stack whose first layers' gradients differ greatly from its last layers'."""
    probe = _late(history)[-1]
    stacks: dict[str, dict[int, list[LayerShare]]] = {}
    for part in parts(probe):
        stack, place = part.group
        if place is not None and part.is_matrix and part.slope > 0:
            stacks.setdefault(stack, {}).setdefault(place, []).append(part)
    for stack, layers in stacks.items():
        slopes = {place: _rms(shares) for place, shares in sorted(layers.items())}
        if len(slopes) < 3:
            continue
        first, last = next(iter(slopes.values())), list(slopes.values())[-1]
        if max(first, last) <= UNEVEN * min(first, last):
            continue
        vanish = first < last
        evidence = [
            "gradient per weight (root mean square): "
            + ", ".join(f"{stack}/{place} {_few(slopes)[place]:.1e}" for place in _few(slopes))
        ]
        settings = settings_of(history)
        advice = [
            "residual connections with a norm before each branch, and output weights scaled by 1/sqrt(2 layers)",
            settings.lower("model.layers", value=max(len(slopes) // 2, 1)),
        ]
        if history.job.outline.start:
            advice = [settings.learning_rate(history.peak_rate / 3)]  # Its layers are given.
        name = "vanishing-gradients" if vanish else "exploding-gradients"
        word = "vanish towards" if vanish else "explode towards"
        return _cause(name, f"Gradients {word} the first layers of {stack}", evidence, advice)
    return None


def exploding(history: RunRecord) -> Cause | None:
    """Gradient norm that has grown throughout the run."""
    norms = history.norms
    if len(norms) < 24:
        return None
    quarter = len(norms) // 4
    early, last = statistics.median(norms[:quarter]), statistics.median(norms[-quarter:])
    if not early or last < GROWN * early:
        return None
    probe = _late(history)[-1]
    largest = sorted(parts(probe), key=lambda part: -part.gradient)[:3]
    evidence = [
        f"gradient norm {early:.3g} in the first quarter, {last:.3g} in the last",
        "largest: " + ", ".join(f"{part.name} {part.gradient:.3g}" for part in largest),
    ]
    settings = settings_of(history)
    advice = [settings.learning_rate(history.peak_rate / 3)]
    advice.append(settings.lower("optimizer.clip", value=float(f"{early:.1g}")))
    title = f"The gradient norm grew {last / early:.0f} times"
    return _cause("exploding-gradients", title, evidence, advice)


def ratios(history: RunRecord) -> dict[str, float]:
    """Name of each weight matrix to the median ratio of its updates to it, at the peak learning rate.

    A probe at a lower rate is scaled up, since updates are proportional to the rate. Adapters are left out: they
    begin at zero or stand beside matrices that do, so that no ratio is usual for them.
    """
    peak = history.peak_rate or max(probe.learning_rate for probe in history.diagnoses)
    probes = [x for x in history.diagnoses if x.learning_rate >= NEAR_PEAK * peak]
    probes = probes or [x for x in history.diagnoses if x.learning_rate > 0]
    # The first steps of a run move weights that are still small or zero.
    probes = probes[1:] if len(probes) > 2 else probes
    by_matrix: dict[str, list[float]] = {}
    for probe in probes:
        scale = max(peak / probe.learning_rate, 1.0)
        for part in parts(probe):
            if part.is_weight and math.isfinite(part.ratio) and part.gradient > 0:
                by_matrix.setdefault(part.name, []).append(part.ratio * scale)
    return {name: statistics.median(values) for name, values in by_matrix.items()}


def rate(history: RunRecord) -> Cause | None:
    """Learning rate that moves the weights too fast at any time, or hardly at all."""
    by_matrix = ratios(history)
    middle = _median(by_matrix.values())
    fast, step = max((_median(_moving(probe)), probe.step) for probe in history.diagnoses)
    if not by_matrix or (fast <= HIGH_RATIO and middle >= LOW_RATIO):
        return None
    settings = settings_of(history)
    usual = f"about {USUAL_RATIO:.0e} is usual (Karpathy, CS231n)"
    ordered = sorted(by_matrix, key=lambda name: by_matrix[name])
    ends = f"median of each matrix over the probes: least {ordered[0]} {by_matrix[ordered[0]]:.1e}, most {ordered[-1]} {by_matrix[ordered[-1]]:.1e}, at the peak learning rate {history.peak_rate:.3g}"
    # Rules of thumb are rough: go part of the way only.
    if fast > HIGH_RATIO:
        evidence = [f"step {step}: an update is {fast:.1e} of its weights (median); {usual}", ends]
        advice = [settings.learning_rate(history.peak_rate * max(USUAL_RATIO / fast, 0.1))]
        title = f"The learning rate is high: an update is {fast * 100:.0f} % of the weights"
        return _cause("learning-rate-high", title, evidence, advice)
    evidence = [f"an update is {middle:.1e} of its weights (median); {usual}", ends]
    advice = [settings.learning_rate(history.peak_rate * min(USUAL_RATIO / middle, 10.0))]
    title = f"The learning rate is low: an update is {middle:.1e} of the weights"
    return _cause("learning-rate-low", title, evidence, advice)


def _moving(probe: ProbeRecord) -> list[float]:
    """The ratios of the matrices that have a gradient, adapters left out."""
    return [part.ratio for part in parts(probe) if part.is_weight and part.gradient > 0]


def training(history: RunRecord) -> list[ProbeRecord]:
    """Probes without those of the end of the decay, whose updates are all lost to rounding."""
    peak = history.peak_rate or max(probe.learning_rate for probe in history.diagnoses)
    least = max(SOME_RATE * peak, 0.0)
    return [probe for probe in history.diagnoses if probe.learning_rate > least]


def lost(history: RunRecord) -> Cause | None:
    """Updates below half a unit in the last place of their weights."""
    by_kind: dict[str, tuple[float, int]] = {}
    worst: dict[str, float] = {}
    for probe in training(history):
        for part in parts(probe):
            share, size = by_kind.get(part.dtype, (0.0, 0))
            by_kind[part.dtype] = share + part.lost * part.size, size + part.size
            worst[part.name] = max(worst.get(part.name, 0.0), part.lost)
    shares = {kind: share / size for kind, (share, size) in by_kind.items()}
    kind = max(shares, key=lambda kind: shares[kind], default="")
    if not kind or shares[kind] < LOST:
        return None
    most = sorted(worst, key=lambda name: -worst[name])[:3]
    evidence = [
        f"{shares[kind] * 100:.0f} % of the updates of {kind} weights are less than half a unit in the last place and change nothing",
        "most in " + ", ".join(f"{name} ({worst[name] * 100:.0f} %)" for name in most),
    ]
    settings = settings_of(history)
    advice = []
    stored = settings.change("dtypes.parameters", value="f32")
    if kind != "float32" and settings.has("dtypes.parameters"):
        advice.append(stored)
    elif kind != "float32":
        way = advise(
            "float32 weights (param_dtype) with {} bf16, which computes in bf16 and keeps float32 master weights",
            "precision",
        )
        advice.append(settings.render(way))
    advice.append(settings.learning_rate(history.peak_rate * 10))
    title = f"Rounding to {kind} loses {shares[kind] * 100:.0f} % of the updates"
    return _cause("lost-updates", title, evidence, advice)


def noise_scale(history: RunRecord) -> float | None:
    """The simple noise scale tr(Σ)/|G|² in examples, over the later probes; infinite where noise hides the gradient.

    From the squared gradient norms of batches of two sizes, averaged before they are divided
    (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1). ``None``
    where no probe has both.
    """
    signal, noise = [], []
    for probe in _late(history):
        big, small = probe.big_square, probe.small_square
        whole = probe.batch
        part = whole / probe.parts
        if probe.parts > 1 and math.isfinite(big) and math.isfinite(small):
            signal.append((whole * big - part * small) / (whole - part))
            noise.append((small - big) / (1 / part - 1 / whole))
    if not signal:
        return None
    mean, spread = statistics.fmean(signal), max(statistics.fmean(noise), 0.0)
    return spread / mean if mean > 0 else math.inf


def batch(history: RunRecord) -> Cause | None:
    """Batch far above the gradient noise scale."""
    scale, size = noise_scale(history), history.diagnoses[-1].batch
    if scale is None or size <= LARGE_BATCH * scale or len(_late(history)) < 2:
        return None
    useful = max(2 ** round(math.log2(max(scale, 1.0))), 1, _fewest(history))
    if useful >= size:
        return None
    evidence = [
        f"gradient noise scale {scale:.3g} {history.unit}, batch {size}",
        f"at this batch the run needs {1 + size / max(scale, 1e-9):.3g} times the fewest {history.unit}, and {1 + scale / size:.2f} times the fewest steps (McCandlish et al. 2018)",
    ]
    advice = [
        f"{settings_of(history).batch(useful, size)} for {(1 + scale / useful) / (1 + scale / size):.2g} times the steps",
        "the same batch with a higher learning rate, where time matters more than cost",
    ]
    return _cause("large-batch", "The batch is larger than useful", evidence, advice)


def _fewest(history: RunRecord) -> int:
    """Examples of the smallest batch that the run's layout divides."""
    layout = history.start.layout
    ways = [layout.get(axis) or 1 for axis in ("data", "fsdp", "expert")]
    return math.prod(ways) * history.job.outline.layout.accumulate


def _late(history: RunRecord) -> Sequence[ProbeRecord]:
    """The later half of the probes; a single probe counts as later."""
    return history.diagnoses[len(history.diagnoses) // 2 :]


def _names(shares: Sequence[LayerShare]) -> str:
    """At most four paths, with their layers."""
    layers: dict[str, list[str]] = {}
    for part in shares:
        layers.setdefault(part.path, []).append("" if part.layer is None else str(part.layer))
    names = [f"{path}[{','.join(where)}]" if where[0] else path for path, where in layers.items()]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _few(slopes: Mapping[int, float]) -> dict[int, float]:
    """The first, middle and last entries."""
    places = list(slopes)
    kept = {places[0], places[len(places) // 2], places[-1]}
    return {place: slopes[place] for place in places if place in kept}


def _times(count: int) -> str:
    return "the only probe" if count == 1 else f"each of the last {count} probes"


def _rms(shares: Sequence[LayerShare]) -> float:
    return math.sqrt(sum(p.gradient**2 for p in shares) / sum(p.size for p in shares))


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else 0.0


def _cause(name: str, title: str, evidence: Sequence[str], advice: Sequence[str]) -> Cause:
    return Cause(
        name=name, title=title, share=None, seconds=None, evidence=evidence, advice=changes(advice)
    )
