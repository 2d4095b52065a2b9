"""Mixtures in every other layer: the layers' order, counts, training, a cache."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Layout, Remat
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.options import Router, Score
from tests.models.decoders import arrays, check_cache, module, program
from tests.steps import tiny
from tests.tiers import some

INTERLEAVED = replace(
    tiny.MODEL,
    layers=6,
    experts=4,
    d_ff=16,
    mixture_every=2,
    dense_d_ff=48,
    capacity_factor=0.0,
    window=3,
    global_every=3,
    tie_embeddings=False,
)
"""Windows repeat after three layers, mixtures after two."""
MAVERICK = Decoder(
    layers=48,
    d_model=5120,
    d_ff=8192,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocab=202_048,
    tie_embeddings=False,
    experts=128,
    experts_per_token=1,
    shared_experts=1,
    mixture_every=2,
    dense_d_ff=16_384,
    router=Router(score=Score.sigmoid, normalise=False),
)
"""https://huggingface.co/meta-llama/Llama-4-Maverick-17B-128E/blob/main/config.json, text."""


def by_hand(net: Any, tokens: Any, segments: Any, positions: Any) -> jax.Array:
    """Logits, layer by layer: dense, mixture, dense, mixture, ..."""
    x = net.embed(tokens, positions, net.no_history(tokens.shape[0]))
    windows = net.config.windows
    for layer in range(net.config.layers):
        stacked = net.blocks if layer % 2 else net.dense_blocks
        graph, state = nnx.split(stacked)
        block = nnx.merge(graph, jax.tree.map(lambda a, n=layer // 2: a[n], state))
        x, _ = block(x, segments, positions, None, windows[layer % len(windows)])
    return net.logits(net.normed(x))


@pytest.mark.slow
@pytest.mark.parametrize("every", some([2, 3], [2]))
def test_layers_come_in_their_order_also_through_a_cache(every: int) -> None:
    layers = 6 if every == 2 else 3
    net = module(replace(INTERLEAVED, mixture_every=every, layers=layers))
    assert net.blocks.mlp.gate[...].shape[0] == layers // every
    assert net.dense_blocks.mlp.gate[...].shape == (layers - layers // every, 32, 48)
    whole = check_cache(net, 9, prompt=6, capacity=12)
    if every == 2:
        known = program(net, by_hand)(*arrays(9, [9]))
        np.testing.assert_allclose(whole, known[0], atol=1e-4)


def test_parameters_and_flops_by_hand() -> None:
    """Llama 4 Maverick has 400 billion parameters and 17 active (its model card)."""
    attention = 5120 * 128 * 2 * (40 + 8)
    dense, expert, embedding = 3 * 5120 * 16_384, 3 * 5120 * 8192, 202_048 * 5120
    shell = 48 * attention + 24 * dense + 24 * 5120 * 128
    norms = 48 * 2 * 5120 + 5120
    assert MAVERICK.num_parameters == shell + norms + 24 * 129 * expert + 2 * embedding
    assert MAVERICK.num_parameters == pytest.approx(400e9, rel=0.01)
    active = shell + 24 * 2 * expert + embedding
    assert active + embedding == pytest.approx(17e9, rel=0.03)
    fields = tiny.job().data.fields()  # 32 tokens
    assert MAVERICK.flops(fields) == 32 * 2 * active + 48 * 32 * 33 // 2 * 2 * 40 * 256
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=INTERLEAVED))
    assert steps.network.num_parameters == INTERLEAVED.num_parameters


@pytest.mark.slow
def test_it_trains() -> None:
    free = {"dispatch": Dispatch.dropless, "capacity_factor": 1.25}
    model = replace(INTERLEAVED, window=0, global_every=0, layers=4, **free)
    job = tiny.job(layout=tiny.ONE_DEVICE, model=model)
    losses, _ = tiny.run(tiny.steps(job), 4)
    assert losses[-1] < losses[0] - 0.1
    full = replace(job, layout=Layout(fsdp=1, remat=Remat.full))
    assert tiny.run(tiny.steps(full), 2)[0] == pytest.approx(losses[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixture_every": 4}, "mixture-every 4 does not divide model.layers 6"),
        ({"dense_layers": 2}, "mixture-every 2 and model.dense-layers 2 both set"),
        ({"experts": 1, "dense_d_ff": 0}, "but the model is dense, so that it has no effect"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        replace(INTERLEAVED, **change)


def test_stages_and_rehearsals_keep_the_pattern() -> None:
    with pytest.raises(LayoutError, match=r"stages of 3 layers, which model\.mixture-every 2"):
        INTERLEAVED.check(Layout(fsdp=1, pipeline=2))
    layout = Layout(fsdp=2, expert=2, pipeline=2)
    small = MAVERICK.shrink(layout)
    small.check(layout)
    assert (small.layers, small.mixtures, small.shared_experts) == (4, 2, 1)
