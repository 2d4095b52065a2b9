"""Llama against transformers: logits, and weights there and back."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from systolic.models.families import family
from tests.models.foreign import converted, held, relative, returned


@pytest.mark.parametrize("tied", [False, True])
def test_llama_agrees_with_transformers(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    tensors = held(theirs)
    known = family(config.to_dict(), "the model")
    ours, arrays = converted(known, config.to_dict(), tensors)
    tokens = np.random.default_rng(0).integers(0, 250, (2, 17))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()
    positions = np.broadcast_to(np.arange(17), tokens.shape)
    logits = ours(jnp.asarray(tokens), jnp.ones_like(tokens), jnp.asarray(positions))
    assert relative(logits, expected) < 1e-4
    back = returned(known, config.to_dict(), arrays)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and tied:
            continue
        np.testing.assert_array_equal(back[name], tensor.array)
