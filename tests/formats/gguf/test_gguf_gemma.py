"""Gemma 3 in GGUF: what llama.cpp's converter writes of its rotary embeddings and attention, and what its code says instead."""

import copy
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.core.errors import OptionError
from systolic.formats.source import open_source
from tests.formats.gguf.test_gguf import NAMES, WHOLE, add_tokenizer, finish
from tests.formats.test_source import arrays
from tests.models.foreign import relative, structure
from tests.tiers import some

GEMMA = {
    **NAMES,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def gemma(**changes: Any) -> Any:
    """A small Gemma 3 of transformers, whose query_pre_attn_scalar is the width of a head."""
    sizes = {
        "vocab_size": 304,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    # Configurations of transformers write into the dicts that they are given.
    config = transformers.Gemma3TextConfig(**copy.deepcopy({**sizes, **changes}))
    made = transformers.Gemma3ForCausalLM(config).eval()
    for name, value in made.named_parameters():
        torch.nn.init.normal_(value, 0.0, 0.1 if "norm" in name else 0.3)
    return made


def write(path: Path, model: Any, **more: Any) -> Path:
    """The model as llama.cpp's converter writes it; ``more`` are calls of the writer by name."""
    out, config = gguf.GGUFWriter(path, "gemma3"), model.config
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(1_000_000.0)
    if "sliding_attention" in config.layer_types:
        out.add_sliding_window(config.sliding_window)
    for name, value in more.items():
        getattr(out, name)(value)
    add_tokenizer(out, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        theirs = WHOLE.get(name)
        if theirs is None:
            layer, _, part = (
                name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            )
            theirs = f"blk.{layer}.{GEMMA[part]}.weight"
        out.add_tensor(theirs, array + 1 if "norm" in name else array)
    finish(out)
    return path


def both(file: Path, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Our logits of the file, and transformers' of the model, over rows of many windows."""
    tokens = np.random.default_rng(0).integers(0, 304, (2, 40))
    source = open_source(file)
    ours = structure(source.model).module(arrays(source, "float32"), {}, train=False)
    positions = np.broadcast_to(np.arange(40), tokens.shape)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens), use_cache=False).logits.numpy()
    found = jax.jit(lambda *given: ours(*given))(tokens, np.ones_like(tokens), positions)
    return np.asarray(found), theirs


CASES = {
    "1B": ({}, {}),
    "4B": (
        {"rope_scaling": LINEAR},
        {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0},
    ),
    "factor without a type": ({"rope_scaling": LINEAR}, {"add_rope_scaling_factor": 8.0}),
    "own base of local layers": (
        {"rope_local_base_freq": 500.0},
        {"add_rope_freq_base_swa": 500.0},
    ),
    "period": (
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
        {"add_sliding_window_pattern": 3},
    ),
    "cap": ({"final_logit_softcapping": 4.0}, {"add_final_logit_softcapping": 4.0}),
    "no window": ({"layer_types": ["full_attention"] * 6}, {}),
    "27B": (
        {"num_hidden_layers": 62, "query_pre_attn_scalar": 8, "rope_scaling": LINEAR},
        {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0},
    ),
}


DEFAULT = ("factor without a type", "own base of local layers", "period")


@pytest.mark.parametrize("name", some(list(CASES), DEFAULT))
def test_logits_are_those_of_the_right_configuration(tmp_path: Path, name: str) -> None:
    changes, written = CASES[name]
    model = gemma(**changes)
    file = write(tmp_path / "small.gguf", model, **written)
    ours, theirs = both(file, model)
    # 62 layers of random weights add up what float32 rounds.
    assert relative(ours, theirs) < (1e-4 if name == "27B" else 2e-5)


def test_the_stretching_matters(tmp_path: Path) -> None:
    """Without it the logits are others, so that the comparison above says something."""
    ours, theirs = both(write(tmp_path / "small.gguf", gemma()), gemma(rope_scaling=LINEAR))
    assert relative(ours, theirs) > 1e-2


@pytest.mark.usefixtures("at_once")
def test_parity_compares_with_the_stretched_model(tmp_path: Path) -> None:
    """The reader of transformers leaves these fields out."""
    written = CASES["4B"][1] | CASES["cap"][1]
    file = write(tmp_path / "small.gguf", gemma(rope_scaling=LINEAR), **written)
    made = systolic.import_model(file, tmp_path / "bundle")
    assert made.parity is not None
    assert made.parity.max_relative < 1e-5
    model = systolic.open(tmp_path / "bundle").job.model
    assert (model.rope_scaling.factor, model.logit_cap) == (8.0, 4.0)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "rope.scaling.type 'yarn'"),
        ({"add_rope_scaling_type": gguf.RopeScalingType.LINEAR}, "with the factor None"),
        ({"add_sliding_window_pattern": [True, False] * 3}, "one by one"),
        ({"add_rope_dimension_count": 8}, "rotates 8 of a head's 16 dims"),
    ],
)
def test_what_is_not_followed_is_named(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        open_source(write(tmp_path / "small.gguf", gemma(), **more))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
