"""Prefill reads prompts with the attention of training: no scores of whole prompts, padding unseen."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType

from systolic.job import Batch, Layout, Sampling
from systolic.models import splash
from systolic.models.decoder.config import Decoder
from systolic.steps.decode import Decode
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from tests.steps import tiny

PROMPT = 256
PLAIN = replace(tiny.MODEL, layers=2, vocab=96)
SWITCHES = replace(PLAIN, window=40, global_every=2, sinks=True, attention_cap=0.7, ngrams=3)


def arrays(jaxpr: Jaxpr) -> Iterator[Any]:
    """Abstract values of all equations but those inside of a kernel."""
    for equation in jaxpr.eqns:
        yield from (made.aval for made in equation.outvars)
        if equation.primitive.name == "pallas_call":
            continue
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, ClosedJaxpr | Jaxpr):
                    yield from arrays(item.jaxpr if isinstance(item, ClosedJaxpr) else item)


@pytest.mark.parametrize("rows", [1, 8], ids=["a row for all", "rows"])
@pytest.mark.parametrize("model", [PLAIN, SWITCHES], ids=["plain", "all"])
def test_a_tpu_holds_no_scores_of_a_prompt_and_one_row_of_logits(rows: int, model: Decoder) -> None:
    layout = Layout(data=4, fsdp=1, tensor=2)
    names = tuple(layout.mesh_shape)
    mesh = AbstractMesh(
        tuple(layout.mesh_shape.values()), names, axis_types=(AxisType.Auto,) * len(names)
    )
    target = MeshTarget(platform="tpu", layout=layout, dtype="bfloat16", mesh=mesh)
    job = replace(tiny.job(layout=layout, model=model), batch=Batch(total=8))
    decode = Decode(StepFunctions(job, target), Sampling(temperature=0.0))
    state = decode.abstract_state(rows, PROMPT)
    params = jax.eval_shape(decode.weights, decode.steps.abstract_state.params)
    tokens = jax.ShapeDtypeStruct((rows, PROMPT), jnp.int32)
    traced = jax.make_jaxpr(partial(decode.prefill, capacity=PROMPT))(
        params, {}, tokens, state.token, state.key
    )
    shapes = {made.shape for made in arrays(traced.jaxpr)}
    assert (rows, model.heads, PROMPT, model.head_dim) in shapes, "what the kernel gives"
    assert not [shape for shape in shapes if shape[-2:] == (PROMPT, PROMPT)]
    assert {shape for shape in shapes if len(shape) == 3 and shape[-1] == model.vocab} == {
        (rows, 1, model.vocab)
    }


def test_the_kernel_reads_a_padded_prompt_as_plain_attention_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        splash, "splash_attention", partial(splash.splash_attention, interpret=True)
    )
    plain = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=SWITCHES))
    here = plain.target
    tpu = MeshTarget(platform="tpu", layout=here.layout, dtype=here.dtype, mesh=here.mesh)
    rng = np.random.default_rng(0)
    params = {
        path: jnp.asarray(rng.normal(size=shape.shape) / 4, jnp.float32)
        for path, shape in plain.network.params.items()
    }
    counts = jnp.asarray([PROMPT, 130], jnp.int32)
    tokens = rng.integers(0, 64, (2, PROMPT)).astype(np.int32)

    def read(steps: StepFunctions, padding: int) -> tuple[Any, Any]:
        """The cache after the prompts, and the hidden state of the last token of each."""
        module = Decode(steps, Sampling())._module(params, {})
        padded = np.where(np.arange(PROMPT) < counts[:, None], tokens, padding)
        hidden, cache = jax.jit(partial(module.prefill, capacity=PROMPT + 16, dtype=jnp.float32))(
            jnp.asarray(padded), counts
        )
        return cache, hidden[np.arange(2), np.asarray(counts) - 1]

    cache, wanted = read(plain, 0)
    found, last = read(StepFunctions(plain.job, tpu), 5)
    np.testing.assert_allclose(last, wanted, atol=2e-4)
    for row, count in enumerate(counts):
        for ours, theirs in ((found.key, cache.key), (found.value, cache.value)):
            np.testing.assert_allclose(
                ours[:, row, :, :count], theirs[:, row, :, :count], atol=2e-4
            )
    np.testing.assert_array_equal(found.recent, [tokens[0, -2:], tokens[1, 128:130]])
    np.testing.assert_array_equal(found.length, counts)


def test_flops_of_a_prompt_and_of_a_token_are_those_by_hand() -> None:
    """Widths 8: two heads of 4, one key head; a swiglu of 16; 32 tokens of vocabulary; 10 positions."""
    model = Decoder(layers=3, d_model=8, d_ff=16, heads=2, kv_heads=1, head_dim=4, vocab=32)
    token = 3 * 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    pair, logits = 2 * 2 * 8, 2 * 8 * 32
    assert model.prefill_flops(10) == 10 * token + logits + 3 * 55 * pair
    assert model.decode_flops(10) == token + logits + 3 * 10 * pair
    local = replace(model, window=4)
    assert local.decode_flops(10) == token + logits + 3 * 4 * pair
