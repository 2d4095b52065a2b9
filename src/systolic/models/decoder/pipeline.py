"""Pipeline parallelism inside one program.

The activations of all stages are one array [stages, microbatch, ...] sharded over the pipeline
axis. At each tick every stage runs its layers on its slot (a ``vmap``), then the array is rolled by
one: the partitioner turns the roll into a neighbour exchange. A pass takes
microbatches + stages - 1 ticks; the stages - 1 extra ones are the pipeline bubble.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from systolic.core.errors import LayoutError
from systolic.job import Target
from systolic.models.residual import STREAM


def num_microbatches(target: Target, batch: int) -> int:
    """Microbatches of a pass over ``batch`` examples.

    Raises:
        LayoutError: they don't divide the batch.
    """
    layout = target.layout
    wanted = layout.num_microbatches(batch)
    if batch % (wanted * layout.batch_ways):
        raise LayoutError(
            f"layout.microbatches {wanted} x {layout.batch_ways} batch shards does not divide the batch of {batch} per pass; change the batch or the microbatches"
        )
    return wanted


def run_stages(
    run: Callable[..., tuple[jax.Array, Any]],
    stacked: Any,
    x: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    target: Target,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """All layers over x [batch, sequence, d_model]; returns it and the means f32[layers, ...] of the layers' figures.

    ``run(x, state, segments, positions) -> (x, {name: f32[layers, ...]})`` runs some of the layers;
    ``stacked`` has a leading dim of layers.
    """
    stages = target.layout.pipeline
    count = num_microbatches(target, x.shape[0])

    def names(ndim: int) -> tuple[str, ...]:
        """Logical names of the stream's dims, or of those of segments and positions."""
        return STREAM if ndim == len(STREAM) else ("batch", "sequence")

    def split(array: jax.Array) -> jax.Array:
        """[batch, ...] to [microbatches, batch / microbatches, ...], each device keeping its examples."""
        parts = array.reshape(-1, count, *array.shape[1:]).swapaxes(0, 1)
        return target.constrain(parts, None, *names(array.ndim))

    def stage(
        state: Any, x: jax.Array, segments: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        return run(x, state, segments, positions)

    by_stage = jax.tree.map(
        lambda p: p.reshape(stages, p.shape[0] // stages, *p.shape[1:]), stacked
    )
    every_stage = jax.vmap(stage, spmd_axis_name="pipeline")
    inputs = (split(x), split(segments), split(positions))
    slots = jax.tree.map(lambda a: jnp.zeros((stages, *a.shape[1:]), a.dtype), inputs)

    def tick(carry: Any, t: jax.Array) -> tuple[Any, Any]:
        def feed(slot: jax.Array, source: jax.Array) -> jax.Array:
            fresh = jax.lax.dynamic_index_in_dim(source, jnp.minimum(t, count - 1), keepdims=False)
            moved = jnp.roll(slot, 1, axis=0).at[0].set(fresh)
            return target.constrain(moved, "stages", *names(slot.ndim - 1))

        x, segments, positions = jax.tree.map(feed, carry, inputs)
        x, said = every_stage(by_stage, x, segments, positions)
        x = target.constrain(x, "stages", *STREAM)
        age = t - jnp.arange(stages)
        useful = ((age >= 0) & (age < count)).astype(jnp.float32)
        said = jax.tree.map(lambda value: value * useful.reshape(-1, *[1] * (value.ndim - 1)), said)
        return (x, segments, positions), (x[-1], said)

    _, (outputs, said) = jax.lax.scan(tick, slots, jnp.arange(count + stages - 1))
    out = outputs[stages - 1 :].swapaxes(0, 1).reshape(x.shape)
    means = jax.tree.map(
        lambda value: (value.sum(axis=0) / count).reshape(-1, *value.shape[3:]), said
    )
    return target.constrain(out, *STREAM), means
