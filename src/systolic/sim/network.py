"""The torus and the data-centre network: how long a collective takes.

Rules: a gather of V bytes over a ring of n needs (n-1)/n V over both directions of a link, a line
without wrap over one; several axes of a group work at once (How to Scale Your Model, sharding.md).
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from systolic.chips import Slice
from systolic.hlo import Groups, Instruction
from systolic.sim.rates import Rates

Place = tuple[int, ...]
"""(x, y, z, core, slice) of a device."""


@dataclass(frozen=True)
class Extent:
    """Where a group lies."""

    axes: tuple[tuple[int, bool], ...]
    """(chips, ring) along each torus axis that it spans; ring where the axis wraps."""
    strides: tuple[int, ...]
    """Chips from one member to the next along each of those axes: as many groups share its links."""
    cores: int
    """Devices of one chip in it."""
    slices: int
    names: tuple[str, ...]
    """Of those axes: ``x``, ``y``, ``z``."""

    @property
    def chips(self) -> int:
        """In one slice."""
        return math.prod(size for size, _ in self.axes)


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective and the lanes it occupies."""

    seconds: float
    lanes: tuple[str, ...]
    bytes: float
    """On the links, one device's."""


class Network:
    """The links of a slice."""

    def __init__(self, on: Slice, rates: Rates, places: Sequence[Place] | None = None) -> None:
        self.on, self.rates = on, rates
        self.places = list(places) if places else default_places(on)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Chips along x, y, z of one slice."""
        return (*self.on.topology, 1, 1, 1)[:3]

    @cached_property
    def wrap(self) -> tuple[bool, ...]:
        """Whether each of the three axes is a ring."""
        return (*self.on.wrap, False, False, False)[:3]

    def extent(self, group: Sequence[int]) -> Extent:
        """Axes and lengths of the smallest box around a group."""
        places = [self.places[device] for device in group]
        axes, names, strides = [], [], []
        for axis in range(3):
            values = sorted({place[axis] for place in places})
            if len(values) > 1:
                stride = min(b - a for a, b in itertools.pairwise(values))
                ring = self.wrap[axis] and len(values) * stride == self.shape[axis]
                axes.append((len(values), ring))
                strides.append(stride)
                names.append("xyz"[axis])
        return Extent(
            axes=tuple(axes),
            strides=tuple(strides),
            cores=len({place[3] for place in places}),
            slices=len({place[4] for place in places}),
            names=tuple(names),
        )

    def collective(self, kind: str, groups: Groups, out_bytes: float, in_bytes: float) -> Cost:
        """``kind`` is all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute.

        Bytes are those of one device's result and operand.
        """
        if kind in ("collective-permute", "collective-broadcast") or groups.pairs:
            return self._permute(groups, in_bytes)
        if groups.size <= 1:
            return Cost(0.0, (), 0.0)
        extent = self.extent(groups.groups[0])
        whole = max(out_bytes, in_bytes)
        seconds, moved = 0.0, 0.0
        within = extent.chips * extent.cores
        if within > 1:
            here = whole if kind == "all-reduce" or extent.slices == 1 else whole / extent.slices
            part, moved = self._within(kind, extent, here)
            seconds += part
        lanes = extent.names or (("die",) if extent.cores > 1 else ())
        if extent.slices > 1:
            share = whole / max(within, 1) if kind != "all-to-all" else whole
            rounds = {"all-reduce": 2.0}.get(kind, 1.0)
            over = rounds * (extent.slices - 1) / extent.slices * share
            seconds += over / self.rates.dcn
            moved += over
            lanes = (*lanes, "dcn")
        return Cost(seconds + self.rates.collective_seconds, lanes, moved)

    def _within(self, kind: str, extent: Extent, whole: float) -> tuple[float, float]:
        """Seconds and bytes inside a slice; ``whole`` is the gathered array on one device."""
        chips, axes = extent.chips, extent.axes
        cores = extent.cores
        spans = list(zip(axes, extent.strides, strict=True))
        hops = sum(stride * (size // 2 if ring else size - 1) for (size, ring), stride in spans)
        latency = hops * self.rates.hop_seconds
        if not axes:  # the two dies of a chip
            rate = self.rates.chip.die_to_die_bytes_per_second or 4 * self.rates.link
            rounds = 2.0 if kind == "all-reduce" else 1.0
            return rounds * whole / 2 / rate, rounds * whole / 2
        # Each axis carries its share of the bytes at both directions' rate on a ring, one on a line;
        # groups whose members alternate along an axis share its links.
        rate = sum(self.rates.link * (2.0 if ring else 1.0) / stride for (_, ring), stride in spans)
        n = chips * cores
        if kind == "all-to-all":
            # Bisection: on a ring of n a quarter of an all-gather's time, on a line half (n/4 or n/2 hops).
            worst = max(
                whole * cores * size * stride / (8.0 if ring else 4.0) / self.rates.link
                for (size, ring), stride in spans
            )
            return worst + latency, whole
        moved = whole * (n - 1) / n
        # The devices of one chip share its links.
        seconds = moved / rate
        rounds = 2.0 if kind == "all-reduce" else 1.0
        return rounds * (seconds + latency), rounds * moved

    def _permute(self, groups: Groups, bytes_: float) -> Cost:
        """Every pair along the shortest way, dimension after dimension; the busiest link decides."""
        load: dict[tuple[int, ...], int] = {}
        most_hops, crossing = 0, 0
        for pair in groups.groups:
            if len(pair) < 2 or pair[0] == pair[1]:
                continue
            source, target = self.places[pair[0]], self.places[pair[1]]
            if source[4] != target[4]:
                crossing += 1
                continue
            hops = 0
            at = list(source[:3])
            for axis in range(3):
                length = self.shape[axis]
                distance = target[axis] - at[axis]
                step = 1 if distance > 0 else -1
                if self.wrap[axis] and abs(distance) > length / 2:
                    step = -step
                    distance = length - abs(distance)
                for _ in range(abs(distance)):
                    key = (*at, source[4], axis, step)
                    load[key] = load.get(key, 0) + 1
                    at[axis] = (at[axis] + step) % length
                    hops += 1
            most_hops = max(most_hops, hops)
        busiest = max(load.values(), default=0)
        seconds = busiest * bytes_ / self.rates.link + most_hops * self.rates.hop_seconds
        names = tuple(sorted({"xyz"[key[4]] for key in load}))
        if crossing:
            seconds = max(seconds, bytes_ / self.rates.dcn)
            names = (*names, "dcn")
        return Cost(seconds, names or ("die",), bytes_)


_TARGETS = re.compile(r"_xla_megascale_target=\{\{([^}]*)\}")
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


def crossings(transfer: Instruction) -> float:
    """How often the array of a ``send`` or ``recv`` crosses the data-centre network.

    A collective between slices is one pair of them: the runtime reduces or gathers among the group
    of slices that the attributes list, over a ring as inside a slice.
    """
    kind, group = _TYPE.search(transfer.rest), _TARGETS.search(transfer.rest)
    if kind is None or group is None:
        return 1.0
    slices = max(group[1].count(",") + 1, 1)
    if kind[1] == "ALL_REDUCE":
        return 2.0 * (slices - 1) / slices
    if kind[1] == "ALL_GATHER":
        return slices - 1.0 if transfer.opcode == "send" else (slices - 1.0) / slices
    return 1.0


def default_places(on: Slice) -> list[Place]:
    """Devices in JAX's order: x fastest, then y, z, then cores, slice after slice."""
    x, y, z = (*on.topology, 1, 1, 1)[:3]
    cores = on.chip.devices_per_chip or 1
    return [
        (a, b, c, core, number)
        for number in range(on.num_slices)
        for c in range(z)
        for b in range(y)
        for a in range(x)
        for core in range(cores)
    ]
