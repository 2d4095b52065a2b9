"""Tiny models of DeepSeek's families by their names on Hugging Face, with weights that a seed and a name give."""

import zlib
from collections.abc import Mapping

import numpy as np

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "deepseek_v3": {
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        "q_lora_rank": 20,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "norm_topk_prob": False,
    },
    "deepseek_v2_lite": {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
}
"""What each has beside SIZES."""
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 10))
"""int64[batch, sequence]."""


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of this name, f32: matrices of deviation 0.15, norms about 1, biases about 0."""
    rng = np.random.default_rng([7, zlib.crc32(name.encode())])
    value = rng.normal(size=shape) * (0.15 if len(shape) > 1 else 0.2)
    return (value + (1.0 if "norm" in name else 0.0)).astype(np.float32)
