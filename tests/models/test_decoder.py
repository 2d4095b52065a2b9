"""The decoder against its definition: causal, blind to other documents, the same with a cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Layout
from systolic.models.decoder.moe import Mixture, balance
from systolic.steps import jaxpr
from tests.models.decoders import arrays, check_cache, logits, module, program
from tests.steps import tiny
from tests.tiers import some

RICH = replace(
    tiny.MODEL, ngrams=3, ngram_rows=128, ngram_dim=4, qk_norm=True, tie_embeddings=False
)


CONFIGS = {
    "plain": tiny.MODEL,
    "rich": RICH,
    "mixture": replace(tiny.MODEL, experts=4, capacity_factor=0),
}


@pytest.mark.parametrize("name", some(list(CONFIGS), ["rich"]))
def test_a_token_sees_those_before_it_in_its_document_also_through_a_cache(name: str) -> None:
    net = module(CONFIGS[name])
    whole = check_cache(net, 12)
    tokens, *places = arrays(12, [12])
    run = program(net, logits)
    after = run(tokens.at[0, 7].add(1), *places)[0]
    np.testing.assert_allclose(whole[:7], after[:7], atol=1e-5)
    if name != "mixture":
        assert not np.allclose(whole[7:], after[7:], atol=1e-3)
    packed = run(*arrays(12, [5, 7]))[0]
    alone = run(jnp.pad(tokens[:, 5:], ((0, 0), (0, 5))), *places)[0]
    np.testing.assert_allclose(packed[5:], alone[:7], atol=1e-4)


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
    counted = jaxpr.count(
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
    with nnx.use_eager_sharding(False):
        mixture = Mixture(config, nnx.Rngs(0), steps.target)
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))

    @jax.jit
    def both(x):
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
        return *mixture(x), want

    out, routing, want = both(x)
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert (
        float(balance(routing["load"], routing["score"])) >= 1.0 - 1e-5
    )  # Its minimum, at an even load.
    assert routing["dropped"] == 0


def test_tokens_without_a_slot_skip_their_expert() -> None:
    config = replace(tiny.MODEL, experts=2, experts_per_token=1, capacity_factor=1e-6)
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config))
    with nnx.use_eager_sharding(False):
        mixture = Mixture(config, nnx.Rngs(0), steps.target)
    out, _ = jax.jit(lambda x: mixture(x))(jax.random.normal(jax.random.key(0), (1, 8, 32)))
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
