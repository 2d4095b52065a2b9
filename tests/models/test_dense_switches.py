"""Biases, kinds of norms, norms after each part, query scale and learned positions: cached, counted, under layouts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Mlp, NormKind
from systolic.models.decoder.options import Latent
from systolic.steps.step_functions import is_matrix
from tests.models.decoders import arrays, check_cache, module, program
from tests.steps import tiny
from tests.tiers import some

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


@pytest.mark.parametrize("name", some(list(ALL), ["gpt2"]))
def test_a_cache_gives_the_logits_of_the_whole_text(name: str) -> None:
    check_cache(module(ALL[name]))


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_counted_and_optimizers_take_biases_for_vectors(name: str) -> None:
    network = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=ALL[name])).network
    assert network.num_parameters == ALL[name].num_parameters
    vectors = {path for path, dims in network.axes.items() if not is_matrix(dims)}
    assert vectors == {path for path in network.axes if path.endswith(("bias", "scale"))}


def test_positions_end() -> None:
    """The first ones at each start of a document; no sequence is longer than the table, and a cache may go beyond."""
    net = module(GPT2)
    assert net.max_positions == 40
    assert module(QWEN).max_positions is None
    run = program(net, lambda net, *given: net(*given))
    tokens, *places = arrays(12, [5, 7])
    packed = run(tokens, *places)
    alone = run(jnp.roll(tokens, -5, axis=1), *arrays(12, [12])[1:])
    np.testing.assert_allclose(packed[0, 5:], alone[0, :7], atol=1e-4)
    with pytest.raises(OptionError, match=r"41 tokens and model\.learned-positions is 40"):
        net(*arrays(41, [41]))

    def beyond(prompt: jax.Array) -> jax.Array:
        _, cache = net.prefill(prompt, jnp.array([40]), 44, jnp.float32)
        return net.extend(jnp.array([3]), cache)[0]

    assert jax.eval_shape(beyond, arrays(40, [40])[0]).shape == (1, 64)


@pytest.mark.slow
def test_an_offset_scale_starts_as_the_plain_one() -> None:
    """The same first loss, and a parameter of zeros."""
    losses = []
    for kind in (NormKind.rms, NormKind.rms_offset):
        model = replace(QWEN, layers=1, norm=kind)
        steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=model))

        @jax.jit
        def first(key: jax.Array, batch: Any, steps: Any = steps) -> Any:
            params, rest = steps.network.init(key)
            return steps.evaluate(params, rest, batch)["loss"].total, params

        loss, params = first(jax.random.key(0), tiny.batch(steps, 0))
        losses.append(float(loss))
        assert bool(params["blocks/mlp_norm/scale"].any()) is (kind is NormKind.rms)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


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
    from systolic.models.decoder.layers import ACTIVATIONS

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
