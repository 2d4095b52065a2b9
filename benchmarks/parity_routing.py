"""Experts that the routers of a mixture choose: transformers' and ours, token by token, and ours with given choices."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from systolic.models.decoder import moe


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the routers of a model chose, the layers with experts in order."""

    experts: np.ndarray
    """int[layers, tokens, k], of each token in rising order."""
    logits: np.ndarray
    """f32[layers, tokens, experts]."""

    @staticmethod
    def of(layers: list[tuple[np.ndarray, np.ndarray]]) -> "Choices":
        """Of each layer's logits and choices."""
        logits, experts = zip(*layers, strict=True)
        flat = [one.reshape(-1, one.shape[-1]) for one in experts]
        return Choices(
            experts=np.sort(np.stack(flat), axis=-1),
            logits=np.stack([one.reshape(-1, one.shape[-1]) for one in logits]),
        )

    def agree(self, other: "Choices") -> np.ndarray:
        """bool[layers, tokens]: where the same experts are chosen."""
        return (self.experts == other.experts).all(axis=-1)


@contextmanager
def watch_theirs(model: Any) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Each call of a router of a model of transformers adds its logits and choices."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def hook(_: Any, __: Any, made: Any) -> None:
        logits, _, experts = made
        seen.append((logits.float().numpy(), experts.numpy()))

    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("router")]
    hooks = [router.register_forward_hook(hook) for router in routers]
    try:
        yield seen
    finally:
        for one in hooks:
            one.remove()


@contextmanager
def watch_ours() -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Each router that a program traced in the block runs adds its logits and choices."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    choose = moe.choose

    def watched(router: Any, each: int, logits: jax.Array, bias: jax.Array | None) -> Any:
        scores, weights, chosen = choose(router, each, logits, bias)
        jax.debug.callback(
            lambda *made: seen.append((np.array(made[0]), np.array(made[1]))),
            logits,
            chosen,
            ordered=True,
        )
        return scores, weights, chosen

    with patch.object(moe, "choose", watched):
        yield seen
        jax.effects_barrier()


@contextmanager
def forced(choices: Choices) -> Iterator[None]:
    """Routers of programs traced in the block take these experts, layer by layer, with the weights of their own scores."""
    choose = moe.choose
    layer = iter(choices.experts)

    def following(router: Any, each: int, logits: jax.Array, bias: jax.Array | None) -> Any:
        shape = jax.ShapeDtypeStruct((*logits.shape[:-1], each), jnp.int32)
        given = io_callback(
            lambda: next(layer).reshape(shape.shape).astype(np.int32), shape, ordered=True
        )
        # A bias that outweighs every score: those given are chosen, and it counts for the choice alone.
        lift = 1e3 * jax.nn.one_hot(given, logits.shape[-1]).sum(axis=-2)
        lift = lift if bias is None else lift + bias
        return choose(router, each, logits, lift)

    with patch.object(moe, "choose", following):
        yield
        jax.effects_barrier()


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Experts that a mixture in bfloat16 chose, against those of transformers in float32."""

    agree: float
    """Share of choices (a token in a layer) of the same experts."""
    maximum_agreeing: float
    """Largest error of the tokens that every layer routed the same."""
    maximum_forced: float | None = None
    """Largest error with the experts of float32 in every layer; ``None`` where that was not run."""


def compared(
    exact: np.ndarray,
    reference: Choices,
    found: np.ndarray,
    choices: Choices,
    with_reference: np.ndarray | None = None,
) -> Routing:
    """The routing of outputs and choices in bfloat16.

    Args:
        exact: Logits of transformers in float32.
        reference: Its choices.
        found: Logits in bfloat16.
        choices: Those that made them.
        with_reference: Logits in bfloat16 with the choices of ``reference``.
    """
    same = choices.agree(reference)
    scale = np.abs(exact).max()
    gaps = (np.abs(found - exact) / scale).reshape(same.shape[1], -1)
    alike = gaps[same.all(axis=0)]
    far = None if with_reference is None else float(np.abs(with_reference - exact).max() / scale)
    return Routing(
        agree=float(same.mean()),
        maximum_agreeing=float(alike.max()) if alike.size else 0.0,
        maximum_forced=far,
    )
