"""Caches of decoders whose layers all have a window: no longer than it, with the logits of a cache of all positions."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import Latent
from tests.models.decoders import module, program
from tests.steps import tiny
from tests.tiers import some

LATENT = Latent(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
COUNTS = jnp.array([9, 4, 1, 10])
"""Prompts in ten places, longer and shorter than the windows."""


@dataclass(frozen=True, kw_only=True)
class Whole(Decoder):
    """Keeps all positions."""

    @property
    def rolling(self) -> bool:
        return False


def logits(config: Decoder, capacity: int) -> tuple[Any, jax.Array]:
    """The shape of the cache, and logits [10, 4, vocab] of the prompts' last tokens and nine more, each the likeliest."""
    net = module(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 10)), jnp.int32)
    empty = jax.eval_shape(lambda: net.empty_cache(4, capacity, jnp.dtype("float32")))

    def run(net: Any, tokens: jax.Array) -> Any:
        def extend(given: Any, _: None) -> Any:
            logits, cache = given
            made = net.extend(jnp.argmax(logits, axis=-1).astype(jnp.int32), cache)
            return made, made[0]

        hidden, cache = net.prefill(tokens, COUNTS, capacity, jnp.float32)
        assert (empty.key.shape, empty.value.shape) == (cache.key.shape, cache.value.shape)
        last = jnp.take_along_axis(hidden, (COUNTS - 1)[:, None, None], axis=1)
        first = net.logits(last)[:, 0]
        (_, cache), others = jax.lax.scan(extend, (first, cache), length=9)
        return jnp.concatenate([first[None], others]), cache.length

    found, lengths = program(net, run)(tokens)
    assert lengths.tolist() == (COUNTS + 9).tolist()
    return empty.key.shape, found


CONFIGS = {
    "short": replace(tiny.MODEL, layers=2, window=3),
    "longer than the prompts": replace(tiny.MODEL, layers=2, window=12),
    "latent": replace(tiny.MODEL, layers=2, window=3, kv_heads=4, latent=LATENT),
}


@pytest.mark.parametrize("name", some(list(CONFIGS), ["short"]))
def test_a_rolling_cache_has_the_logits_of_a_whole_one(name: str) -> None:
    config = CONFIGS[name]
    shape, found = logits(config, 20)
    assert shape[3] == config.window
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    whole, known = logits(Whole(**fields), 20)
    assert whole[3] == 20
    np.testing.assert_allclose(found, known, atol=1e-5)


def test_a_pattern_of_windows_keeps_all_and_says_so() -> None:
    config = replace(tiny.MODEL, layers=2, window=3, global_every=2)
    net = module(config)
    cache = net.empty_cache(1, 8, jnp.dtype("float32"))
    assert cache.key.shape[3] == 8
    jax.eval_shape(net.extend, jnp.zeros((1,), jnp.int32), cache)
    (note,) = net.target.notes
    assert "window of 3 keep and read all 8 positions" in note
