"""Families with experts against transformers: logits, also through a cache, sizes, and files there and back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from systolic.core.errors import OptionError
from systolic.models.decoder import moe
from systolic.models.decoder.families.gpt import unpacked
from systolic.models.decoder.moe import choose
from systolic.models.families import CONFIG, family, read_config
from tests.models.foreign import Held, continued, converted, relative, returned, structure
from tests.tiers import some

SHARED = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 8}
LATENTS = {
    **SHARED,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 12,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rope_parameters": {**SCALED, "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.3},
}
QWEN = {
    **SHARED,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 10,
}
MIXTRAL = {
    **SHARED,
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
}
GPT_OSS = {
    **SHARED,
    "intermediate_size": 24,
    "head_dim": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 4,
    "rope_parameters": {**SCALED, "factor": 32, "truncate": False},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-tied": ("mixtral", {**MIXTRAL, "tie_word_embeddings": True, "sliding_window": None}),
    "qwen3-moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "qwen3-moe-first": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0]}),
    "qwen3-moe-every-other": ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2}),
    "deepseek-v2": (
        "deepseek_v2",
        {**LATENTS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENTS, "q_lora_rank": None, "n_group": 1}),
    "deepseek-v3": ("deepseek_v3", LATENTS),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {**LATENTS, "rope_interleave": False, "rope_parameters": None, "rope_theta": 5e3},
    ),
}
QUICK = ("gpt-oss", "qwen3-moe-first", "deepseek-v3")
"""Biases and sinks, dense layers first, latent attention with a chosen router."""
TOKENS = np.random.default_rng(0).integers(0, 120, (2, 17))


def random_model(kind: str, fields: dict[str, Any]) -> Any:
    """A model of transformers whose norms, biases and buffers are random too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, value in made.state_dict().items():
            if value.dim() == 1:
                around = 1.0 if "norm" in name else 0.0
                value.copy_(around + 0.3 * torch.randn(value.shape))
            else:
                value.copy_(torch.randn(value.shape) / 4)
    return made.eval()


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS), use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", some(list(CASES), ["gpt-oss"]))
def test_a_mixture_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[name])
    expected = logits_of(theirs)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    known = family(config, "the model")
    model = known.model(config)
    assert model.num_parameters == theirs.num_parameters()
    stored = load_file(tmp_path / "model.safetensors")
    ours, arrays = converted(known, config, {key: Held(value) for key, value in stored.items()})

    graph, state = nnx.split(ours)
    tokens, positions = jnp.asarray(TOKENS), np.broadcast_to(np.arange(TOKENS.shape[1]), (2, 17))

    @jax.jit
    def both(state: Any) -> tuple[jax.Array, jax.Array]:
        net = nnx.merge(graph, state)
        call = nnx.capture(net, nnx.Intermediate)
        whole = call(tokens, jnp.ones_like(tokens), jnp.asarray(positions))[0]
        return whole, continued(net, tokens, 9)

    whole, written = both(state)
    assert relative(whole, expected) < 1e-4
    assert relative(written, expected[:, 9:]) < 1e-4

    back = returned(known, config, arrays)
    assert set(back) == set(stored)
    for key, value in stored.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)


@pytest.mark.parametrize("name", some(["deepseek-v2", "deepseek-v3"], ["deepseek-v3"]))
def test_a_router_in_bfloat16_chooses_as_that_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same activations and weights in bfloat16: equal logits in float32, not their rounded values."""
    kind, fields = CASES[name]
    config = {"model_type": kind, **fields}
    model: Any = family(config, "the model").model(config)
    target: Any = structure(model, "bfloat16").target
    draw = np.random.default_rng(0).normal
    x, weights = draw(size=(2, 400, 32)), draw(size=(8, 32)) / 6
    theirs = next(
        one for one in random_model(kind, fields).modules() if "TopkRouter" in type(one).__name__
    ).bfloat16()
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(weights))
        for buffer in theirs.buffers():
            buffer.zero_()
        logits, _, experts = theirs(torch.tensor(x).bfloat16())
    found: list[Any] = []

    def watched(*given: Any) -> Any:
        made = choose(*given)
        found.extend((given[2], made[2]))
        return made

    monkeypatch.setattr(moe, "choose", watched)
    with nnx.use_eager_sharding(False):
        mixture = moe.Mixture(model, nnx.Rngs(0), target)
    state = nnx.state(mixture, nnx.Param)
    nnx.update(mixture, jax.tree.map(lambda one: one.astype(jnp.bfloat16), state))
    mixture.router.set_value(jnp.asarray(weights.T, jnp.bfloat16))

    @jax.jit
    def chosen(x: jax.Array) -> list[Any]:
        mixture(x)
        return found

    made, ours = chosen(jnp.asarray(x, jnp.bfloat16))
    assert made.dtype == jnp.float32
    assert relative(made.reshape(800, 8), logits.numpy()) < 1e-6
    ours = np.sort(ours.reshape(800, -1), axis=-1)
    np.testing.assert_array_equal(ours, np.sort(experts.numpy(), axis=-1))


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt-oss", "qwen3-moe-every-other", "deepseek-v2", "deepseek-v3"]
)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[name])
    config = json.loads(theirs.config.to_json_string())
    known = family(config, "the model")
    written = known.config(known.model(config))
    assert known.model(written) == known.model(config)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs/model.safetensors")
    _, arrays = converted(known, config, {key: Held(value) for key, value in stored.items()})
    (tmp_path / CONFIG).write_text(json.dumps(written))
    tensors = {
        key: np.ascontiguousarray(value) for key, value in returned(known, written, arrays).items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative(logits_of(again), logits_of(theirs)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("qwen3_moe", {**QWEN, "mlp_only_layers": [2]}, "make layers"),
        ("gpt_oss", {**GPT_OSS, "swiglu_limit": 5.0}, r"swiglu_limit is 5.0"),
        ("deepseek_v2", {**LATENTS, "norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {**LATENTS, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v3", {**LATENTS, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ],
)
def test_another_form_is_refused(kind: str, fields: dict[str, Any], words: str) -> None:
    config = {"model_type": kind, **fields}
    with pytest.raises(OptionError, match=words):
        family(config, "the model").model(config)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_what_a_family_cannot_say_is_refused(kind: str) -> None:
    fields = {"mixtral": MIXTRAL, "qwen3_moe": QWEN, "gpt_oss": GPT_OSS}[kind]
    known = family({"model_type": kind}, "the model")
    model: Any = known.model(fields)
    with pytest.raises(
        OptionError, match=f"model.logit-cap is 3, not 0, as far as a config.json of {kind}"
    ):
        known.config(replace(model, logit_cap=3.0))


def test_quantized_weights_are_refused_and_their_sizes_known() -> None:
    config = {
        **LATENTS,
        "model_type": "deepseek_v3",
        "quantization_config": {"quant_method": "fp8"},
    }
    known = family(config, "the model")
    assert known.model(config).num_parameters
    with pytest.raises(OptionError, match="quantization_config says that the weights are in fp8"):
        known.conversion(config)


def test_experts_in_mxfp4_are_those_of_transformers() -> None:
    """Random codes and scales, both orders of a byte's halves."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = np.random.default_rng(0).integers
    blocks = draw(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = draw(120, 132, (2, 6, 3), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(unpacked(blocks, scales), wanted.numpy())
    config = {
        "model_type": "gpt_oss",
        **GPT_OSS,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    rules = family(config, "the model").conversion(config).rules
    (gates,) = (rule for rule in rules if "blocks/mlp/gate" in rule.ours)
    gate, up = gates.read([blocks, scales])
    np.testing.assert_array_equal(gate, wanted.numpy()[..., ::2])
    np.testing.assert_array_equal(up, wanted.numpy()[..., 1::2])
    assert gates.names((0,))[0] == "model.layers.0.mlp.experts.gate_up_proj_blocks"
    with pytest.raises(OptionError, match="MXFP4 are read and not written"):
        gates.write([gate, up])
