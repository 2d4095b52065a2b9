"""Target of a program: a mesh of real or described devices, with its sharding rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from systolic.chips.flags import compile_options
from systolic.job import Job, Layout, Residual, WeightFormat
from systolic.steps.mesh import make_mesh

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
