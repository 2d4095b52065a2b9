"""One kind of accelerator, and where each of its numbers comes from.

A name counts TensorCores (v2 to v5p, TPU7x) or chips (v5e, v6e). The number of chips gives the
shape: the factors nearest to each other, in units of one chip (two axes) or of a cube of 4x4x4
chips (three axes). The rule agrees with every row of MaxText's table of slices.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

from systolic.core.errors import NotFoundError, nearest

Shape = tuple[int, ...]

_PARTS_OF_A_CUBE: dict[int, Shape] = {
    1: (1, 1, 1),
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
}
"""One chip, one host (2x2x1), then hosts doubled along z, z and y up to half a cube."""
YOURS = "your file"
"""Key of the citation of a user's catalogue."""


class Counts(enum.Enum):
    """Unit of the number in a slice's name."""

    cores = "cores"
    chips = "chips"


class Sizes(enum.Enum):
    """Which numbers of chips have a name."""

    powers_of_two = "powers of two"
    cubes = "cubes"
    listed = "listed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRule:
    """Names, shapes and wiring of one generation's slices."""

    dims: int
    counts: Counts
    sizes: Sizes
    largest_chips: int
    """Chips of the largest shape, named or not: the pod."""
    longest_axis: int
    topology_prefix: str
    """Name that libtpu has for the generation: ``v5`` for v5p."""
    chip_config_name: str = "default"
    smallest_chips: int = 4
    without_chips: tuple[int, ...] = ()
    listed_chips: tuple[int, ...] = ()
    extra_chips: tuple[int, ...] = ()
    largest_cubes: int = 0
    wrap_full_axis: int | None = None
    """Two axes: an axis wraps around when it has this length."""
    wrap_cube: int | None = None
    """Three axes: all wrap when each is a multiple of this."""
    note: str = ""
    sources: tuple[str, ...] = ()

    def named_chips(self) -> tuple[int, ...]:
        """The numbers of chips that have a name, ascending."""
        return _named_chips(self)

    def shape(self, chips: int) -> Shape:
        """The shape of a named number of chips, axes ascending (one host is 2x2x1)."""
        if self.dims == 3 and chips in _PARTS_OF_A_CUBE:
            return _PARTS_OF_A_CUBE[chips]
        return self._factors(chips)

    def _factors(self, chips: int) -> Shape:
        """The factorisation with the smallest sum; empty when an axis would be too long."""
        unit = 4 if self.dims == 3 else 1
        longest = self.longest_axis // unit
        shapes = [
            s for s in factorisations(chips // unit**self.dims, self.dims) if max(s) <= longest
        ]
        return tuple(unit * axis for axis in min(shapes, key=sum)) if shapes else ()

    def problem(self, shape: Shape) -> str:
        """Reason why a shape does not exist, in a few words; empty when it does."""
        if len(shape) != self.dims:
            return f"a topology here has {self.dims} axes"
        if prod(shape) > self.largest_chips:
            return f"a pod ends at {self.largest_chips} chips"
        if max(shape) > self.longest_axis:
            return f"an axis ends at {self.longest_axis} chips"
        if prod(shape) == 1 and self.smallest_chips == 1:
            return ""
        if self.dims == 2:
            even = all(axis >= 2 and axis % 2 == 0 for axis in shape)
            return "" if even else "each axis is even, since a host has 2x2 chips"
        whole = all(axis >= 4 and axis % 4 == 0 for axis in shape)
        if whole or (prod(shape) > 1 and shape in _PARTS_OF_A_CUBE.values()):
            return ""
        return "a shape is 2x2x1, 2x2x2, 2x2x4, 2x4x4, or has axes that are multiples of 4"

    def wrap(self, shape: Shape) -> tuple[bool, ...]:
        """Which axes have wraparound links."""
        if self.wrap_cube is not None:
            return (all(axis % self.wrap_cube == 0 for axis in shape),) * len(shape)
        return tuple(axis == self.wrap_full_axis for axis in shape)


@cache
def _named_chips(rule: SliceRule) -> tuple[int, ...]:
    """Chip counts that a rule names, computed once: every name that is looked up is compared with them."""
    if rule.sizes is Sizes.listed:
        return tuple(sorted(rule.listed_chips))
    if rule.sizes is Sizes.powers_of_two:
        powers = (2**k for k in range(rule.largest_chips.bit_length()))
        return tuple(n for n in powers if n >= rule.smallest_chips and n not in rule.without_chips)
    parts = [n for n in _PARTS_OF_A_CUBE if n >= rule.smallest_chips]
    cubes = (64 * k for k in range(1, rule.largest_cubes + 1))
    whole = (n for n in cubes if rule.shape(n))
    return tuple(sorted({*parts, *whole, *rule.extra_chips}))


def factorisations(number: int, parts: int, least: int = 1) -> Iterator[Shape]:
    """All ascending tuples of ``parts`` factors, each at least ``least``, whose product it is."""
    if parts == 1:
        if number >= least:
            yield (number,)
        return
    factor = least
    while factor**parts <= number:
        if number % factor == 0:
            for rest in factorisations(number // factor, parts - 1, factor):
                yield (factor, *rest)
        factor += 1


class ChipKind(enum.Enum):
    """Kinds of accelerator."""

    tpu = "tpu"
    gpu = "gpu"
    cpu = "cpu"
    edge = "edge"


@dataclass(frozen=True, kw_only=True, slots=True)
class Citation:
    """Something that can be read: a page, a paper, a file of a repository at a revision."""

    key: str
    text: str
    url: str
    as_of: str

    def __str__(self) -> str:
        return f"{self.text}, {self.url}" if self.url else self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of a chip with its unit (SI base units), sources and date."""

    field: str
    value: Any
    unit: str
    text: str
    sources: tuple[Citation, ...]
    as_of: str
    note: str = ""
    region: str = ""
    by_region: tuple[tuple[str, float], ...] = ()
    """Price in other regions, by region."""
    in_pod: float | None = None
    """Price of a chip in a slice of several hosts."""

    def rate(self, zone: str, *, pod: bool) -> tuple[Any, str]:
        """The price in a zone, and the region that it is of, which is another where no source gives the zone's.

        Args:
            zone: Google Cloud's; empty for the figure's own region.
            pod: Whether the chip is one of a slice of several hosts.
        """
        zone_region, listed = zone.rpartition("-")[0], dict(self.by_region)
        own = zone_region in ("", self.region) or zone_region.startswith(f"{self.region}-")
        # A user's own price holds wherever the chips are.
        own = own or self.sources[0].key == YOURS
        region = zone_region if zone_region and (own or zone_region in listed) else self.region
        if pod and self.in_pod is not None:
            return self.in_pod, region
        return (self.value if own else listed.get(zone_region, self.value)), region

    def to_json(self) -> dict[str, Any]:
        """The figure as plain JSON values; a pair table becomes an object."""
        value = self.value
        if isinstance(value, tuple) and value and isinstance(value[0], tuple):
            value = {str(key): item for key, item in value}
        record = {
            "value": list(value) if isinstance(value, tuple) else value,
            "unit": self.unit,
            "source": [str(source) for source in self.sources],
            "as_of": self.as_of,
        }
        more = {
            "note": self.note,
            "region": self.region,
            "by_region": dict(self.by_region),
            "in_pod": self.in_pod,
        }
        return record | {name: value for name, value in more.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """US dollars per hour; ``None`` where no source gives a price."""

    on_demand: float | None = None
    spot: float | None = None
    committed: float | None = None

    def times(self, count: int) -> "Prices":
        """The prices of ``count`` of them."""
        return Prices(
            **{
                f.name: None if (price := getattr(self, f.name)) is None else price * count
                for f in fields(self)
            }
        )

    def to_json(self) -> dict[str, float | None]:
        """The prices as a plain object."""
        return {"on_demand": self.on_demand, "spot": self.spot, "committed": self.committed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A kind of chip. Every number is per chip unless its name says otherwise; ``None``: no source.

    Units are in the names (SI base units; bytes are bytes). Link rates are one way.
    :meth:`source` gives the source, date and note of any number. Peaks are dense.
    """

    name: str
    title: str
    kind: ChipKind
    aliases: tuple[str, ...] = ()
    device_kind: str | None = None
    """Name that ``jax.Device.device_kind`` prints."""
    device_kind_aliases: tuple[str, ...] = ()
    megacore: bool = False
    """Both TensorCores of a chip are one JAX device."""
    native: tuple[str, ...] = ()
    """Number formats that the matrix units take without a cast, beyond f32."""
    machine_type: str | None = None
    gke_accelerator: str | None = None
    machines: tuple[tuple[str, int], ...] = ()
    """Machine names that stand for so many of these chips."""
    slice_rule: SliceRule | None = None

    num_cores: int | None = None
    devices_per_chip: int | None = None
    clock_hz: float | None = None
    clock_hz_by_power_state: tuple[tuple[int, float], ...] = ()
    default_power_state: int | None = None
    peak_power_state: int | None = None
    num_sms: int | None = None
    compute_capability: str | None = None
    f32_lanes_per_sm: int | None = None
    shared_memory_bytes_per_sm: int | None = None
    l2_bytes: int | None = None
    mxu_shape: tuple[int, int] | None = None
    num_mxu_per_core: int | None = None
    peak_bf16_flops_per_second: float | None = None
    peak_tf32_flops_per_second: float | None = None
    peak_fp8_flops_per_second: float | None = None
    peak_int8_ops_per_second: float | None = None
    peak_int4_ops_per_second: float | None = None
    vpu_shape: tuple[int, int] | None = None
    vpu_alus_per_lane: int | None = None
    num_vector_registers: int | None = None
    num_xlu_per_core: int | None = None
    issue_slots_per_core: tuple[tuple[str, int], ...] = ()
    mxu_cycles_per_instruction: tuple[tuple[str, int], ...] = ()
    vmem_bytes_per_core: int | None = None
    cmem_bytes: int | None = None
    smem_bytes_per_core: int | None = None
    sram_bytes: int | None = None
    hbm_bytes: int | None = None
    program_bytes_per_device: int | None = None
    driver_hbm_bytes: int | None = None
    hbm_bytes_per_second: float | None = None
    hbm_granule_bytes: int | None = None
    hbm_to_vmem_bytes_per_second_per_core: float | None = None
    vmem_to_hbm_bytes_per_second_per_core: float | None = None
    cmem_to_vmem_bytes_per_second: float | None = None
    vmem_to_cmem_bytes_per_second: float | None = None
    num_sparse_cores: int | None = None
    num_subcores_per_sparse_core: int | None = None
    sparse_core_lanes: int | None = None
    sparse_core_vmem_bytes_per_subcore: int | None = None
    num_nvlinks: int | None = None
    num_ici_links: int | None = None
    ici_axes: int | None = None
    ici_bytes_per_second_per_link: float | None = None
    ici_published_bytes_per_second_per_link: float | None = None
    die_to_die_bytes_per_second: float | None = None
    bisection_bytes_per_second: float | None = None
    max_pod_chips: int | None = None
    chips_per_host: int | None = None
    dcn_bytes_per_second_per_host: float | None = None
    machine_dcn_bytes_per_second: tuple[tuple[str, float], ...] = ()
    pcie_bytes_per_second_per_chip: float | None = None
    host_dram_bytes: int | None = None
    host_vcpus: int | None = None
    power_watts: float | None = None
    power_watts_min: float | None = None
    power_watts_max: float | None = None
    tdp_watts: float | None = None
    ici_hop_seconds: float | None = None
    measured_matmul_bf16_flops_per_second: float | None = None
    measured_hbm_copy_bytes_per_second: float | None = None
    measured_ici_bytes_per_second_per_link: float | None = None
    measured_all_gather_fixed_seconds: float | None = None
    measured_dcn_bytes_per_second_per_chip: float | None = None
    measured_sparse_core_gather_bytes_per_second: float | None = None
    measured_hbm_to_host_bytes_per_second: float | None = None
    measured_hbm_to_host_fixed_seconds: float | None = None
    usd_per_chip_hour: Prices = field(default_factory=Prices)

    figures: Mapping[str, Figure] = field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )
    """Every number above by field name; prices as ``usd_per_chip_hour.on_demand`` and so on."""

    def source(self, name: str) -> Figure:
        """The figure behind a field: value, unit, sources, date, note.

        Raises:
            NotFoundError: no such field, or a field that no source gives for this chip.
        """
        if name in self.figures:
            return self.figures[name]
        known = [f.name for f in fields(self)]
        if name in known:
            raise NotFoundError(
                f"no source gives {name} of {self.name}, so it is None; "
                f"systolic chips {self.name} lists what is known"
            )
        hint = nearest(name, [*self.figures, *known])
        raise NotFoundError(
            f"a chip has no field {name!r}{hint}; systolic chips {self.name} lists them"
        )

    def to_json(self) -> dict[str, Any]:
        """Identity, and every figure with unit, source, date and note, as plain JSON values."""
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind.value,
            "aliases": list(self.aliases),
            "device_kind": self.device_kind,
            "megacore": self.megacore,
            "native": list(self.native),
            "machine_type": self.machine_type,
            "gke_accelerator": self.gke_accelerator,
            "figures": {name: figure.to_json() for name, figure in self.figures.items()},
        }
