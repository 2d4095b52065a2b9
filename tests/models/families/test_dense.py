"""Dense families against transformers: logits, also through a cache, sizes, files there and back, in float32 and bfloat16."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder
from systolic.models.families import CONFIG, family
from tests.models.families.dense_models import (
    BY_KIND,
    CASES,
    FAMILIES,
    GEMMA,
    GPT2,
    SHARED,
    random_model,
)
from tests.models.foreign import Held, continued, converted, relative, returned, saved, structure
from tests.tiers import some

TOKENS = np.random.default_rng(0).integers(0, 120, (2, 17))
POSITIONS = jnp.asarray(np.broadcast_to(np.arange(17), TOKENS.shape))


def logits_of(model: Any, tokens: np.ndarray = TOKENS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens), use_cache=False).logits.float().numpy()


@pytest.mark.parametrize(
    "name", some(list(CASES), ("llama-3.1", "qwen2", "gemma2", "gemma3", "gpt2"))
)
def test_logits_and_weights_agree(name: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[name])
    expected = logits_of(theirs)
    config, tensors = saved(theirs, tmp_path)
    known = family(config, "the model")
    model = known.model(config)
    assert model.num_parameters == theirs.num_parameters()
    assert model == known.model(theirs.config.to_dict())
    ours, arrays = converted(known, config, tensors)
    graph, state = nnx.split(ours)
    tokens = jnp.asarray(TOKENS)
    whole = jax.jit(lambda state: nnx.merge(graph, state)(tokens, jnp.ones_like(tokens), POSITIONS))
    assert relative(whole(state), expected) < 1e-4
    back = returned(known, config, arrays)
    assert set(back) == set(tensors)
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value.array, err_msg=key)


@pytest.mark.parametrize("name", some(FAMILIES, ["gemma3"]))
def test_a_cache_gives_the_logits_of_the_whole_text(name: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[name])
    expected = logits_of(theirs)
    config, tensors = saved(theirs, tmp_path)
    ours, _ = converted(family(config, "the model"), config, tensors)
    graph, state = nnx.split(ours)
    tokens = jnp.asarray(TOKENS)
    written = jax.jit(lambda state: continued(nnx.merge(graph, state), tokens, 9))(state)
    assert relative(written, expected[:, 9:]) < 1e-4


@pytest.mark.parametrize("name", some(list(CASES), FAMILIES))
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[name])
    config, tensors = saved(theirs, tmp_path / "theirs")
    known = family(config, "the model")
    written = known.config(known.model(config))
    assert known.model(written) == known.model(config)
    (tmp_path / CONFIG).write_text(json.dumps(written))
    arrays = {key: value.array for key, value in tensors.items()}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert relative(logits_of(again), logits_of(theirs)) < 1e-6


@pytest.mark.parametrize("name", some(FAMILIES, ["gemma2"]))
def test_bfloat16_is_as_near_as_it_rounds(name: str, tmp_path: Path) -> None:
    """Both sides round after other operations: the mean difference from float32 is that of transformers itself.

    Of two texts alone the ratio is 0.93 by a standard deviation of 0.1 (12 of qwen3, up to 1.27); so many average it.
    """
    texts = np.random.default_rng(1).integers(0, 120, (32, 17))
    theirs = random_model(*CASES[name])
    exact = logits_of(theirs, texts)
    config, tensors = saved(theirs, tmp_path)
    known = family(config, "the model")
    _, arrays = converted(known, config, tensors)
    made = structure(known.model(config), "bfloat16")
    narrow = {path: array.astype(jnp.bfloat16) for path, array in arrays.items()}
    graph, state = nnx.split(made.module(narrow, {}, train=False))
    tokens = jnp.asarray(texts)
    positions = jnp.broadcast_to(jnp.arange(17), tokens.shape)
    call = jax.jit(lambda state: nnx.merge(graph, state)(tokens, jnp.ones_like(tokens), positions))
    logits = call(state)
    assert logits.dtype == jnp.bfloat16
    own = np.abs(logits_of(theirs.bfloat16(), texts) - exact).mean()
    assert np.abs(np.asarray(logits, np.float32) - exact).mean() < 1.1 * own


def test_the_text_part_of_a_multimodal_gemma(tmp_path: Path) -> None:
    text = {**GEMMA, "num_hidden_layers": 7, "rope_parameters": BY_KIND}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=119
    )
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    fields, tensors = saved(theirs, tmp_path)
    known = family(fields, "the model")
    assert fields["model_type"] == "gemma3"
    settled, tensors = known.canonical(fields, tensors)
    ours, _ = converted(known, settled, tensors)
    graph, state = nnx.split(ours)
    tokens = TOKENS % 119
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()
    given = jnp.asarray(tokens)
    call = jax.jit(lambda state: nnx.merge(graph, state)(given, jnp.ones_like(given), POSITIONS))
    assert relative(call(state), expected) < 1e-4
    assert known.config(known.model(settled))["model_type"] == "gemma3_text"


def test_first_files_of_gpt2_have_no_prefix() -> None:
    """As openai-community/gpt2 has them: names of the trunk alone, and masks."""
    theirs = random_model(*CASES["gpt2"])
    trunk = {name: Held(value.numpy()) for name, value in theirs.transformer.state_dict().items()}
    trunk["h.0.attn.bias"] = Held(np.ones((1, 1, 40, 40), np.float32))
    config = theirs.config.to_dict()
    known = family(config, "the model")
    settled, tensors = known.canonical(config, trunk)
    ours, _ = converted(known, settled, tensors)
    tokens = jnp.asarray(TOKENS)
    made = jax.jit(lambda tokens: ours(tokens, jnp.ones_like(tokens), POSITIONS))(tokens)
    assert relative(made, logits_of(theirs)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("llama", {**SHARED, "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {**SHARED, "rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'"),
        ("qwen2", {**SHARED, "use_sliding_window": True, "max_window_layers": 2}, "layer_types is"),
        ("gemma2", {**GEMMA, "layer_types": ["chunked_attention"] * 4}, "layer_types is chunked"),
        ("gemma3_text", {**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional"),
        (
            "gemma3_text",
            {
                **GEMMA,
                "rope_parameters": {**BY_KIND, "sliding_attention": BY_KIND["full_attention"]},
            },
            "stretch the layers of sliding_attention",
        ),
        ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ("gpt2", {**GPT2, "activation_function": "silu"}, "activation_function is 'silu'"),
    ],
)
def test_another_form_is_refused(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        family({"model_type": kind}, "the model").model(fields)


@pytest.mark.parametrize(
    ("name", "to", "field"),
    [
        ("gemma2", "llama", "embedding-scale|norm"),
        ("qwen2", "llama", "out-bias|qkv-bias"),
        ("qwen3", "qwen2", "qkv-bias|qk-norm"),
        ("mistral", "llama", "window"),
        ("llama", "gpt2", "mlp"),
        ("gemma3", "gemma2", "qk-norm|rope-theta"),
    ],
)
def test_a_family_refuses_what_it_cannot_say(name: str, to: str, field: str) -> None:
    kind, fields = CASES[name]
    config = transformers.AutoConfig.for_model(kind, **fields).to_dict()
    model = family(config, "the model").model(config)
    with pytest.raises(OptionError, match=rf"model\.({field}) is"):
        family({"model_type": to}, "the model").config(model)


def test_published_sizes() -> None:
    """GPT-2 small (124,439,808), and Gemma 3 4B's text part from the few fields that its published config.json has."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    with torch.device("meta"):
        small = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        gemma = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**deepcopy(text)))
    for kind, fields, theirs in (("gpt2", {}, small), ("gemma3", {"text_config": text}, gemma)):
        model = family({"model_type": kind}, "the model").model(fields)
        assert isinstance(model, Decoder)
        assert model.num_parameters == theirs.num_parameters()
    assert small.num_parameters() == 124_439_808
