"""Latent attention, shared experts and dense first layers against transformers, by hand, and through a cache."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Layout, Remat
from systolic.models.attention import Logits, Masking, attention
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.moe import choose, moved
from systolic.models.decoder.options import Latent, Router, Score
from systolic.models.splash import splash_attention
from systolic.steps import jaxpr
from tests.models.decoders import logits, program
from tests.models.drawing import normal
from tests.models.foreign import continued
from tests.models.test_attention import target
from tests.recorded.deepseek.weights import MODELS, SIZES, TOKENS, drawn
from tests.steps import tiny
from tests.tiers import some

RECORDED = Path(__file__).parents[1] / "recorded/deepseek/logits.json"
LATENT = replace(
    tiny.MODEL,
    layers=3,
    kv_heads=4,
    experts=4,
    d_ff=16,
    dense_layers=1,
    dense_d_ff=48,
    shared_experts=2,
    capacity_factor=0.0,
    latent=Latent(
        kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    ),
    router=Router(score=Score.sigmoid, groups=2, top_groups=1, bias=True, scale=2.5),
    tie_embeddings=False,
)
WINDOWED = replace(LATENT, layers=4, window=3, global_every=2)
V2_LITE = Decoder(
    layers=27,
    d_model=2048,
    d_ff=1408,
    heads=16,
    kv_heads=16,
    vocab=102_400,
    tie_embeddings=False,
    experts=64,
    experts_per_token=6,
    shared_experts=2,
    dense_layers=1,
    dense_d_ff=10_944,
    latent=Latent(kv_lora_rank=512),
    router=Router(normalise=False),
)
"""https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json"""
V3 = Decoder(
    layers=61,
    d_model=7168,
    d_ff=2048,
    heads=128,
    kv_heads=128,
    vocab=129_280,
    tie_embeddings=False,
    experts=256,
    experts_per_token=8,
    shared_experts=1,
    dense_layers=3,
    dense_d_ff=18_432,
    latent=Latent(kv_lora_rank=512, q_lora_rank=1536),
    router=Router(score=Score.sigmoid, groups=8, top_groups=4, bias=True, scale=2.5),
)
"""https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without its extra layer for two tokens."""


def of_hugging_face(name: str) -> Decoder:
    """The recorded model of this name by our fields."""
    known: dict[str, Any] = {**SIZES, **MODELS[name]}
    third = name == "deepseek_v3"
    return Decoder(
        layers=known["num_hidden_layers"],
        d_model=known["hidden_size"],
        d_ff=known["moe_intermediate_size"],
        heads=known["num_attention_heads"],
        kv_heads=known["num_key_value_heads"],
        vocab=known["vocab_size"],
        tie_embeddings=False,
        experts=known["n_routed_experts"],
        experts_per_token=known["num_experts_per_tok"],
        shared_experts=known["n_shared_experts"],
        dense_layers=known["first_k_dense_replace"],
        dense_d_ff=known["intermediate_size"],
        dispatch=Dispatch.dropless if third else Dispatch.slots,
        capacity_factor=1.25 if third else 0.0,
        latent=Latent(
            kv_lora_rank=known["kv_lora_rank"],
            q_lora_rank=known["q_lora_rank"] or 0,
            qk_nope_head_dim=known["qk_nope_head_dim"],
            qk_rope_head_dim=known["qk_rope_head_dim"],
            v_head_dim=known["v_head_dim"],
        ),
        router=Router(
            score=Score.sigmoid if third else Score.softmax,
            normalise=known["norm_topk_prob"],
            scale=known.get("routed_scaling_factor", 1.0),
            groups=known.get("n_group", 1),
            top_groups=known.get("topk_group", 1),
            bias=third,
        ),
    )


class Weights:
    """Our arrays of the recorded weights: which name is which, and what is transposed or reordered."""

    def __init__(self, config: Decoder) -> None:
        self.config = config

    def value(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        stack, _, rest = path.partition("/")
        if stack == "embedding":  # ours are read with a scale of the root of the width
            return drawn("model.embed_tokens.weight", shape) / np.float32(shape[1] ** 0.5)
        if stack == "unembedding":
            return drawn("lm_head.weight", shape[::-1]).T
        if stack == "norm":
            return drawn("model.norm.weight", shape)
        first = self.config.dense_layers if stack == "blocks" else 0
        rows = [self._layer(f"model.layers.{first + i}.", rest) for i in range(shape[0])]
        return np.stack(rows)

    def _layer(self, prefix: str, path: str) -> np.ndarray:
        c, sizes = self.config, self.config.latent
        d, h, r, f = c.d_model, c.heads, sizes.kv_lora_rank, c.d_ff
        mlp, attention = f"{prefix}mlp.", f"{prefix}self_attn."

        def matrix(name: str, given: int, made: int) -> np.ndarray:
            return drawn(f"{name}.weight", (made, given)).T

        def halves(turned: np.ndarray) -> np.ndarray:
            """Theirs turns neighbours, ours dims half a head apart."""
            return np.concatenate([turned[..., ::2], turned[..., 1::2]], axis=-1)

        nope, value = sizes.qk_nope_head_dim, sizes.v_head_dim
        both = matrix(f"{attention}kv_b_proj", r, h * (nope + value)).reshape(r, h, -1)
        down = matrix(f"{attention}kv_a_proj_with_mqa", d, r + sizes.qk_rope_head_dim)
        q, query = sizes.q_lora_rank, "q_b_proj" if sizes.q_lora_rank else "q_proj"
        query = matrix(attention + query, q or d, h * sizes.query_dim).reshape(q or d, h, -1)
        packed = drawn(f"{mlp}experts.gate_up_proj", (c.experts, 2 * f, d)).swapaxes(1, 2)
        width = c.shared_experts * f
        dense = {
            "gate": matrix(f"{mlp}gate_proj", d, c.dense_width),
            "up": matrix(f"{mlp}up_proj", d, c.dense_width),
            "down": matrix(f"{mlp}down_proj", c.dense_width, d),
        }
        mixture = {
            "router": matrix(f"{mlp}gate", d, c.experts),
            "bias": drawn(f"{mlp}gate.e_score_correction_bias", (c.experts,)),
            "gate": packed[..., :f],
            "up": packed[..., f:],
            "down": drawn(f"{mlp}experts.down_proj", (c.experts, d, f)).swapaxes(1, 2),
            "shared/gate": matrix(f"{mlp}shared_experts.gate_proj", d, width),
            "shared/up": matrix(f"{mlp}shared_experts.up_proj", d, width),
            "shared/down": matrix(f"{mlp}shared_experts.down_proj", width, d),
        }
        number = int(prefix.split(".")[2])
        forward = dense if number < c.dense_layers else mixture
        return {
            "attention_norm/scale": drawn(f"{prefix}input_layernorm.weight", (d,)),
            "mlp_norm/scale": drawn(f"{prefix}post_attention_layernorm.weight", (d,)),
            "latent/query_down": matrix(f"{attention}q_a_proj", d, q),
            "latent/query_norm/scale": drawn(f"{attention}q_a_layernorm.weight", (q,)),
            "latent/query": np.concatenate([query[..., :nope], halves(query[..., nope:])], -1),
            "latent/down": np.concatenate([down[:, :r], halves(down[:, r:])], -1),
            "latent/norm/scale": drawn(f"{attention}kv_a_layernorm.weight", (r,)),
            "latent/key": both[..., :nope],
            "latent/value": both[..., nope:],
            "out": matrix(f"{attention}o_proj", h * value, d).reshape(h, value, d),
            **{f"mlp/{name}": array for name, array in forward.items()},
        }[path]


def both(net: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits of tokens int32[batch, sequence] without a cache, and behind the fourth through one."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    whole = logits(net, tokens, jnp.ones_like(tokens), positions)
    return whole, continued(net, tokens, 4)


@pytest.mark.parametrize("name", some(list(MODELS), ["deepseek_v2"]))
def test_logits_are_those_of_transformers_also_through_a_cache(name: str) -> None:
    config = of_hugging_face(name)
    network = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config)).network
    weights = Weights(config)
    params, rest = (
        {path: weights.value(path, shape.shape) for path, shape in shapes.items()}
        for shapes in (network.params, network.model_state)
    )
    wanted = np.asarray(json.loads(RECORDED.read_text())[name])
    tokens = jnp.asarray(TOKENS, jnp.int32)

    net = network.module(params, rest, train=False)
    whole, written = program(net, both)(tokens)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(whole, wanted, atol=1e-4 * largest, rtol=0)
    np.testing.assert_allclose(written, wanted[:, 4:], atol=1e-4 * largest, rtol=0)
    cache, sizes = net.empty_cache(2, 12, jnp.dtype("float32")), config.latent
    assert cache.key.shape == (config.layers, 2, 1, 12, sizes.qk_rope_head_dim)
    assert cache.value.shape == (config.layers, 2, 1, 12, sizes.kv_lora_rank)


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_windows_go_on_behind_the_dense_layers(cached: bool) -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=WINDOWED))
    shapes = steps.network.params, steps.network.model_state
    params, rest = ({path: drawn(path, s.shape) for path, s in some.items()} for some in shapes)
    tokens = jax.random.randint(jax.random.key(2), (1, 9), 0, 64)

    net: Any = steps.network.module(params, rest, train=False)
    windows = [stretch.windows for stretch in net.stretches]
    assert windows == [(3, 0), (0, 3)]  # layer 0 of four has a window, 1 none, 2 one, 3 none
    if cached:
        whole, written = program(net, both)(tokens)
        np.testing.assert_allclose(written, whole[:, 4:], atol=1e-4)


def test_parameters_and_flops_by_hand() -> None:
    """DeepSeek-V2-Lite has 15.7 billion parameters and 2.4 active, DeepSeek-V3 671 and 37 (their model cards)."""
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    expert, embedding = 3 * 2048 * 1408, 102_400 * 2048
    norms = 27 * (2 * 2048 + 512) + 2048
    dense, router = 3 * 2048 * 10_944, 2048 * 64
    shell = 27 * attention + norms + dense + 26 * router + 2 * embedding
    assert V2_LITE.num_parameters == shell + 26 * 66 * expert == 15_706_484_224
    active = 27 * attention + dense + 26 * (router + 8 * expert) + embedding
    assert active + embedding == pytest.approx(2.66e9, rel=0.01)
    assert active == pytest.approx(2.4e9, rel=0.03)
    fields = tiny.job().data.fields()  # 32 tokens
    pairs = 27 * 32 * 33 // 2
    assert V2_LITE.flops(fields) == 32 * 2 * active + pairs * 2 * 16 * (192 + 128)
    assert V2_LITE.decode_flops(32) == 2 * active + 27 * 32 * 2 * 16 * (512 + 64 + 512)

    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    expert, embedding = 3 * 7168 * 2048, 129_280 * 7168
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    shell = 61 * attention + 3 * 3 * 7168 * 18_432 + 58 * 7168 * 256
    assert V3.num_parameters == shell + norms + 2 * embedding + 58 * 257 * expert
    assert V3.num_parameters == pytest.approx(671.03e9, rel=1e-4)
    active = shell + 58 * 9 * expert + embedding
    assert active == pytest.approx(37e9, rel=0.015)
    assert V3.flops(fields) == 32 * 2 * active + 61 * 32 * 33 // 2 * 2 * 128 * 320


def test_v3_is_counted_as_its_published_step_was() -> None:
    """2,048 rows of 4,096 tokens on 128 chips were 16,413.484 TFLOP a chip (MaxText's count, attention halved)."""
    rows = 2048 / 128
    tokens, pairs = 4096, 61 * 4096 * 4096 / 2
    token, whole = V3.prefill_flops(1), V3.prefill_flops(1) * tokens
    assert token > 0
    once = whole - tokens * 61 * 2 * 128 * 320 + pairs * 2 * 128 * 320
    assert 3 * rows * once / 1e12 == pytest.approx(16_413.484, rel=1e-3)


def test_the_program_has_what_is_counted() -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=LATENT))
    assert steps.network.num_parameters == LATENT.num_parameters
    assert steps.network.model_state["blocks/mlp/bias"].shape == (2, 4)
    dropless = replace(LATENT, dispatch=Dispatch.dropless, capacity_factor=1.25)
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=dropless))
    batch = steps.abstract_batch(1)
    counted = jaxpr.count(
        lambda p, r, b: steps.evaluate(p, r, b),
        steps.shapes.params,
        steps.shapes.model_state,
        batch,
    )
    # The program computes all pairs; the model's arithmetic counts the causal ones.
    unseen = 3 * 2 * 4 * (12 + 6) * 32 * 31 / 2
    assert dropless.flops(steps.job.data.fields()) + unseen == pytest.approx(counted)


@pytest.mark.slow
def test_it_trains_and_keeps_its_biases() -> None:
    model = replace(LATENT, router_bias_rate=0.125)
    job = tiny.job(layout=tiny.ONE_DEVICE, model=model)
    losses, state = tiny.run(tiny.steps(job), 5)
    assert losses[-1] < losses[0] - 0.1
    bias = np.asarray(state.model_state["blocks/mlp/bias"])
    assert np.abs(bias).max() > 0
    assert not np.mod(bias, 0.125).any()
    full = replace(job, layout=Layout(fsdp=1, remat=Remat.full))
    assert tiny.run(tiny.steps(full), 2)[0] == pytest.approx(losses[:2], rel=1e-5)


def test_biases_move_against_the_load_while_training() -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=LATENT))
    shapes = steps.network.params, steps.network.model_state
    params, rest = ({path: drawn(path, s.shape) for path, s in some.items()} for some in shapes)
    batch = tiny.batch(steps, 0)
    inputs = (batch["tokens"], batch["segments"], batch["positions"])

    def after(params: Any, train: bool) -> Any:
        net = steps.network.module(params, rest, train)
        nnx.capture(net.hidden, nnx.Intermediate)(*inputs)
        return steps.network.variables(net)

    before = rest["blocks/mlp/bias"]
    kept = jax.jit(after, static_argnums=1)(params, False)["blocks/mlp/bias"]
    found = jax.jit(after, static_argnums=1)(params, True)["blocks/mlp/bias"]
    np.testing.assert_array_equal(kept, before)
    np.testing.assert_allclose(np.abs(found - before), 0.001, rtol=1e-3)


def test_a_rehearsal_keeps_the_switches() -> None:
    layout = Layout(fsdp=2, expert=4, tensor=2, pipeline=2)
    small = V3.shrink(layout)
    small.check(layout)
    assert (small.dense_layers, small.mixtures, small.experts) == (1, 4, 8)
    assert small.latent
    assert (small.router.bias, small.router.groups, small.router.top_groups) == (True, 2, 1)


def test_an_analytic_model_knows_of_all_parts() -> None:
    outline = V3.outline(Layout())
    assert outline.parameters == V3.num_parameters
    assert outline.keys == 128 * (192 + 128)
    mlp = 2 * (58 * 2048 * (8 * 1.25 + 1) + 3 * 18_432) / 61
    whole, split = outline.kept[Remat.minimal]
    assert whole == 3 * 7168 + 1536 + 512 + 64
    assert split == pytest.approx(128 * (2 * 192 + 128) + mlp, abs=1)


def test_the_step_of_a_bias() -> None:
    found = moved(jnp.zeros(4), jnp.array([0.5, 0.25, 0.1, 0.15]), 0.01)
    np.testing.assert_allclose(found, [-0.01, 0.0, 0.01, 0.01])


def test_a_bias_changes_the_choice_and_not_the_weight() -> None:
    router = Router(score=Score.sigmoid, bias=True, normalise=False)
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0]])
    scores, weights, chosen = choose(router, 2, logits, jnp.array([0.0, 0.0, 0.0, 1.0]))
    assert chosen.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights[0], scores[0, [3, 0]])
    # In two groups the sums of the best two: 1.83 and 1.23 without a bias, with it the second leads.
    grouped = replace(router, groups=2, top_groups=1)
    assert sorted(choose(grouped, 2, logits, jnp.zeros(4))[2][0].tolist()) == [0, 1]
    assert sorted(choose(grouped, 2, logits, jnp.array([0, 0, 1.0, 0]))[2][0].tolist()) == [2, 3]


def test_the_kernel_takes_values_of_another_width() -> None:
    query, key = (normal(seed, (1, 128, 2, 192)) for seed in (0, 1))
    value = normal(2, (1, 128, 2, 128))
    masking, scaled = Masking(causal=True), Logits(scale=192**-0.5)
    found = splash_attention(target("tpu"), query, key, value, masking, scaled, interpret=True)
    plain = attention(target("cpu"), query, key, value, masking, scaled)
    assert found.shape == (1, 128, 2, 128)
    np.testing.assert_allclose(found, plain, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_norm": True}, "qk-norm is for plain attention"),
        ({"dense_layers": 3}, "leaves no mixture of model.layers 3"),
        ({"router": Router(groups=3)}, "groups 3 does not make equal groups"),
        ({"experts_per_token": 3}, "more than the 2 experts of its router.top-groups"),
        ({"experts": 1}, "but the model is dense, so that it has no effect"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        replace(LATENT, **change)


def test_groups_of_switches_check_themselves() -> None:
    with pytest.raises(OptionError, match="kv-lora-rank is 0"):
        Latent(q_lora_rank=8)
    with pytest.raises(OptionError, match="rope-head-dim 7 is odd"):
        Latent(kv_lora_rank=8, qk_rope_head_dim=7)
    with pytest.raises(OptionError, match="top-groups 3 is more than its 2 groups"):
        Router(groups=2, top_groups=3)
    with pytest.raises(LayoutError, match=r"does not divide model\.layers less dense-layers 1 2"):
        LATENT.check(Layout(fsdp=1, pipeline=4))
