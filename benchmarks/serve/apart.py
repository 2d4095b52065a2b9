"""The decode step of a static batch with each layer's weights and cache in arrays of their own.

Layers in a stack are read by a loop, at whose turns the compiler can't fetch ahead. Here the weights of a layer are fetched
into the chip's vector memory while the layer before waits for its sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.chips import Slice
from systolic.compiling import ServingProgram
from systolic.compiling.traced import Traced
from systolic.job import Sampling
from systolic.models.decoder.cache import Rows, appended_rows
from systolic.models.decoder.module import DecoderModule
from systolic.models.decoder.paged import Layer, layers_of, one_of
from systolic.models.quantized.codes import Quantized
from systolic.steps.decode import Decode
from systolic.steps.logits import pick
from systolic.steps.paged import BLOCKS, ServingWeights
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget


class ApartState(NamedTuple):
    """State of a generation, see :class:`systolic.steps.decode.DecodeState`."""

    token: jax.Array
    """int32[batch]."""
    key: jax.Array
    """Random key."""
    length: jax.Array
    """int32[batch]: positions seen."""
    recent: jax.Array
    """int32[batch, history]."""
    cache: list[tuple[Rows, Rows]]
    """Keys and values of each layer, [batch, kv_heads, capacity, head_dim]."""


class ApartDecode:
    """The decode program of a decoder without a stack; ``decode`` has the formats of weights and cache."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._layers: list[Layer] = []
        params, model_state = decode.steps.network.shapes
        self.abstract_weights: ServingWeights = jax.eval_shape(self.weights, params, model_state)

    def weights(self, params: Any, model_state: Any) -> ServingWeights:
        """Weights of training as this program takes them."""
        return self._split(self.decode.weights(params), model_state)

    def _split(self, params: Any, model_state: Any) -> ServingWeights:
        module = self.decode.steps.network.module(params, model_state, train=False)
        assert isinstance(module, DecoderModule)
        self._layers, states = layers_of(module)
        every = {**params, **model_state}
        ends = {path: array for path, array in every.items() if not path.startswith(BLOCKS)}
        return ServingWeights(ends, states)

    def placed_weights(self) -> ServingWeights:
        """Abstract weights with their shardings and formats."""
        decode = self.decode
        where = self._split(decode.placement, dict(decode.steps.shardings.model_state))
        return jax.tree.map(_placed, self.abstract_weights, where, is_leaf=_is_quantized)

    def placed_state(self, size: int, capacity: int) -> ApartState:
        """Abstract state of ``size`` sequences."""
        begun = self.decode.abstract_state(size, capacity)

        def own(rows: Rows) -> Rows:
            return jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(
                    a.shape[1:], a.dtype, sharding=one_of(a.sharding, 0)
                ),
                rows,
            )

        cache = begun.cache
        layers = [(own(cache.key), own(cache.value)) for _ in self._layers]
        return ApartState(begun.token, begun.key, cache.length, cache.recent, layers)

    def step(self, weights: ServingWeights, state: ApartState) -> ApartState:
        """The state after one more token of each sequence."""
        network, decode = self.decode.steps.network, self.decode
        params: Any = {name: weights.ends.get(name) for name in network.params}
        rest: Any = {name: weights.ends.get(name) for name in network.model_state}
        module: Any = network.module(params, rest, train=False)
        positions, cache = state.length[:, None], []
        x = module.embed(state.token[:, None], positions, state.recent)
        add = partial(_added, decode.steps.target, state.length)
        for layer, own, rows in zip(self._layers, weights.layers, state.cache, strict=True):
            block: Any = nnx.merge(layer.graph, own)
            attended, new = block.attend_next(x, positions, rows, layer.window)
            cache.append((add(rows[0], new[0]), add(rows[1], new[1])))
            x, _ = block.merge(x, attended)
        logits = module.logits(module.normed(x))[:, 0]
        key, use = jax.random.split(state.key)
        recent = jnp.concatenate([state.recent, state.token[:, None]], axis=1)
        return ApartState(
            pick(logits, use, decode.sampling),
            key,
            state.length + 1,
            recent[:, recent.shape[1] - state.recent.shape[1] :],
            cache,
        )


def _added(target: Any, length: jax.Array, rows: Rows, new: jax.Array) -> Rows:
    """A layer's rows with a new one, [batch, 1, kv_heads, head_dim]."""
    stacked = jax.tree.map(lambda a: a[None], rows)
    places = length % rows.shape[2]
    return jax.tree.map(lambda a: a[0], appended_rows(target, stacked, places, new[:, 0][None]))


def _is_quantized(part: Any) -> bool:
    return isinstance(part, Quantized)


def _placed(array: Any, where: Any) -> Any:
    if isinstance(array, Quantized):
        return Quantized(
            codes=_placed(array.codes, where.codes), scales=_placed(array.scales, where.scales)
        )
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)


def jit_apart(apart: ApartDecode, size: int, capacity: int) -> Any:
    """The step of a static batch, jitted: (weights, state) -> state; the state is donated."""
    places = jax.tree.map(lambda array: array.sharding, apart.placed_state(size, capacity))
    options = apart.decode.steps.target.compiler_options
    return jax.jit(apart.step, donate_argnums=1, out_shardings=places, compiler_options=options)


@dataclass(frozen=True, kw_only=True)
class ApartProgram(ServingProgram):
    """The decode step of a static batch, its layers apart."""

    def key(self) -> None:
        """None, since this code is no part of any key."""

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """The program, with the facts of the one that reads layers from a stack."""
        job = self.job.for_slice(on)
        steps = StepFunctions(job, MeshTarget.of(job, on.platform, devices))
        apart = ApartDecode(Decode(steps, Sampling(temperature=0.0), self.served))
        begun = apart.placed_state(self.rows, self.context)
        step = jit_apart(apart, self.rows, self.context)
        return replace(super().trace(on, devices), traced=step.trace(apart.placed_weights(), begun))
