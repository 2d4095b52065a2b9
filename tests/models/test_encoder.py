"""The encoder: what it computes, counts, refuses and learns."""

import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Field, Layout, Remat
from systolic.models.encoder.config import Encoder, FeedForward
from systolic.recipes.mlm import mlm
from systolic.steps import jaxpr
from systolic.steps.network import ModelStructure
from tests.models import encoders
from tests.models.decoders import drawn

LARGE = Encoder(layers=24, d_model=1024, d_ff=4096, heads=16, vocab=30522)


def normed(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + 1e-12
    ) * scale + bias


def erf_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def by_hand(params, batch, heads):
    """Logits of the masked places in numpy, as the paper's reference implementation has them: one token sees its whole segment."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    batch = {name: np.asarray(value) for name, value in batch.items()}
    x = p["embedding"][batch["tokens"]] + p["positions"][batch["positions"]] + p["token_types"][0]
    x = normed(x, p["embedding_norm/scale"], p["embedding_norm/bias"])
    same = batch["segments"][:, :, None] == batch["segments"][:, None, :]
    for layer in range(len(p["blocks/up"])):
        b = {name[7:]: value[layer] for name, value in p.items() if name.startswith("blocks/")}
        size = b["query"].shape[-1]
        q, k, v = (
            np.einsum("bsd,dhe->bshe", x, b[name]) + b[f"{name}_bias"].reshape(heads, size)
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(size)
        scores = np.where(same[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("bhqk,bkhe,hed->bqd", weights, v, b["out"]) + b["out_bias"]
        x = normed(x + out, b["attention_norm/scale"], b["attention_norm/bias"])
        out = erf_gelu(x @ b["up"] + b["up_bias"]) @ b["down"] + b["down_bias"]
        x = normed(x + out, b["mlp_norm/scale"], b["mlp_norm/bias"])
    x = np.take_along_axis(x, batch["places"][..., None], axis=1)
    x = erf_gelu(x @ p["transform"] + p["transform_bias"])
    x = normed(x, p["transform_norm/scale"], p["transform_norm/bias"])
    return x @ p["embedding"].T + p["logits_bias"]


def test_logits_and_loss_are_those_of_bert_by_hand() -> None:
    of = encoders.steps(encoders.job())
    params, rest = drawn(of.network)
    batch = encoders.batch(of, 0)

    def run(params):
        module = of.network.module(params, rest, train=False)
        hidden = module(batch["tokens"], batch["segments"], batch["positions"])
        return module.logits(hidden, batch["places"])

    expected = by_hand(params, batch, encoders.MODEL.heads)
    np.testing.assert_allclose(jax.jit(run)(params), expected, rtol=2e-3, atol=2e-3)
    labels = np.asarray(batch["labels"])
    chance = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    nats = -np.take_along_axis(chance, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    sums = jax.jit(of.evaluate)(params, rest, batch)
    assert float(sums["loss"].weight) == (labels >= 0).sum() > 0
    assert float(sums["loss"].total) == pytest.approx(nats[labels >= 0].sum(), rel=1e-4)
    hits = (expected.argmax(-1) == labels)[labels >= 0].sum()
    assert float(sums["accuracy"].total) == hits


@pytest.mark.slow
def test_the_loss_of_hidden_tokens_falls() -> None:
    of = encoders.steps(encoders.job())
    losses, _ = encoders.run(of, 40)
    assert losses[0] == pytest.approx(math.log(384), rel=0.05)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


def test_sizes_are_the_published_ones() -> None:
    """BERT-large with the head for masked tokens is 335,174,458 parameters, as Hugging Face's BertForMaskedLM counts."""
    layer = 4 * (1024**2 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    embeddings = (30522 + 512 + 2) * 1024 + 2 * 1024
    head = 1024**2 + 1024 + 2 * 1024 + 30522
    assert LARGE.num_parameters == 24 * layer + embeddings + head == 335_174_458
    assert encoders.steps(encoders.job(model=LARGE)).network.num_parameters == 335_174_458
    pooled = replace(LARGE, pooler=True)
    assert pooled.num_parameters - LARGE.num_parameters == 1024**2 + 1024
    for model in (pooled, replace(encoders.MODEL, mlp=FeedForward.swiglu)):
        of = encoders.steps(encoders.job(model=model))
        assert of.network.num_parameters == model.num_parameters


def test_flops_are_those_of_the_program_and_of_bert_by_hand() -> None:
    of = encoders.steps(encoders.job())

    def run(params, rest, batch):
        return of.sums(params, rest, batch, train=False)[0]["loss"].total

    counted = jaxpr.count(run, of.network.params, of.network.model_state, of.abstract_batch(1))
    assert of.forward_flops == counted
    rows = {
        "tokens": Field(shape=(512,), dtype="int32"),
        "places": Field(shape=(76,), dtype="int32"),
    }
    # 24 layers of 12 d^2 multiply-adds a token and 2 s d a token for attention; 76 x (d^2 + 30522 d).
    macs = 24 * 512 * (12 * 1024**2 + 2 * 512 * 1024) + 76 * (1024**2 + 30522 * 1024)
    assert LARGE.flops(rows) == 2 * macs


def test_rematerialised_blocks_and_other_types_of_tokens() -> None:
    def gradient(of):
        params, rest = drawn(of.network)

        def loss(params):
            return of.sums(params, rest, encoders.batch(of, 0), train=True)[0]["loss"].total

        return jax.jit(jax.grad(loss))(params)

    one = replace(encoders.MODEL, layers=1)
    plain = gradient(encoders.steps(encoders.job(model=one)))
    layout = Layout(remat=Remat.save_names, remat_names=("query", "mlp"))
    again = gradient(encoders.steps(encoders.job(model=one, layout=layout)))
    for name, value in plain.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-3, atol=1e-4)
    still = [name for name, value in plain.items() if not float(jnp.abs(value).max())]
    assert still == []
    of = encoders.steps(encoders.job(model=replace(one, pooler=True)))
    params, rest = drawn(of.network)
    batch = encoders.batch(of, 0)

    @jax.jit
    def run(params, batch):
        module = of.network.module(params, rest, train=False)
        inputs = (batch["tokens"], batch["segments"], batch["positions"])
        first = module(*inputs)
        return first, module(*inputs, jnp.ones_like(batch["tokens"])), module.pooled(first)

    first, second, pooled = run(params, batch)
    assert float(jnp.abs(first - second).max()) > 1e-3
    assert pooled.shape == (16, 32)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tensor=3), "layout.tensor 3 does not divide model.heads 16"),
        (Layout(pipeline=2), "layout.pipeline is 2 but an encoder"),
        (Layout(expert=2), "layout.expert is 2 but an encoder"),
        (Layout(loss_chunks=2), "layout.loss-chunks is 2 but an encoder"),
        (Layout(remat=Remat.offload, remat_names=("quer",)), "did you mean query"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout: Layout, says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        LARGE.check(layout)
    assert "\n" not in str(caught.value)


def test_options_that_contradict_each_other_are_one_line() -> None:
    for make, says in (
        (lambda: Encoder(heads=5), "model.d-model 768 is not a multiple of model.heads 5"),
        (lambda: mlm(model=Encoder(head=False)), "model.head is False"),
        (lambda: mlm(sequence=1024), "give --model.positions 1024"),
        (lambda: mlm(sequence=64, predictions=65), "predictions is 65 and a row has 64 tokens"),
        (lambda: mlm(model=Encoder(vocab=257)), "model.vocab is 257 but the tokenizer has 258"),
        (lambda: mlm(tokenizer=Path("t.json")), "tokenizer is t.json but no path is given"),
    ):
        with pytest.raises(OptionError, match=says) as caught:
            make()
        assert "\n" not in str(caught.value)
    assert mlm(sequence=512).data.fields()["places"].shape == (76,)


def test_shrunk_models_fit_the_layout() -> None:
    layout = Layout(tensor=2, fsdp=3, context=2)
    small = LARGE.shrink(layout)
    small.check(layout)
    assert small.d_model <= 192


def program(layers: int, platform: str) -> jax.stages.Lowered:
    """An encoder's forward pass, lowered for a platform."""
    target = replace(encoders.steps(encoders.job()).target, platform=platform)
    network = ModelStructure(replace(encoders.MODEL, layers=layers), target)
    ids = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    return jax.jit(lambda p, s, ids: network.module(p, s, False)(ids, ids, ids)).lower(
        *network.shapes, ids
    )


def test_a_layer_on_a_cpu_reads_the_one_before():
    def widest(layers):
        text = program(layers, "cpu").compile().as_text()
        return max(len(found.split(", %")) for found in re.findall(r" fusion\((.*?)\), kind", text))

    assert widest(4) == widest(2)
    assert "inlineable" not in program(2, "tpu").as_text()
