"""Rates that the units of a profiled device can reach, and what an op reaches of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from systolic.chips import Chip, by_device_kind, known
from systolic.core.errors import NotFoundError
from systolic.core.units import si
from systolic.profile.ops import Activity, OpTraffic
from systolic.profile.trace import DeviceTrace

MATRIX, MEMORY, VECTOR_MEMORY = "matrix units", "device memory", "vector memory"
HOST_LINK, DIES = "host link", "links between dies"
ONE_LINK, LINKS = "one link between chips", "all links of a chip"
_NAMED = {
    MATRIX: "the matrix units",
    MEMORY: MEMORY,
    VECTOR_MEMORY: VECTOR_MEMORY,
    HOST_LINK: "the host link",
    DIES: "the links between dies",
    ONE_LINK: ONE_LINK,
    LINKS: LINKS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Rate of an op on the unit that bounds it."""

    unit: str
    work: float
    """Bytes, or FLOPs of the matrix units."""
    peak: float | None
    """Peak of the unit, bytes/s or FLOP/s; None where neither profile nor catalogue has it."""

    @property
    def measure(self) -> str:
        """``FLOP`` or ``B``."""
        return "FLOP" if self.unit == MATRIX else "B"

    def share(self, seconds: float) -> float | None:
        """Share of the peak; None where there is none."""
        return self.work / seconds / self.peak if self.peak and seconds > 0 else None

    def text(self, seconds: float) -> str:
        """``5.37 GB at 29.4 GB/s, 46 % of the peak of the host link``; the work alone where it took no time."""
        rate = si(self.work, self.measure)
        if seconds <= 0:
            return rate
        rate += f" at {si(self.work / seconds, f'{self.measure}/s')}"
        share = self.share(seconds)
        return rate if share is None else f"{rate}, {share:.0%} of the peak of {_NAMED[self.unit]}"


@dataclass(frozen=True)
class Ceilings:
    """Peaks of one device: the profile's own, else the catalogue's."""

    trace: DeviceTrace

    @cached_property
    def chip(self) -> Chip | None:
        """The chip in the catalogue."""
        return by_device_kind(self.trace.kind) if self.trace.kind else None

    @property
    def devices(self) -> int:
        """Devices of a chip."""
        return (self.chip.devices_per_chip or 1) if self.chip else 1

    @cached_property
    def memory(self) -> float | None:
        """Bytes/s of device memory."""
        held = self.chip.hbm_bytes_per_second if self.chip else None
        return self.trace.peak_bytes or (held / self.devices if held else None)

    @cached_property
    def host(self) -> float | None:
        """Bytes/s between a device and its host, one way."""
        if self.chip is None or self.chip.kind.value != "tpu":
            return None
        try:
            return float(known(self.chip, "pcie_bytes_per_second_per_chip")) / self.devices
        except (NotFoundError, KeyError):
            return None

    def links(self, group: Sequence[int]) -> tuple[str, float | None]:
        """The links that a collective can use at most, and their bytes/s, one way.

        Two devices share one link (the program's order of devices is taken for the torus's); more may use all
        links of a chip, which is at most what their axes have.
        """
        chip = self.chip
        if chip is None:
            return (ONE_LINK if len(group) == 2 else LINKS), None
        if self.devices > 1 and len(group) > 1 and len({n // self.devices for n in group}) == 1:
            return DIES, chip.die_to_die_bytes_per_second
        rate = chip.ici_bytes_per_second_per_link
        if chip.num_ici_links is None:
            return LINKS, rate  # a GPU's figure is of all its links
        if len(group) == 2 and self.devices == 1:
            return ONE_LINK, rate
        return LINKS, rate * chip.num_ici_links if rate else None

    def rate(
        self, kind: Activity, flops: float, dtype: str, moved: OpTraffic, seconds: float
    ) -> Rate | None:
        """The work of one run of an op on the unit that bounds it; None where the profile tells no work.

        Args:
            kind: The op's.
            flops: FLOPs of the matrix units; a vector unit's count only for other kinds, and are left out.
            dtype: HLO dtype of a matmul's operands; empty where it is not known.
            moved: Its bytes.
            seconds: Its time. A kernel whose arrays are more than device memory moves in it touches parts of them, and
                its bytes are not known.
        """
        if kind is Activity.host:
            return Rate(unit=HOST_LINK, work=moved.host, peak=self.host) if moved.host else None
        if kind is Activity.collective:
            unit, peak = self.links(moved.devices)
            return Rate(unit=unit, work=moved.link, peak=peak) if moved.link else None
        rates = []
        if kind in (Activity.matmul, Activity.kernel) and flops:
            rates.append(Rate(unit=MATRIX, work=flops, peak=self.trace.peak(dtype or "bf16")))
        unknown = kind is Activity.kernel and moved.hbm > (self.memory or math.inf) * seconds
        if moved.hbm and not unknown:
            rates.append(Rate(unit=MEMORY, work=moved.hbm, peak=self.memory))
        elif moved.vmem and not unknown:
            rates.append(
                Rate(unit=VECTOR_MEMORY, work=moved.vmem, peak=self.trace.peak_vector_bytes)
            )
        # The unit that needs the longest; one without a peak only where no other is known.
        return max(
            rates, key=lambda bound: bound.work / bound.peak if bound.peak else -1.0, default=None
        )
