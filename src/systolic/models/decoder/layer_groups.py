"""Layers that lie stacked along a leading dim: stretches of them that repeat one unit, a scan over each, and the stages of a pipeline.

The activations of all stages are one array [stages, microbatch, ...] sharded over the pipeline
axis. At each tick every stage runs its layers on its slot (a ``vmap``), then the array is rolled by
one: the partitioner turns the roll into a neighbour exchange. A pass takes
microbatches + stages - 1 ticks; the stages - 1 extra ones are the pipeline bubble.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.core.errors import LayoutError
from systolic.job import Target
from systolic.models.grouped import Layered
from systolic.models.layers import STREAM
from systolic.models.quantized.placement import with_members_apart

EXPERTS = "experts"
"""Logical name of the dim of a mixture's experts."""
EXPERT_MATRICES = frozenset(("gate", "up", "down"))
"""Last names of the paths of their matrices."""
Step = Callable[..., tuple[jax.Array, Any]]
"""``step(x, state, given)`` of one layer: its arrays, and what else it is given, to the stream and its figures."""
Layer = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""The residual stream and one layer's arrays to the stream after it and a tree of arrays."""


class Stretch(NamedTuple):
    """Units of layers that follow each other."""

    kinds: tuple[tuple[nnx.Module, int], ...]
    """Blocks, stacked [layers of the kind, ...], and how many layers of each a unit has, in order."""
    first: int
    """The number of the first layer."""
    units: int
    windows: tuple[int, ...]
    """Windows of one period of its layers."""

    @property
    def size(self) -> int:
        """Layers of a unit."""
        return sum(count for _, count in self.kinds)

    @property
    def numbers(self) -> jax.Array:
        """Numbers of the layers, int32[units] or [units, layers of a unit], as :meth:`period` takes them."""
        numbers = self.first + jnp.arange(self.units * self.size)
        return numbers if self.size == 1 else numbers.reshape(-1, self.size)

    def flat(self, said: Any) -> Any:
        """Figures of units, [units, layers of a unit, ...], as [layers, ...]."""
        if self.size == 1:
            return said
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), said)

    def split(self) -> tuple[list[Any], Any]:
        """The graph of each kind, and arrays [units, ...] of all, as :meth:`period` takes them."""
        graphs, states = [], []
        for blocks, count in self.kinds:
            graph, state = nnx.split(blocks)
            if count > 1:
                state = jax.tree.map(lambda a, n=count: a.reshape(-1, n, *a.shape[1:]), state)
            graphs.append(graph)
            states.append(state)
        return graphs, states[0] if self.size == 1 else tuple(states)

    def held(self, stacked: Any) -> tuple[Any, Callable[[Any, jax.Array], Any]]:
        """The arrays of :meth:`split` without the experts' matrices, and what puts those of a unit back by its number.

        A scan would copy a layer's matrices for a kernel that takes them as a whole.
        """
        if self.size > 1:
            return stacked, lambda state, number: state
        flat = list(nnx.to_flat_state(stacked))
        experts = [
            (path, variable)
            for path, variable in flat
            if not EXPERT_MATRICES.isdisjoint(path[-2:])
            and EXPERTS in (variable.get_metadata().get("out_sharding") or ())
        ]
        paths = {path for path, _ in experts}
        light = nnx.from_flat_state([pair for pair in flat if pair[0] not in paths])

        def joined(state: Any, number: jax.Array) -> Any:
            heavy = [
                (path, variable.replace(Layered(stack=variable.get_value(), number=number)))
                for path, variable in experts
            ]
            return nnx.from_flat_state([*nnx.to_flat_state(state), *heavy])

        return light, joined

    def period(
        self,
        graphs: list[Any],
        step: Callable[[Any, int], Step],
        join: Callable[[list[Any]], Any],
    ) -> list[Step]:
        """Functions of the units after which kinds and windows repeat: ``unit(x, states, given)``.

        Args:
            graphs: Of each kind.
            step: The function of a layer, by graph and window.
            join: Figures of a unit from those of its layers; a unit of one layer has that layer's.
        """
        length = len(self.windows) // math.gcd(self.size, len(self.windows))
        return [self._unit(graphs, step, join, number * self.size) for number in range(length)]

    def _unit(
        self,
        graphs: list[Any],
        step: Callable[[Any, int], Step],
        join: Callable[[list[Any]], Any],
        first: int,
    ) -> Step:
        counts = [count for _, count in self.kinds]
        kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
        steps = [
            step(graphs[kind], self.windows[(first + place) % len(self.windows)])
            for place, kind in enumerate(kinds)
        ]
        if self.size == 1:
            return steps[0]

        def unit(x: jax.Array, states: Any, layer_inputs: Any = None) -> tuple[jax.Array, Any]:
            said = []
            for place, (kind, layer_step) in enumerate(zip(kinds, steps, strict=True)):
                own, before = states[kind], sum(counts[:kind])
                if counts[kind] > 1:
                    own = jax.tree.map(lambda a, n=place - before: a[n], own)
                x, figure = layer_step(x, own, jax.tree.map(lambda a, n=place: a[n], layer_inputs))
                said.append(figure)
            return x, join(said)

        return unit


def at(stacked: Any, number: Any) -> Any:
    """Layer ``number`` int32[] of arrays [layers, ...], read where it lies."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), stacked)


def stack(said: Sequence[Any]) -> Any:
    """Trees of arrays as one of arrays with a leading dim."""
    return jax.tree.map(lambda *each: jnp.stack(each), *said)


def run_layers(
    period: Sequence[Layer],
    x: jax.Array,
    stacked: Any,
    *,
    in_place: bool = False,
    unroll: bool = False,
) -> tuple[jax.Array, Any]:
    """``x`` after all layers and the layers' figures, stacked [layers, ...].

    Layers that differ in what is static (a window, a wavelength) repeat after a period. The body of the
    scan is then one period, so that a program grows with the period and not with the layers.

    Args:
        period: The layers' functions; layer ``n`` runs under number ``n`` modulo their count.
        x: What the first layer takes.
        stacked: Arrays [layers, ...]; the last period may be cut short.
        in_place: Reads each layer from the whole stack, for programs without a gradient: a last
            period that is cut short otherwise costs a copy of the others.
        unroll: Writes out all layers, for a period of one layer: no activation is then copied into the stack that a
            scan keeps for the gradient.
    """
    stacked = with_members_apart(stacked)
    if len(period) == 1:
        return jax.lax.scan(period[0], x, stacked, unroll=unroll)
    layers = jax.tree.leaves(stacked)[0].shape[0]
    groups, left = divmod(layers, len(period))
    inside = groups * len(period)

    def group(x: jax.Array, group_inputs: Any) -> tuple[jax.Array, Any]:
        said = []
        for number, layer in enumerate(period):
            if in_place:
                own = at(stacked, group_inputs * len(period) + number)
            else:
                own = jax.tree.map(lambda a, number=number: a[number], group_inputs)
            x, figure = layer(x, own)
            said.append(figure)
        return x, stack(said)

    figures = []
    if groups:
        split = jax.tree.map(
            lambda a: a[:inside].reshape(groups, len(period), *a.shape[1:]), stacked
        )
        x, said = jax.lax.scan(group, x, jnp.arange(groups) if in_place else split)
        figures.append(jax.tree.map(lambda a: a.reshape(inside, *a.shape[2:]), said))
    for number in range(left):
        x, figure = period[number](x, jax.tree.map(lambda a, n=inside + number: a[n], stacked))
        figures.append(jax.tree.map(lambda a: a[None], figure))
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *figures)


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
