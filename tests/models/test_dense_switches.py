"""Biases, kinds of norms, norms after each part, query scale and learned positions: cached, counted, under layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Mlp, NormKind
from systolic.models.decoder.switches import Latent
from systolic.steps.optimizer import is_matrix
from tests.models.test_decoder import arrays, logits_of, module
from tests.steps import tiny

GPT2 = replace(
    tiny.MODEL,
    kv_heads=4,
    mlp=Mlp.gelu_exact,
    mlp_bias=True,
    qkv_bias=True,
    out_bias=True,
    norm=NormKind.layer,
    learned_positions=40,
)
GEMMA = replace(
    tiny.MODEL,
    mlp=Mlp.geglu,
    norm=NormKind.rms_offset,
    post_norms=True,
    qk_norm=True,
    query_pre_attn_scalar=5.0,
    window=3,
    global_every=2,
)
QWEN = replace(tiny.MODEL, qkv_bias=True, mlp_bias=True, tie_embeddings=False)
NEW = (
    "mlp_bias",
    "qkv_bias",
    "out_bias",
    "learned_positions",
    "rope_scaling",
    "norm",
    "post_norms",
    "query_pre_attn_scalar",
)
"""Fields that decoders did not have at first."""
ALL = {"gpt2": GPT2, "gemma": GEMMA, "qwen": QWEN}


@pytest.mark.parametrize("name", ALL)
def test_a_cache_gives_the_logits_of_the_whole_text(name: str) -> None:
    net = module(ALL[name])
    tokens, segments, positions = arrays(10, [10])
    whole = logits_of(net, tokens, segments, positions)
    prompt = jnp.zeros((1, 8), jnp.int32).at[:, :5].set(tokens[:, :5])
    start = jax.jit(lambda prompt: net.prefill(prompt, jnp.array([5]), 16, jnp.float32))
    hidden, cache = start(prompt)
    np.testing.assert_allclose(net.logits(hidden)[0, :5], whole[0, :5], atol=1e-4)
    extend = jax.jit(lambda *given: net.extend(*given))
    for index in range(5, 10):
        logits, cache = extend(tokens[:, index], cache)
        np.testing.assert_allclose(logits[0], whole[0, index], atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted(name: str) -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=ALL[name]))
    assert steps.network.num_parameters == ALL[name].num_parameters


@pytest.mark.parametrize("name", ALL)
def test_optimizers_take_biases_for_vectors(name: str) -> None:
    axes = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=ALL[name])).network.axes
    vectors = {path for path, dims in axes.items() if not is_matrix(dims)}
    assert vectors == {path for path in axes if path.endswith(("bias", "scale"))}


def test_positions_end() -> None:
    """The first ones at each start of a document; no sequence is longer than the table, and a cache may go beyond."""
    net = module(GPT2)
    assert net.max_positions == 40
    assert module(QWEN).max_positions is None
    packed = logits_of(net, *arrays(12, [5, 7]))
    tokens, _, _ = arrays(12, [5, 7])
    alone = logits_of(net, tokens[:, 5:], jnp.ones((1, 7), jnp.int32), jnp.arange(7)[None])
    np.testing.assert_allclose(packed[0, 5:], alone[0], atol=1e-4)
    with pytest.raises(OptionError, match=r"41 tokens and model\.learned-positions is 40"):
        net(*arrays(41, [41]))
    start = jax.jit(lambda prompt: net.prefill(prompt, jnp.array([40]), 44, jnp.float32))
    _, cache = start(arrays(40, [40])[0])
    logits, _ = jax.jit(lambda *given: net.extend(*given))(jnp.array([3]), cache)
    assert logits.shape == (1, 64)


def test_an_offset_scale_starts_as_the_plain_one() -> None:
    """The same first loss, and a parameter of zeros."""
    plain, offset = (replace(QWEN, norm=kind) for kind in (NormKind.rms, NormKind.rms_offset))
    steps = [tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=one)) for one in (plain, offset)]
    losses = [tiny.run(one, 2)[0] for one in steps]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    params, _ = steps[1].network.init(jax.random.key(0))
    assert not params["blocks/mlp_norm/scale"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_bias": True, "experts": 4}, "mlp-bias is for dense models"),
        ({"learned_positions": 9, "rope_theta": 5.0}, "learned-positions is set, which replaces"),
        ({"latent": Latent(kv_lora_rank=8), "qkv_bias": True}, "qkv-bias is for plain"),
        ({"latent": Latent(kv_lora_rank=8), "learned_positions": 9}, "learned-positions 9 is for"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(tiny.MODEL, **change)


def test_gelu_has_two_forms() -> None:
    """By the definitions at 1: x times the normal distribution function, and its tanh form."""
    from systolic.models.decoder.parts import ACTIVATIONS

    values = {kind: float(of(1.0)) for kind, of in ACTIVATIONS.items()}
    assert values[Mlp.gelu_exact] == values[Mlp.geglu_exact] == pytest.approx(0.841345, abs=1e-6)
    assert values[Mlp.gelu] == values[Mlp.geglu] == pytest.approx(0.841192, abs=1e-6)


def test_a_decoder_saved_before_these_fields_is_the_same() -> None:
    """The model of a job.json of the version before."""
    model = replace(tiny.MODEL, qk_norm=True, window=4, tie_embeddings=False)
    plain = msgspec.to_builtins(model)
    for name in NEW:
        del plain[name]
    assert msgspec.convert(plain, Decoder) == model
