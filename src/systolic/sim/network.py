"""The torus and the data-centre network: how long a collective takes.

Rules: a gather of V bytes over a ring of n needs (n-1)/n V over both directions of a link, a line
without wrap over one; several axes of a group work at once (How to Scale Your Model, sharding.md).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from systolic.chips import Slice
from systolic.core.errors import NotFoundError
from systolic.hlo import SLICE, Crossing, Groups, Instruction, crossing_of
from systolic.sim.calibration import constant
from systolic.sim.rates import Rates

PERMUTE_SECONDS: float = constant("network.permute_seconds")
ALL_REDUCE: float = constant("network.all_reduce")
ALL_REDUCE_OVER_RINGS: float = constant("network.all_reduce_over_rings")
REDUCE_SCATTER: float = constant("network.reduce_scatter")
DIE_LINKS: float = constant("network.die_links")
DIE_SECONDS: float = constant("network.die_seconds")
DIE_SHARE: float = constant("network.die_share")

_ROUNDS = {"all-reduce": 2}
"""A reduce-scatter and an all-gather."""
_RINGS = ("all-gather", "reduce-scatter")
"""Kinds that NCCL has no other algorithm for over several switches."""
DIES = "die"
"""Lane of collectives between the devices of one chip."""

Place = tuple[int, ...]
"""(x, y, z, core, slice) of a device."""


Link = tuple[int, ...]
"""(x, y, z, slice, axis): the link of a chip to the next one along a torus axis."""
LINK_SHARE: Mapping[str, Mapping[str, float]] = constant("network.switched_share")
LINK_EFFICIENCY: float = constant("network.switched_link_efficiency")
NET_SHARE: float = constant("network.switched_net_share")
TCP_SECONDS: float = constant("network.switched_tcp_seconds")
TCP_BYTES: float = constant("network.switched_tcp_bytes")
CALL_SECONDS: float = constant("network.switched_call_seconds")
HOP_SECONDS: float = constant("network.switched_hop_seconds")
RING: int = constant("network.switched_ring")
RAMP_SECONDS: float = constant("network.switched_ramp_seconds")
RAMP_BYTES: float = constant("network.switched_ramp_bytes")
NET_HOP_SECONDS: float = constant("network.switched_net_hop_seconds")


@dataclass(frozen=True, kw_only=True)
class AxisSpan:
    """The part of one torus axis that a group takes."""

    name: str
    """``x``, ``y`` or ``z``."""
    reach: int
    """Chips from the first to the last member, both counted; the whole axis on a ring."""
    ring: bool
    """Whether the members go around the axis, which has wraparound links."""
    rows: int
    """Lines along the axis, side by side, that have members."""
    share: int
    """Groups that use its busiest link at once, this one included."""

    @property
    def ways(self) -> float:
        """Directions that the members can send in."""
        return 2.0 if self.ring else 1.0

    @property
    def hops(self) -> int:
        """Hops to the farthest member."""
        return self.reach // 2 if self.ring else self.reach - 1


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Place of a group on the torus."""

    spans: tuple[AxisSpan, ...]
    """Spans along each torus axis that it takes more than one chip of."""
    members: int
    """Members in one slice, the most."""
    cores: int
    """Devices of one chip in it."""
    slices: int


@dataclass(frozen=True)
class CollectiveCost:
    """Seconds of a collective and the lanes it occupies."""

    seconds: float
    lanes: tuple[str, ...]
    """One way of a torus axis (``x+``), or a network."""
    bytes: float
    """Bytes of one device on the links."""
    steps: int = 1
    """Steps one after the other, each to the next chip."""
    share: float = 1.0
    """Share of the directions of its links inside a slice that it reaches."""
    least: float = 0.0
    """Seconds of its bytes inside a slice at the published rate of the links, with nothing fixed; 0 without a published rate."""


class Network:
    """The links of a slice."""

    def __init__(self, on: Slice, rates: Rates, places: Sequence[Place] | None = None) -> None:
        self.on, self.rates = on, rates
        self.places = list(places) if places else default_places(on)
        self._extents: dict[Groups, list[Extent]] = {}
        self._dcn_rates: dict[Groups | Crossing, float] = {}

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Chips along x, y, z of one slice."""
        return (*self.on.topology, 1, 1, 1)[:3]

    @cached_property
    def wrap(self) -> tuple[bool, ...]:
        """Whether each of the three axes is a ring."""
        return (*self.on.wrap, False, False, False)[:3]

    def extents(self, groups: Groups) -> list[Extent]:
        """Extents of the groups, each distinct one once."""
        ids = [[self.places[device] for device in group] for group in groups.groups]
        taken = [self._links(places) for places in ids]
        users = Counter(
            link for lines in taken for axis_links in lines.values() for link in axis_links
        )
        return list(dict.fromkeys(map(self._extent, ids, taken, itertools.repeat(users))))

    def _links(self, places: Sequence[Place]) -> dict[int, list[Link]]:
        """The links of a group by torus axis: on each of its lines from its first chip to its last, or all around."""
        links: dict[int, list[Link]] = {}
        for axis in range(3):
            at = sorted({place[axis] for place in places})
            if len(at) < 2:
                continue
            first, reach, ring = self._arc(axis, at)
            length = self.shape[axis]
            around = [(first + n) % length for n in range(reach if ring else reach - 1)]
            lines = {(*place[:axis], 0, *place[axis + 1 : 3], place[4]) for place in places}
            links[axis] = [
                (*line[:axis], n, *line[axis + 1 :], axis) for line in lines for n in around
            ]
        return links

    def _arc(self, axis: int, at: Sequence[int]) -> tuple[int, int, bool]:
        """First chip, chips and whether it is a ring: the part of an axis that joins those places, in order."""
        length = self.shape[axis]
        if not self.wrap[axis]:
            return at[0], at[-1] - at[0] + 1, False
        gaps = [(after - before) % length for before, after in itertools.pairwise([*at, at[0]])]
        widest = max(gaps)
        if widest == min(gaps):
            return at[0], length, True
        # The other way round than the widest gap.
        return at[(gaps.index(widest) + 1) % len(at)], length - widest + 1, False

    def _extent(
        self,
        places: Sequence[Place],
        lines: Mapping[int, Sequence[Link]],
        users: Mapping[Link, int],
    ) -> Extent:
        spans = []
        for axis, links in lines.items():
            at = sorted({place[axis] for place in places})
            _, reach, ring = self._arc(axis, at)
            spans.append(
                AxisSpan(
                    name="xyz"[axis],
                    reach=reach,
                    ring=ring,
                    rows=len({(*place[:axis], *place[axis + 1 : 3]) for place in places}),
                    share=max(users[link] for link in links),
                )
            )
        return Extent(
            spans=tuple(spans),
            members=max(Counter(place[4] for place in places).values()),
            cores=len({place[3] for place in places}),
            slices=len({place[4] for place in places}),
        )

    def on_sparse_core(self, cost: CollectiveCost) -> CollectiveCost:
        """An all-gather that one SparseCore runs: no faster than that core, where its generation was measured."""
        rate = self.rates.chip.measured_sparse_core_gather_bytes_per_second
        return cost if rate is None else replace(cost, seconds=max(cost.seconds, cost.bytes / rate))

    def collective(
        self, kind: str, groups: Groups, out_bytes: float, in_bytes: float
    ) -> CollectiveCost:
        """The time of the slowest group while all of them run.

        Args:
            kind: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute.
            groups: The devices of each.
            out_bytes: Of one device's result.
            in_bytes: Of one device's operand.
        """
        if kind in ("collective-permute", "collective-broadcast") or groups.pairs:
            return self._permute(groups, in_bytes)
        if groups.size <= 1:
            return CollectiveCost(0.0, (), 0.0)
        if groups not in self._extents:
            joined = Groups(tuple(group for group in groups.groups if len(group) > 1))
            self._extents[groups] = self.extents(joined)
            self._dcn_rates[groups] = self._dcn(
                [self.places[device] for device in group] for group in joined.groups
            )
        whole, dcn = max(out_bytes, in_bytes), self._dcn_rates[groups]
        costs = [self._cost(kind, extent, whole, dcn) for extent in self._extents[groups]]
        lanes = dict.fromkeys(lane for cost in costs for lane in cost.lanes)
        slowest = max(costs, key=lambda cost: cost.seconds)
        return replace(slowest, lanes=tuple(lanes))

    def _cost(self, kind: str, extent: Extent, whole: float, dcn: float) -> CollectiveCost:
        seconds, moved = 0.0, 0.0
        within, least = extent.members, 0.0
        if within > 1:
            # What came over DCN goes through the links of the slice too; only an exchange leaves the rest out.
            here = whole / extent.slices if kind == "all-to-all" else whole
            part, moved = self._within(kind, extent, here)
            seconds, least = seconds + part, self._least(kind, extent, here)
        names = tuple(f"{span.name}{way}" for span in extent.spans for way in "+-")
        lanes = names or ((DIES,) if extent.cores > 1 else ())
        if extent.slices > 1:
            share = whole / max(within, 1) if kind != "all-to-all" else whole
            over = _ROUNDS.get(kind, 1) * (extent.slices - 1) / extent.slices * share
            seconds += over / dcn
            moved += over
            lanes = (*lanes, "dcn")
        steps = sum(span.hops for span in extent.spans)
        fixed = self.rates.collective_seconds
        if lanes == (DIES,) and self._die_peak:
            fixed = DIE_SECONDS
        share = _summed(kind, extent)
        return CollectiveCost(seconds + fixed, lanes, moved, max(steps, 1), share, least)

    @property
    def _die_peak(self) -> float | None:
        """Published bytes/s between the dies of a chip, one way; None where no source has it."""
        return self.rates.chip.die_to_die_bytes_per_second

    @property
    def _die_rate(self) -> float:
        """Bytes/s between the dies of a chip that transfers reach, one way."""
        return DIE_SHARE * self._die_peak if self._die_peak else DIE_LINKS * self.rates.link

    def _within(self, kind: str, extent: Extent, whole: float) -> tuple[float, float]:
        """Seconds and bytes inside a slice; ``whole`` is the gathered array on one device."""
        latency = sum(span.hops for span in extent.spans) * self.rates.hop_seconds
        rounds = _ROUNDS.get(kind, 1)
        if not extent.spans:  # the two dies of a chip
            return rounds * whole / 2 / self._die_rate, rounds * whole / 2
        n = extent.members
        if kind == "all-to-all":
            # Half of the members send half of what they have to the other half, over every line.
            return max(
                n * whole / 4 * span.share / (span.rows * span.ways * self.rates.link)
                for span in extent.spans
            ) + latency, whole
        # Each axis carries its share of the bytes, at both directions' rate on a ring; the devices of
        # one chip share its links, and so do groups that lie in one place.
        rate = sum(self.rates.link * span.ways / span.share for span in extent.spans)
        moved = whole * (n - 1) / n
        rate *= _summed(kind, extent)
        return rounds * (moved / rate + latency), rounds * moved

    def _least(self, kind: str, extent: Extent, whole: float) -> float:
        """Seconds inside a slice below which no algorithm gets: the bytes over all the links at their published rate."""
        chip, n = self.rates.chip, extent.members
        if not extent.spans:  # the two dies of a chip
            return _ROUNDS.get(kind, 1) * whole / 2 / (self._die_peak or math.inf)
        link = chip.ici_bytes_per_second_per_link
        if not link:
            return 0.0
        if kind == "all-to-all":
            half = n // 2
            return max(
                half * (n - half) / n * whole * span.share / (span.rows * span.ways * link)
                for span in extent.spans
            )
        rate = sum(link * span.ways / span.share for span in extent.spans)
        moved = (n - 1) / n * whole
        if kind != "all-reduce":
            return moved / rate
        # All devices together send 2 (n - 1) arrays, over every link between two of them, both ways.
        chips = n / extent.cores
        joined = sum(
            2 * span.rows * (chips / span.rows - (not span.ring)) / span.share
            for span in extent.spans
        )
        if joined <= 0:
            return 2 * moved / rate
        return min(2 * moved / rate, 2 * (n - 1) * whole / (joined * link))

    def _permute(self, groups: Groups, bytes_: float) -> CollectiveCost:
        """Every pair along the shortest way, dimension after dimension; the busiest link decides, or the dies of a chip."""
        load: dict[tuple[int, ...], int] = {}
        between_dies = False
        most_hops, crossing = 0, list[tuple[Place, Place]]()
        for pair in groups.groups:
            if len(pair) < 2 or pair[0] == pair[1]:
                continue
            source, target = self.places[pair[0]], self.places[pair[1]]
            if source[4] != target[4]:
                crossing.append((source, target))
                continue
            between_dies |= source[:3] == target[:3]
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
        least = busiest * bytes_ / (self.rates.chip.ici_bytes_per_second_per_link or math.inf)
        seconds = busiest * bytes_ / self.rates.link + most_hops * self.rates.hop_seconds
        if busiest:
            seconds += PERMUTE_SECONDS
        names = tuple(sorted({f"{'xyz'[key[4]]}{'+' if key[5] > 0 else '-'}" for key in load}))
        if between_dies:
            fixed = DIE_SECONDS if self._die_peak else PERMUTE_SECONDS
            seconds = max(seconds, bytes_ / self._die_rate + fixed)
            least = max(least, bytes_ / (self._die_peak or math.inf))
            names = (*names, DIES)
        if crossing:
            seconds = max(seconds, bytes_ / self._dcn(crossing, pairs=True))
            names = (*names, "dcn")
        return CollectiveCost(seconds, names, bytes_, least=least)

    def between(self, transfer: Instruction) -> float:
        """Bytes/s, one way, of each device that takes part in a ``send`` or ``recv`` between slices."""
        crossing = crossing_of(transfer)
        if crossing is None:
            return self.rates.dcn
        if crossing not in self._dcn_rates:
            self._dcn_rates[crossing] = self._dcn(
                map(self._numbered, crossing.devices), pairs=crossing.kind == "ONE_TO_ONE"
            )
        return self._dcn_rates[crossing]

    def _numbered(self, numbers: Iterable[int]) -> list[Place]:
        """Places of devices as a target numbers them: by slice, and in it x fastest, whatever the mesh."""
        x, y, _ = self.shape
        cores = self.on.chip.devices_per_chip or 1
        places = []
        for slice_, number in (divmod(number, SLICE) for number in numbers):
            chip, core = divmod(number, cores)
            places.append((chip % x, chip // x % y, chip // (x * y), core, slice_))
        return places

    def _dcn(self, groups: Iterable[Sequence[Place]], *, pairs: bool = False) -> float:
        """Bytes/s, one way, of each member of those groups that cross the data-centre network, all at once.

        Those that send share the network of their host evenly, and so do those that receive. A device that is alone
        there is taken to reach all of it, as far as its chip's PCIe goes; no published run measures that.
        """
        joined = [group for group in groups if len({place[4] for place in group}) > 1]
        ways = zip(*joined, strict=True) if pairs else [itertools.chain(*joined)]
        on, rates = self.on, self.rates
        bounds = (on.chips_per_host_bounds if on.num_hosts > on.num_slices else None) or self.shape
        of_host, of_chip = 1, 1
        for places in ways:
            chips = Counter((*place[:3], place[4]) for place in places)
            hosts = Counter[Place]()
            for (*at, number), count in chips.items():
                hosts[*(n // size for n, size in zip(at, bounds, strict=True)), number] += count
            of_chip = max([of_chip, *chips.values()])
            of_host = max([of_host, *hosts.values()])
        per_host, per_chip = on.num_devices / on.num_hosts, on.chip.devices_per_chip or 1
        return min(rates.dcn * (per_host / of_host), rates.host * (per_chip / of_chip))


def _summed(kind: str, extent: Extent) -> float:
    """Share of the directions of its links that a collective reaches; sums reach less than gathers.

    Over one wrapped axis the compiler names one strategy for both ("StrategyRing", 1 color), and no measurement says that it
    reaches less than a gather. Elsewhere an all-reduce has a color for each direction, and a reduce-scatter one ring, one way,
    through all members; it is never above an all-reduce, which has both of its halves to do. On a line the ring's way back is
    the links' other direction.
    """
    rings, axes = sum(span.ring for span in extent.spans), len(extent.spans)
    if kind not in ("all-reduce", "reduce-scatter") or (rings == axes == 1):
        return 1.0
    summed = ALL_REDUCE_OVER_RINGS if rings > 1 else ALL_REDUCE
    if kind == "all-reduce" or axes == 1:
        return summed
    return max(REDUCE_SCATTER * 2 / max(axes, 2), summed / 2)


def crossings(transfer: Instruction, num_slices: int) -> tuple[float, str]:
    """Number of times that the array of a ``send`` or ``recv`` crosses the data-centre network, one way, and a note.

    Each member of a ring over the slices passes on what its neighbours lack, as inside a slice. A
    transfer that is not understood counts as an all-reduce of all slices, and the note says so.
    """
    pattern = crossing_of(transfer)
    times = None if pattern is None else _times(pattern, sends=transfer.opcode == "send")
    if times is not None:
        return times, ""
    # Attributes up to the target, which can list thousands of devices.
    attributes = re.sub(
        r".*?(_xla_megascale_\w+=.{0,60}).*", r"\1…", transfer.rest, flags=re.DOTALL
    )
    note = f"{transfer.name} between slices is not understood ({attributes[:80].strip(', ')}): taken as an all-reduce of all {num_slices}"
    return 2.0 * (num_slices - 1) / num_slices, note


@lru_cache(maxsize=64)
def _times(crossing: Crossing, *, sends: bool) -> float | None:
    """Crossings of the group that crosses most; None for a kind that is not known."""
    if crossing.kind == "ONE_TO_ONE":
        return 1.0 if any(source != target for source, target in crossing.groups) else 0.0
    most = 0.0
    for group in crossing.groups:
        slices, size = len(set(group)), len(group)
        beyond = size - min(Counter(group).values())
        """Members in other slices."""
        match crossing.kind:
            case "ALL_REDUCE":
                times = 2.0 * (slices - 1) / slices
            case "ALL_GATHER":
                times = float(beyond) if sends else beyond / size
            case "REDUCE_SCATTER":
                times = beyond / size if sends else float(beyond)
            case "ALL_TO_ALL":
                times = beyond / size
            case _:
                return None
        most = max(most, times)
    return most


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """The links of one GPU, one way, as they are reached; None where the catalogue has no number."""

    chip: str
    domain: int
    """GPUs that one switch joins."""
    link: float | None
    """Bytes/s of a GPU into that switch, as published or, with ``shares`` empty, as measured."""
    shares: Mapping[str, float]
    """Share of that rate by kind of collective."""
    card: float | None
    """Bytes/s of a GPU into the network between domains."""
    tcp: bool = False
    """Whether that network carries TCP, as some clouds' machines have it."""

    def collective(
        self, kind: str, groups: Groups, out_bytes: float, in_bytes: float
    ) -> CollectiveCost:
        """Cost of a collective, as :meth:`systolic.sim.network.Network.collective` has it.

        Raises:
            NotFoundError: the catalogue lacks the rate of a link that it needs.
        """
        if kind in ("collective-permute", "collective-broadcast") or groups.pairs:
            return self._pairs(groups.groups, in_bytes)
        if groups.size <= 1:
            return CollectiveCost(0.0, (), 0.0)
        whole = max(out_bytes, in_bytes)
        shapes = {self._shape(group) for group in groups.groups if len(group) > 1}
        costs = [self._cost(kind, shape, whole) for shape in sorted(shapes)]
        return max(costs, key=lambda cost: cost.seconds)

    def _shape(self, group: Sequence[int]) -> tuple[int, int, int, int]:
        """Members, domains, and the most and the fewest members in one domain."""
        inside = Counter(self._domain(device) for device in group).values()
        return len(group), len(inside), max(inside), min(inside)

    def _cost(self, kind: str, shape: tuple[int, int, int, int], whole: float) -> CollectiveCost:
        size, domains, most, fewest = shape
        rounds = _ROUNDS.get(kind, 1)
        moved = rounds * whole * (size - 1) / size
        # What crosses into a domain, by GPU of it. NCCL's ring of a gather or a scatter goes through every GPU, so nearly the
        # whole array passes each domain's cards. An all-reduce is a tree of domains; in an exchange each GPU has its own.
        beyond = rounds * whole * (size - fewest) / size
        if kind in _RINGS:
            beyond = moved
        beyond /= 1 if kind in ("all-to-all", "ragged-all-to-all") else fewest
        seconds = 0.0
        if most > 1:
            # The switch adds what an all-reduce of the domain sends it: the array goes there and back whole.
            added = kind == "all-reduce" and domains == 1 and bool(self.shares)
            seconds = (rounds * whole if added else moved) / self._link(kind)
        if domains > 1:
            seconds = max(seconds, beyond / self._card())
        steps = most - 1 if most <= RING else RING - 1 + 2 * math.log2(most / RING)
        net_steps = math.log2(domains) if kind == "all-reduce" else domains - 1
        hops = steps * HOP_SECONDS + net_steps * NET_HOP_SECONDS
        ramp = RAMP_SECONDS * min(moved / RAMP_BYTES, 1.0)
        if domains > 1 and self.tcp:
            ramp += TCP_SECONDS * min(moved / TCP_BYTES, 1.0)
        lanes = ("dcn",) if domains > 1 else ("nvlink",)
        return CollectiveCost(seconds + rounds * hops + ramp + CALL_SECONDS, lanes, moved)

    def _pairs(self, pairs: Sequence[Sequence[int]], size: float) -> CollectiveCost:
        far = any(self._domain(pair[0]) != self._domain(pair[-1]) for pair in pairs)
        rate, hop = (
            (self._card(), NET_HOP_SECONDS) if far else (self._link("all-to-all"), HOP_SECONDS)
        )
        return CollectiveCost(
            size / rate + hop + CALL_SECONDS, ("dcn",) if far else ("nvlink",), size
        )

    def _domain(self, device: int) -> int:
        return device // self.domain

    def _link(self, kind: str) -> float:
        rate = self._known(self.link, "links between the GPUs of a host")
        return rate * self.shares.get(kind, self.shares.get("all-to-all", 1.0))

    def _card(self) -> float:
        return self._known(self.card, "network between its hosts")

    def _known(self, rate: float | None, what: str) -> float:
        if rate is None:
            raise NotFoundError(
                f"the catalogue has no rate for the {what} of {self.chip}; add it to your own catalogue"
            )
        return rate


def switched(on: Slice) -> Switched:
    """The links of a GPU slice, from the catalogue."""
    chip = on.chip
    published = chip.ici_bytes_per_second_per_link
    shares: Mapping[str, float] = {}
    if chip.compute_capability is not None and published is not None:
        link: float | None = published
        shares = LINK_SHARE.get(chip.compute_capability, LINK_SHARE["all"])
    else:
        rate = published or chip.pcie_bytes_per_second_per_chip
        link = chip.measured_ici_bytes_per_second_per_link
        link = link or (None if rate is None else rate * LINK_EFFICIENCY)
    host = chip.dcn_bytes_per_second_per_host
    return Switched(
        chip=chip.name,
        domain=chip.max_pod_chips or chip.chips_per_host or on.num_chips,
        link=link,
        shares=shares,
        card=None if host is None else host / (chip.chips_per_host or 1) * NET_SHARE,
        tcp=host in dict(chip.machine_dcn_bytes_per_second).values(),
    )
