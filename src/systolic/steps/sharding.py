"""Shardings of parameters, optimizer state and batches."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from systolic.core.errors import LayoutError
from systolic.job import Field
from systolic.job.data import MASK
from systolic.steps.target import MeshTarget

SMALL = 2**14
"""Elements below which a parameter without logical axes is replicated."""


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
    for field in fields.values():
        for size, name in zip(field.shape, field.axes, strict=False):
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
