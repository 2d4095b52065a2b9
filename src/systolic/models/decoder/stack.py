"""Layers that lie stacked along a leading dim, run one after another by a scan.

Layers that differ in what is static (a window, a wavelength) repeat after a period. The body of the
scan is then one period, so that a program grows with the period and not with the layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from systolic.models.quantized.placement import with_members_apart

Layer = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""The residual stream and one layer's arrays to the stream after it and a tree of arrays."""


def at(stacked: Any, number: Any) -> Any:
    """Layer ``number`` int32[] of arrays [layers, ...], read where it lies."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False), stacked)


def stack(said: Sequence[Any]) -> Any:
    """Trees of arrays as one of arrays with a leading dim."""
    return jax.tree.map(lambda *each: jnp.stack(each), *said)


def run_layers(
    period: Sequence[Layer], x: jax.Array, stacked: Any, *, in_place: bool = False
) -> tuple[jax.Array, Any]:
    """``x`` after all layers and the layers' figures, stacked [layers, ...].

    Args:
        period: The layers' functions; layer ``n`` runs under number ``n`` modulo their count.
        x: What the first layer takes.
        stacked: Arrays [layers, ...]; the last period may be cut short.
        in_place: Reads each layer from the whole stack, for programs without a gradient: a last
            period that is cut short otherwise costs a copy of the others.
    """
    stacked = with_members_apart(stacked)
    if len(period) == 1:
        return jax.lax.scan(period[0], x, stacked)
    layers = jax.tree.leaves(stacked)[0].shape[0]
    groups, left = divmod(layers, len(period))
    inside = groups * len(period)

    def group(x: jax.Array, given: Any) -> tuple[jax.Array, Any]:
        said = []
        for number, layer in enumerate(period):
            if in_place:
                own = at(stacked, given * len(period) + number)
            else:
                own = jax.tree.map(lambda a, number=number: a[number], given)
            x, told = layer(x, own)
            said.append(told)
        return x, stack(said)

    found = []
    if groups:
        split = jax.tree.map(
            lambda a: a[:inside].reshape(groups, len(period), *a.shape[1:]), stacked
        )
        x, said = jax.lax.scan(group, x, jnp.arange(groups) if in_place else split)
        found.append(jax.tree.map(lambda a: a.reshape(inside, *a.shape[2:]), said))
    for number in range(left):
        x, told = period[number](x, jax.tree.map(lambda a, n=inside + number: a[n], stacked))
        found.append(jax.tree.map(lambda a: a[None], told))
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
