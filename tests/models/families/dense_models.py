"""Tiny models of the dense families of transformers, with random norms and biases."""

from copy import deepcopy
from typing import Any

import torch
import transformers

SHARED = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GEMMA = {**SHARED, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 5}
GPT2 = {"vocab_size": 120, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHARED),
    "llama-3.1": (
        "llama",
        {**SHARED, "tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 10},
    ),
    "llama-biased": (
        "llama",
        {**SHARED, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "mistral": ("mistral", {**SHARED, "sliding_window": 5}),
    "mistral-full": ("mistral", {**SHARED, "sliding_window": None, "rope_theta": 1e6}),
    "qwen2": ("qwen2", SHARED),
    "qwen2-sliding": (
        "qwen2",
        {**SHARED, **SLIDING, "max_window_layers": 0, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {**SHARED, "head_dim": 10, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        "qwen3",
        {**SHARED, "head_dim": 10, "attention_bias": True, "rope_scaling": {**YARN}},
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": BY_KIND}),
    "gemma2-pattern": ("gemma2", {**GEMMA, "sliding_window_pattern": 3}),
    "gemma3-capped": (
        "gemma3_text",
        {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    ),
    "gemma3-short": ("gemma3_text", {**GEMMA, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": (
        "gpt2",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 56},
    ),
}
"""Name to model_type and fields; sequences of the tests are longer than windows and one pattern of layers."""
FAMILIES = ("llama-3.1", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2")
"""Each family once."""


def random_model(kind: str, fields: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers whose norms and biases are random too."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **deepcopy(fields))
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    offset = 0.0 if kind.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, value in made.state_dict().items():
            scale = value.dim() == 1 and not name.endswith("bias")
            spread = 0.3 if value.dim() == 1 else value.shape[-1] ** -0.5
            value.copy_((offset if scale else 0.0) + spread * torch.randn(value.shape))
    return made.eval()
