"""Caches of decoders whose layers all have a window: no longer than it, with the logits of a cache of all positions."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.models.decoder.config import Decoder
from systolic.models.decoder.switches import Latent
from tests.models.test_decoder import module
from tests.steps import tiny

LATENT = Latent(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
COUNTS = jnp.array([9, 4, 1, 10])
"""Prompts in ten places, longer and shorter than the windows."""


@dataclass(frozen=True, kw_only=True)
class Whole(Decoder):
    """Keeps all positions."""

    @property
    def rolling(self) -> bool:
        return False


def logits(config: Decoder, capacity: int) -> tuple[Any, list[jax.Array]]:
    """The shape of the cache after the prompts, and logits [4, vocab] of nine tokens more, each the likeliest."""
    net = module(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 10)), jnp.int32)
    start = jax.jit(lambda tokens: net.prefill(tokens, COUNTS, capacity, jnp.float32))
    hidden, cache = start(tokens)
    empty = jax.eval_shape(lambda: net.empty_cache(4, capacity, jnp.dtype("float32")))
    assert (empty.key.shape, empty.value.shape) == (cache.key.shape, cache.value.shape)
    extend = jax.jit(lambda token, cache: net.extend(token, cache))
    shape, last = cache.key.shape, jnp.take_along_axis(hidden, (COUNTS - 1)[:, None, None], axis=1)
    found = [net.logits(last)[:, 0]]
    for _ in range(9):
        made, cache = extend(jnp.argmax(found[-1], axis=-1).astype(jnp.int32), cache)
        found.append(made)
    assert cache.length.tolist() == (COUNTS + 9).tolist()
    return shape, found


@pytest.mark.parametrize(
    "config",
    [
        replace(tiny.MODEL, layers=2, window=3),
        replace(tiny.MODEL, layers=2, window=12),
        replace(tiny.MODEL, layers=2, window=3, kv_heads=4, latent=LATENT),
    ],
    ids=["short", "longer than the prompts", "latent"],
)
def test_a_rolling_cache_has_the_logits_of_a_whole_one(config: Decoder) -> None:
    shape, found = logits(config, 20)
    assert shape[3] == config.window
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    whole, known = logits(Whole(**fields), 20)
    assert whole[3] == 20
    for ours, theirs in zip(found, known, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_pattern_of_windows_keeps_all_and_says_so() -> None:
    config = replace(tiny.MODEL, layers=2, window=3, global_every=2)
    net = module(config)
    cache = net.empty_cache(1, 8, jnp.dtype("float32"))
    assert cache.key.shape[3] == 8
    jax.eval_shape(net.extend, jnp.zeros((1,), jnp.int32), cache)
    (note,) = net.target.notes
    assert "window of 3 keep and read all 8 positions" in note
