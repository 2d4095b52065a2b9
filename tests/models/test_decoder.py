"""The decoder against its definition: causal, blind to other documents, the same with a cache."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Layout
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.moe import Mixture
from systolic.models.decoder.router import balance
from systolic.steps import flops
from tests.steps import tiny

RICH = replace(
    tiny.MODEL, ngrams=3, ngram_rows=128, ngram_dim=4, qk_norm=True, tie_embeddings=False
)


def module(config: Decoder, seed: int = 0):
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config))
    params, rest = steps.network.init(jax.random.key(seed))
    # Parameters that start at zero would hide what is connected to what.
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = {n: p + 0.1 * jnp.resize(noise, p.shape) for n, p in params.items()}
    return steps.network.module(params, rest, train=False)


def logits_of(net: Any, *given: jax.Array) -> jax.Array:
    """Of tokens, segments and positions, in one program: op by op each of them would be compiled."""
    graph, state = nnx.split(net)

    def call(state: Any, *given: jax.Array) -> Any:
        return nnx.capture(nnx.merge(graph, state), nnx.Intermediate)(*given)[0]

    return jax.jit(call)(state, *given)


def arrays(sequence: int, segments: list[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 64, (1, sequence)), jnp.int32)
    owner = np.repeat(np.arange(len(segments)) + 1, segments)
    positions = np.concatenate([np.arange(n) for n in segments])
    return tokens, jnp.asarray(owner[None], jnp.int32), jnp.asarray(positions[None], jnp.int32)


@pytest.mark.parametrize("config", [tiny.MODEL, RICH], ids=["plain", "rich"])
def test_a_token_does_not_see_later_ones(config: Decoder) -> None:
    net = module(config)
    tokens, segments, positions = arrays(12, [12])
    before = logits_of(net, tokens, segments, positions)
    after = logits_of(net, tokens.at[0, 7].add(1), segments, positions)
    np.testing.assert_allclose(before[0, :7], after[0, :7], atol=1e-5)
    assert not np.allclose(before[0, 7:], after[0, 7:], atol=1e-3)


@pytest.mark.parametrize("config", [tiny.MODEL, RICH], ids=["plain", "rich"])
def test_packed_documents_do_not_see_each_other(config: Decoder) -> None:
    net = module(config)
    tokens, segments, positions = arrays(12, [5, 7])
    packed = logits_of(net, tokens, segments, positions)
    ones = jnp.ones((1, 7), jnp.int32)
    alone = logits_of(net, tokens[:, 5:], ones, jnp.arange(7)[None])
    np.testing.assert_allclose(packed[0, 5:], alone[0], atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [tiny.MODEL, RICH, replace(tiny.MODEL, experts=4, capacity_factor=0)],
    ids=["plain", "rich", "mixture"],
)
def test_cache_gives_the_logits_of_the_whole_text(config: Decoder) -> None:
    net = module(config)
    tokens, segments, positions = arrays(10, [10])
    whole = logits_of(net, tokens, segments, positions)
    prompt = jnp.zeros((1, 8), jnp.int32).at[:, :5].set(tokens[:, :5])
    start = jax.jit(lambda prompt: net.prefill(prompt, jnp.array([5]), 16, jnp.float32))
    extend = jax.jit(lambda token, cache: net.extend(token, cache))
    hidden, cache = start(prompt)
    np.testing.assert_allclose(net.logits(hidden)[0, :5], whole[0, :5], atol=1e-4)
    for index in range(5, 10):
        logits, cache = extend(tokens[:, index], cache)
        np.testing.assert_allclose(logits[0], whole[0, index], atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [{}, {"tie_embeddings": False}, {"experts": 4}, {"ngrams": 3, "qk_norm": True}],
    ids=str,
)
def test_parameters_are_counted(change: dict) -> None:
    config = replace(tiny.MODEL, **change)
    assert (
        tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config)).network.num_parameters
        == config.num_parameters
    )


def test_flops_agree_with_the_program() -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE))
    shapes = steps.abstract_batch(1)
    counted = flops.count(
        lambda p, r, b: steps.evaluate(p, r, b),
        steps.shapes.params,
        steps.shapes.model_state,
        shapes,
    )
    config, sequence = tiny.MODEL, 32
    # The program computes all pairs; the model's arithmetic counts the causal ones.
    unseen = config.layers * 2 * 2 * config.heads * config.head_dim * sequence * (sequence - 1) / 2
    assert config.flops(steps.job.data.fields()) + unseen == pytest.approx(counted)


def test_mixture_without_limit_is_the_weighted_sum_of_experts() -> None:
    config = replace(tiny.MODEL, experts=4, experts_per_token=2, capacity_factor=0)
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config))
    from flax import nnx

    with nnx.use_eager_sharding(False):
        mixture = Mixture(config, nnx.Rngs(0), steps.target)
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    out, routing = mixture(x)
    chances = jax.nn.softmax(x @ mixture.router[...])
    top, chosen = jax.lax.top_k(chances, 2)
    top = top / top.sum(-1, keepdims=True)
    every = jnp.einsum(
        "bsef,efd->bsed",
        jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, mixture.gate[...]))
        * jnp.einsum("bsd,edf->bsef", x, mixture.up[...]),
        mixture.down[...],
    )
    want = sum(
        jnp.take_along_axis(every, chosen[:, :, k, None, None], axis=2)[:, :, 0]
        * top[:, :, k, None]
        for k in range(2)
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert (
        float(balance(routing["load"], routing["score"])) >= 1.0 - 1e-5
    )  # Its minimum, at an even load.
    assert routing["dropped"] == 0


def test_tokens_without_a_slot_skip_their_expert() -> None:
    config = replace(tiny.MODEL, experts=2, experts_per_token=1, capacity_factor=1e-6)
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config))
    from flax import nnx

    with nnx.use_eager_sharding(False):
        mixture = Mixture(config, nnx.Rngs(0), steps.target)
    out, _ = mixture(jax.random.normal(jax.random.key(0), (1, 8, 32)))
    used = np.abs(np.asarray(out[0])).sum(-1) > 0
    assert used.sum() <= 2  # One slot for each of two experts.
    assert used.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 5}, "kv-heads"),
        ({"head_dim": 7}, "even"),
        ({"experts": 4, "experts_per_token": 9}, "experts-per-token"),
        ({"layers": 0}, "model.layers"),
        ({"ngrams": 1}, "0, or at least 2"),
    ],
)
def test_contradicting_sizes_are_refused(change: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        replace(tiny.MODEL, **change)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor=8), "heads"),
        (Layout(pipeline=3), "layers"),
        (Layout(expert=2), "dense"),
        (Layout(fsdp=5), "d-model"),
    ],
)
def test_an_axis_that_does_not_divide_is_refused(layout: Layout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        tiny.MODEL.check(layout)
