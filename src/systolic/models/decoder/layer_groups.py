"""Stretches of layers that repeat one unit: a layer, or dense ones and then a mixture."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.models.layered import Layered

EXPERTS = "experts"
"""Logical name of the dim of a mixture's experts."""
EXPERT_MATRICES = frozenset(("gate", "up", "down"))
"""Last names of the paths of their matrices."""
Step = Callable[..., tuple[jax.Array, Any]]
"""``step(x, state, given)`` of one layer: its arrays, and what else it is given, to the stream and its figures."""


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
        light = nnx.from_flat_state([one for one in flat if one[0] not in paths])

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

        def unit(x: jax.Array, states: Any, given: Any = None) -> tuple[jax.Array, Any]:
            said = []
            for place, (kind, one) in enumerate(zip(kinds, steps, strict=True)):
                own, before = states[kind], sum(counts[:kind])
                if counts[kind] > 1:
                    own = jax.tree.map(lambda a, n=place - before: a[n], own)
                x, told = one(x, own, jax.tree.map(lambda a, n=place: a[n], given))
                said.append(told)
            return x, join(said)

        return unit
