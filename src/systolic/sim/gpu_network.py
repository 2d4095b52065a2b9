"""Collectives of GPUs: switches inside a host or rack, a network card for each GPU beyond.

A gather of V bytes over n GPUs moves (n-1)/n V into each; what comes from other domains shares the
cards of the group's GPUs (How to Scale Your Model, gpus.md). Each step of a ring has a latency.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from systolic.chips import Slice
from systolic.core.errors import NotFoundError
from systolic.hlo import Groups
from systolic.sim.calibration import constant
from systolic.sim.network import CollectiveCost

LINK_EFFICIENCY: float = constant("switched.link_efficiency")
CALL_SECONDS: float = constant("switched.call_seconds")
HOP_SECONDS: float = constant("switched.hop_seconds")
NET_HOP_SECONDS: float = constant("switched.net_hop_seconds")
_ROUNDS = {"all-reduce": 2}
"""A reduce-scatter and an all-gather."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """The links of one GPU, one way, as they are reached; None where the catalogue has no number."""

    chip: str
    domain: int
    """GPUs that one switch joins."""
    link: float | None
    """Bytes/s of a GPU into that switch."""
    card: float | None
    """Bytes/s of a GPU into the network between domains."""

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
        # What comes from other domains: in a gather the GPUs of a domain share it, in an exchange
        # each has its own.
        beyond = rounds * whole * (size - fewest) / size
        beyond /= 1 if kind in ("all-to-all", "ragged-all-to-all") else fewest
        seconds = moved / self._link() if most > 1 else 0.0
        if domains > 1:
            seconds = max(seconds, beyond / self._card())
        hops = (most - 1) * HOP_SECONDS + (domains - 1) * NET_HOP_SECONDS
        lanes = ("dcn",) if domains > 1 else ("nvlink",)
        return CollectiveCost(seconds + rounds * hops + CALL_SECONDS, lanes, moved)

    def _pairs(self, pairs: Sequence[Sequence[int]], size: float) -> CollectiveCost:
        far = any(self._domain(pair[0]) != self._domain(pair[-1]) for pair in pairs)
        rate, hop = (self._card(), NET_HOP_SECONDS) if far else (self._link(), HOP_SECONDS)
        return CollectiveCost(
            size / rate + hop + CALL_SECONDS, ("dcn",) if far else ("nvlink",), size
        )

    def _domain(self, device: int) -> int:
        return device // self.domain

    def _link(self) -> float:
        return self._known(self.link, "links between the GPUs of a host")

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
    published = chip.ici_bytes_per_second_per_link or chip.pcie_bytes_per_second_per_chip
    link = chip.measured_ici_bytes_per_second_per_link
    if link is None and published is not None:
        link = published * LINK_EFFICIENCY
    host = chip.dcn_bytes_per_second_per_host
    return Switched(
        chip=chip.name,
        domain=chip.max_pod_chips or chip.chips_per_host or on.num_chips,
        link=link,
        card=None if host is None else host / (chip.chips_per_host or 1) * LINK_EFFICIENCY,
    )
