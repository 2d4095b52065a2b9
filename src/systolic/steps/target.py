"""Target of a program: a mesh of real or described devices, with its sharding rules, and the shardings of parameters, optimizer state and batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from systolic.chips.flags import compile_options
from systolic.core.errors import LayoutError
from systolic.job import Field, Job, Layout, Placement, Residual, WeightFormat
from systolic.job.data import MASK

AnyMesh = Mesh | AbstractMesh
RULES: Mapping[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "expert_batch": ("data", "fsdp"),
    "sequence": ("context",),
    "residual_sequence": ("context",),
    "residual_embed": (),
    "stages": ("pipeline",),
    "routed": ("expert",),
    # parameters, and activations computed from them
    "embed": ("fsdp", "expert", "context"),
    "expert_embed": ("fsdp", "context"),
    "conv_out": ("fsdp", "expert", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "dense_mlp": ("tensor",),
    "vocab": ("tensor",),
    # Whole experts where fsdp divides them, so that gathers and scatters are along the major dim. Parts of each
    # matrix narrower than a tile would be copied, and on TPU7x summed whole on every device.
    "experts": ("expert", "fsdp"),
    "layers": ("pipeline",),
}
"""Logical name of a dim to the mesh axes that split it; other names are not split."""
SPLIT = {Residual.sequence: "residual_sequence", Residual.embed: "residual_embed"}
"""Dim of the residual stream that ``tensor`` also splits, by the layout's choice."""
SERVING: Mapping[str, tuple[str, ...]] = {
    **RULES,
    "embed": ("fsdp", "context"),
    "experts": ("expert",),
}
"""Rules for programs without a gradient: the expert axis splits only experts. The other weights, a small part of
a mixture, would be gathered for every token."""
SERVING_HEADS: Mapping[str, tuple[str, ...]] = {
    **SERVING,
    "batch": ("data", "fsdp"),
    **dict.fromkeys(("heads", "kv_heads", "vocab", "dense_mlp"), ("tensor", "expert")),
}
"""Rules of :attr:`systolic.job.ExpertAxis.heads`. Shared experts are split as narrow as the others, over the tensor axis alone."""
SMALL = 2**14
"""Elements below which a parameter without logical axes is replicated."""


def make_mesh(layout: Layout, devices: Sequence[Any]) -> Mesh:
    """The six named axes of a definite layout over ``devices``.

    Within a slice the axes follow the torus; across slices (devices that differ in ``slice_index``)
    the axis ``layout.slices`` is the one that crosses the data-centre network.

    Raises:
        LayoutError: the slices don't divide that axis.
    """
    names, sizes = tuple(layout.mesh_shape), list(layout.mesh_shape.values())
    layout.check_slices(num_slices := slices_of(devices))
    outer = [num_slices if name == layout.slices.value else 1 for name in names]
    grid = place(sizes, outer, devices, layout.placement)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def slices_of(devices: Sequence[Any]) -> int:
    """Number of TPU slices that devices are in; 1 on other platforms."""
    return max(len({slice_of(device) for device in devices if device.platform == "tpu"}), 1)


def place(
    sizes: Sequence[int],
    outer: Sequence[int],
    devices: Sequence[Any],
    placement: Placement = Placement.lines,
) -> np.ndarray:
    """Devices by mesh axes [*sizes].

    Args:
        sizes: Sizes of the axes; their product is the number of devices.
        outer: Number of slices that each axis crosses.
        devices: Devices of one platform.
        placement: Placement of the axes on the torus of a TPU slice.
    """
    if devices[0].platform != "tpu" or len(devices) == 1:
        return np.array(list(devices)[: math.prod(sizes)]).reshape(sizes)
    inner = [size // ways for size, ways in zip(sizes, outer, strict=True)]
    if placement is Placement.blocks:
        slices = sorted({slice_of(device) for device in devices})
        parts = [
            blocks(inner, [d for d in devices if slice_of(d) == slice_number])
            for slice_number in slices
        ]
        crossing = max(range(len(outer)), key=lambda axis: outer[axis])
        return np.concatenate(parts, axis=crossing)
    if math.prod(outer) > 1:
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def blocks(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """The devices of one slice by mesh axes [*shape], each axis a compact block of the torus.

    The innermost axis is placed first: the devices of one chip, then factor by factor along whichever
    torus axis has most chips left, so that 4 ways are 2 x 2 chips rather than 4 in a row.
    """
    places = [(*device.coords, device.core_on_chip) for device in devices]
    torus = np.empty([max(axis) + 1 for axis in zip(*places, strict=True)], dtype=object)
    for place, device in zip(places, devices, strict=True):
        torus[place] = device
    left, core = list(torus.shape), torus.ndim - 1
    factors: list[list[tuple[int, int]]] = [[] for _ in left]
    """Factors of each torus axis, nearest neighbours first: (ways, mesh axis)."""
    for axis in reversed(range(len(shape))):
        for ways in _primes(shape[axis]):
            possible = [n for n in range(len(left)) if left[n] % ways == 0]
            along = core if core in possible else max(possible, key=lambda n: left[n])
            left[along] //= ways
            factors[along].append((ways, axis))
    ordered = [factor for along in factors for factor in reversed(along)]
    split = torus.reshape([ways for ways, _ in ordered])
    by_axis = sorted(range(len(ordered)), key=lambda n: ordered[n][1])
    return split.transpose(by_axis).reshape(shape)


def _primes(number: int) -> list[int]:
    """Prime factors, largest first."""
    primes, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return primes[::-1]


def slice_of(device: jax.Device) -> int:
    """The number of the slice that a device is in; 0 where there is one slice."""
    # Devices of one-slice platforms lack the attribute; those of a described topology have it
    # unlisted in dir(), so it can only be tried.
    try:
        return device.slice_index or 0
    except AttributeError:
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshTarget:
    """Implements :class:`systolic.job.Target` for one mesh."""

    platform: str
    layout: Layout
    dtype: str
    mesh: AnyMesh
    matmul_format: str | None = None
    weight_format: WeightFormat | None = None
    """Format that matrices are rounded to before each product, in quantization-aware training."""
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: RULES)
    """Logical name to mesh axes."""
    flags: tuple[str, ...] = ()
    """Compiler flags of every program jitted on this mesh, ``--xla_…=…``; empty for XLA's defaults."""
    serves: bool = False
    """See :class:`systolic.job.Target`."""
    notes: list[str] = field(default_factory=list)
    """Notes recorded by :meth:`note` while tracing, in order."""

    @classmethod
    def of(
        cls, job: Job, platform: str, devices: Sequence[Any], flags: Sequence[str] = ()
    ) -> "MeshTarget":
        """Target of a job with a definite layout on these devices.

        Args:
            job: A job whose layout has as many devices; ``auto`` precision is resolved for the platform.
            platform: Platform to trace for: ``tpu``, ``gpu`` or ``cpu``.
            devices: Real, virtual or described devices.
        """
        precision = job.precision.resolve(platform)
        return cls(
            platform=platform,
            layout=job.layout,
            dtype=precision.dtype,
            matmul_format=precision.matmul_format,
            weight_format=precision.weight_format,
            flags=tuple(flags),
            mesh=make_mesh(job.layout, devices),
        )

    @property
    def compiler_options(self) -> dict[str, str] | None:
        """The flags as compiler options of ``jax.jit``, which are per program."""
        return compile_options(self.flags, self.platform) or None

    def note(self, text: str) -> None:
        """Keeps ``text`` once."""
        if text not in self.notes:
            self.notes.append(text)

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Mesh axes larger than 1 that split a dim of this logical name."""
        if name is None:
            return ()
        axes = self.rules.get(name, ())
        if name == SPLIT.get(self.layout.residual):
            axes = (*axes, "tensor")
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def spec(self, *axes: str | None) -> PartitionSpec:
        """See :class:`systolic.job.Target`."""
        parts = [self.axes(name) for name in axes]
        return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))

    def constrain(self, array: jax.Array, *axes: str | None) -> jax.Array:
        """See :class:`systolic.job.Target`; a dim that its axes don't divide is left to the partitioner."""
        if self.layout.num_devices == 1:
            return array
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, self.fit(array.shape, axes))
        )

    def fit(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        """Partition by logical names, without mesh axes that don't divide a dim or are used twice."""
        used: set[str] = set()
        parts = []
        for size, name in zip(shape, axes, strict=True):
            ways, kept = 1, []
            for axis in self.axes(name):
                if axis not in used and size % (ways * self.mesh.shape[axis]) == 0:
                    ways *= self.mesh.shape[axis]
                    kept.append(axis)
            used.update(kept)
            parts.append(kept[0] if len(kept) == 1 else tuple(kept) or None)
        return PartitionSpec(*parts)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """``spec`` on this mesh."""
        return NamedSharding(self.mesh, spec)


def parameter_spec(
    target: MeshTarget, shape: tuple[int, ...], axes: tuple[str | None, ...] | None
) -> PartitionSpec:
    """Partition of a parameter by its logical axes, else of its largest dim over fsdp where that divides."""
    if axes is not None:
        return target.fit(shape, axes)
    if len(shape) < 2 or _size(shape) < SMALL:
        return PartitionSpec()
    largest = max(range(len(shape)), key=lambda dim: shape[dim])
    return target.fit(
        shape, tuple("embed" if dim == largest else None for dim in range(len(shape)))
    )


def optimizer_specs(
    optimizer: Any, shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, PartitionSpec]
) -> Any:
    """Optimizer state sharded like the parameter each leaf belongs to.

    Args:
        optimizer: The optimizer's state (arrays or shapes); leaves of a parameter have its name in their path.
        shapes: Name to shape of each parameter.
        specs: Name to partition of each parameter.

    Returns:
        The same tree of PartitionSpec. A leaf with some of the parameter's dims (a factored moment)
        keeps their partition; any other leaf is replicated.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        for key in reversed(path):
            if isinstance(key, jax.tree_util.DictKey) and key.key in specs:
                return _project(leaf.shape, shapes[key.key], specs[key.key])
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, optimizer)


def batch_specs(target: MeshTarget, fields: Mapping[str, Field]) -> dict[str, PartitionSpec]:
    """Partition of each array of a batch."""
    specs = {
        name: target.spec("batch", *(field.axes or (None,) * len(field.shape)))
        for name, field in fields.items()
    }
    return {**specs, MASK: target.spec("batch")}


def check_fields(target: MeshTarget, fields: Mapping[str, Field]) -> None:
    """Checks that the mesh divides the dims of an example that it splits.

    Raises:
        LayoutError: an axis or the loss chunks do not divide a dim, or the examples have no sequence.
    """
    _check_chunks(target, fields)
    for each in fields.values():
        for size, name in zip(each.shape, each.axes, strict=False):
            for axis in target.axes(name):
                if size % target.mesh.shape[axis]:
                    raise LayoutError(
                        f"layout.{axis} {target.mesh.shape[axis]} does not divide the {name} of {size}; use a divisor of {size}, or change the {name}"
                    )


def _check_chunks(target: MeshTarget, fields: Mapping[str, Field]) -> None:
    chunks, pieces = target.layout.loss_chunks, target.layout.context
    if chunks == 1:
        return
    lengths = {
        size
        for field in fields.values()
        for size, name in zip(field.shape, field.axes, strict=False)
        if name == "sequence"
    }
    if not lengths:
        raise LayoutError(
            f"layout.loss-chunks is {chunks} but the examples have no sequence; leave it at 1"
        )
    for size in sorted(lengths):
        if size % (chunks * pieces):
            shards = f" x layout.context {pieces}" if pieces > 1 else ""
            raise LayoutError(
                f"layout.loss-chunks {chunks}{shards} does not divide the sequence of {size}; use a divisor of {size // math.gcd(size, pieces)}, or change the sequence"
            )


def _project(shape: tuple[int, ...], whole: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    """Partition of an array whose dims are a subsequence of a parameter's."""
    parts = list(spec) + [None] * (len(whole) - len(spec))
    if shape == whole:
        return PartitionSpec(*parts)
    kept, dim = [], 0
    for size in shape:
        while dim < len(whole) and whole[dim] != size:
            dim += 1
        if dim == len(whole):
            return PartitionSpec()
        kept.append(parts[dim])
        dim += 1
    return PartitionSpec(*kept)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
