"""Time of a step by op, by place in the model, by source line, and in windowed einsums."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from systolic.chips.flags import SHARED
from systolic.core.units import duration
from systolic.hlo import Module
from systolic.hlo.module import named
from systolic.sim.timeline import Resource, Span, Timeline

GLUE = frozenset(("clip", "where", "take_along_axis", "dynamic_index_in_dim"))
"""Functions of jax.numpy that appear in a path of names but are no place in a model."""

_REMARK = re.compile(r"blocks_\d+_of_\d+")
"""Mark of the mask in an attention kernel's name."""

_KERNEL = re.compile(r"(splash_mha_\w+?)(?:_segmented|_no_residuals|_residuals)*$")
LEAST = 2
"""Permutes of one matmul from which they are a window; a single one may reshard a result."""
OFF = next(flag.text for flag in SHARED if "windowed_einsum" in flag.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """Time of the core: of one op over all its runs, or of all ops of one place."""

    name: str
    seconds: float
    runs: int
    """Runs of its ops in a step."""
    resource: Resource
    """Resource that takes the most of it."""
    place: str
    source: str
    """``file:line`` that takes the most of it."""
    flops: float
    bytes: float
    priced_by: tuple[str, ...]
    opcode: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "op": self.name,
            "seconds": self.seconds,
            "runs": self.runs,
            "bound_by": self.resource.value,
            "layer": self.place,
            "source": self.source,
            "flops": self.flops,
            "bytes": self.bytes,
            "priced_by": list(self.priced_by),
        }

    @property
    def short_source(self) -> str:
        """The last folder, the file and the line."""
        return short(self.source)


def place_of(span: Span) -> str:
    """Place in the model that an op belongs to: its path of names, else its source line, else its kind."""
    return clean(span.layer) or short(span.source) or f"unnamed {span.opcode}"


@lru_cache(maxsize=65536)
def clean(layer: str) -> str:
    """A path of names without private names, glue and repetitions."""
    parts: list[str] = []
    for part in layer.replace("\\'", "'").split("/"):
        kernel = _KERNEL.match(part)
        name = kernel[1] if kernel else part
        hidden = name.startswith("_") or name in GLUE or _REMARK.fullmatch(name)
        if name and not hidden and name not in parts[-1:]:
            parts.append(name)
    return "/".join(parts)


def short(source: str) -> str:
    """``/long/path/decoder/module.py:70`` as ``decoder/module.py:70``."""
    return "/".join(source.split("/")[-2:])


def by_op(timeline: Timeline) -> list[OpCost]:
    """The ops of the core, waits among them, the most expensive first."""
    return _grouped(timeline, lambda span: f"{span.opcode} {span.name}")


def by_place(timeline: Timeline, rows: int = 12) -> list[OpCost]:
    """The places of the core's time at the depth that fills about ``rows``, the most expensive first."""
    names = roll_up(seconds_by_place(timeline), rows)
    return _grouped(timeline, lambda span: names[place_of(span)])


def seconds_by_place(timeline: Timeline) -> dict[str, float]:
    """Seconds of the core by full path; sums to the step less its gaps."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span, times in core(timeline):
        seconds[place_of(span)] += span.seconds * times
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


def core(timeline: Timeline) -> Iterable[tuple[Span, float]]:
    """The ops that run one after another, and the waits between them, with how often each runs."""
    return ((span, times) for span, times in timeline.leaves() if span.lane == "core")


def roll_up(seconds: Mapping[str, float], rows: int) -> dict[str, str]:
    """Prefix that stands for each path: the heaviest are opened while there is room."""
    group = {path: (path if _is_source(path) else path.split("/")[0]) for path in seconds}
    closed: set[str] = set()
    while True:
        weight: defaultdict[str, float] = defaultdict(float)
        members: dict[str, list[str]] = defaultdict(list)
        for path, name in group.items():
            weight[name] += seconds[path]
            members[name].append(path)
        candidates = [
            name for name in sorted(weight, key=lambda n: -weight[n]) if name not in closed
        ]
        if not candidates or len(weight) >= rows:
            return group
        name = candidates[0]
        deeper = {path: _deeper(path, name) for path in members[name]}
        if len(weight) - 1 + len(set(deeper.values())) > rows:
            closed.add(name)
            continue
        if set(deeper.values()) == {name}:
            closed.add(name)
        group |= deeper


def _deeper(path: str, prefix: str) -> str:
    if path == prefix or _is_source(path):
        return path
    rest = path[len(prefix) + 1 :].split("/")[0]
    return f"{prefix}/{rest}"


def _is_source(path: str) -> bool:
    return ".py:" in path or path.startswith("unnamed ")


def _grouped(timeline: Timeline, key: Callable[[Span], str]) -> list[OpCost]:
    groups: dict[str, list[tuple[Span, float]]] = defaultdict(list)
    for span, times in core(timeline):
        groups[key(span)].append((span, times))
    return sorted((_cost(name, spans) for name, spans in groups.items()), key=lambda c: -c.seconds)


def _cost(name: str, spans: Sequence[tuple[Span, float]]) -> OpCost:
    seconds: defaultdict[Resource, float] = defaultdict(float)
    sources: defaultdict[str, float] = defaultdict(float)
    for span, times in spans:
        seconds[span.resource] += span.seconds * times
        sources[span.source] += span.seconds * times
    largest = max(spans, key=lambda pair: pair[0].seconds * pair[1])[0]
    named = {source: spent for source, spent in sources.items() if source}
    return OpCost(
        name=name,
        seconds=sum(seconds.values()),
        runs=round(sum(times for _, times in spans)),
        resource=max(seconds, key=lambda r: seconds[r]),
        place=place_of(largest),
        source=max(named, key=lambda s: named[s], default=""),
        flops=sum(span.flops * times for span, times in spans),
        bytes=sum(span.bytes * times for span, times in spans),
        priced_by=tuple(sorted({span.price_source for span, _ in spans if span.priced_by})),
        opcode=largest.opcode,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Windowed:
    """The windowed einsums of a step.

    The SPMD partitioner makes them of a gather and a matmul, or a matmul and a scatter, above a size; as a loop,
    or unrolled. On v6e-8 steps with them took 9 to 17 % longer (see :mod:`systolic.chips.flags`).
    """

    einsums: int
    """Matmuls of the model, each counted once however often it runs."""
    seconds: float
    """Seconds of the step: their partial matmuls, and what else the core does for them or waits for."""


def names(module: Module) -> Set[str]:
    """Op names of the matmuls that the partitioner has windowed: the permutes that it made bear their names."""
    counts: Counter[str] = Counter()
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.opcode in ("collective-permute", "collective-permute-start"):
                name = instruction.op_name
                if name.rpartition("/")[2] == "dot_general":
                    counts[name] += 1
    return {name for name, number in counts.items() if number >= LEAST}


def windowed(module: Module, timeline: Timeline) -> Windowed | None:
    """The windowed einsums of a simulated step; None where it has none."""
    einsums = names(module)
    if not einsums:
        return None
    bearing = {
        instruction.name
        for computation in module.computations.values()
        for instruction in computation
        if named(module, computation, instruction).op_name in einsums
    }
    seconds = sum(
        span.seconds * times
        for span, times in timeline.leaves()
        if span.lane == "core" and span.name in bearing
    )
    return Windowed(einsums=len(einsums), seconds=seconds)


def note_of(cost: Windowed, step_seconds: float) -> str:
    """One line for people."""
    share = cost.seconds / step_seconds if step_seconds else 0.0
    return f"{cost.einsums} windowed einsums take {duration(cost.seconds)} ({share:.0%}); turn them off with {OFF}"
