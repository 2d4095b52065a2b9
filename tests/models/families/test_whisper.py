"""Whisper against transformers: encoder, logits, cache, sizes, and weights there and back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from systolic.core.errors import OptionError
from systolic.models.families import family, read_config
from systolic.models.whisper.module import TextCache
from tests.models import speech
from tests.models.foreign import converted, held, relative, returned

FEATURES = np.random.default_rng(1).normal(size=(2, 60, 20)).astype(np.float32)
PROMPT = 3
TOKENS = np.random.default_rng(2).integers(0, 101, (2, 11)).astype(np.int32)


def ours():
    theirs = speech.foreign()
    config = theirs.config.to_dict()
    known = family(config, "the model")
    tensors = held(theirs)
    return known, config, tensors, *converted(known, config, tensors)


def test_whisper_agrees_with_transformers_with_and_without_a_cache() -> None:
    known, config, tensors, module, arrays = ours()
    theirs = speech.foreign()
    spectrogram = torch.tensor(FEATURES.swapaxes(1, 2))
    with torch.no_grad():
        encoded = theirs.model.encoder(spectrogram).last_hidden_state.numpy()
        expected = theirs(spectrogram, decoder_input_ids=torch.tensor(TOKENS).long()).logits.numpy()

    @jax.jit
    def run(features: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
        def extend(cache: TextCache, token: jax.Array) -> tuple[TextCache, jax.Array]:
            logits, cache = module.extend(token, cache)
            return cache, logits

        heard = module.encode(features)
        first, cache = module.prefill(tokens[:, :PROMPT], heard, 12)
        cache, others = jax.lax.scan(extend, cache, tokens[:, PROMPT:].T)
        written = jnp.concatenate([first[:, None], others.swapaxes(0, 1)], axis=1)
        return heard, module.logits(module.decode(tokens, heard)), written

    heard, logits, written = run(jnp.asarray(FEATURES), jnp.asarray(TOKENS))
    assert relative(heard, encoded) < 1e-4
    assert relative(logits, expected) < 1e-4
    assert relative(written, expected[:, PROMPT - 1 :]) < 1e-4
    back = returned(known, config, arrays)
    assert set(tensors) - set(back) == {"proj_out.weight"}
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, tensors[name].array, name)


def test_a_written_directory_is_opened_by_transformers(tmp_path: Path) -> None:
    known, config, _, _, arrays = ours()
    model = known.model(config)
    (tmp_path / "config.json").write_text(
        transformers.WhisperConfig(**known.config(model)).to_json_string()
    )
    whole = {name: np.ascontiguousarray(a) for name, a in returned(known, config, arrays).items()}
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    opened, report = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in speech.foreign().state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    assert known.model(read_config(tmp_path)) == model == speech.MODEL


def test_parameters_are_those_of_transformers() -> None:
    theirs = speech.foreign()
    assert speech.MODEL.num_parameters == theirs.num_parameters(only_trainable=True)


def test_other_structures_are_refused() -> None:
    config = speech.config().to_dict() | {"activation_function": "relu"}
    with pytest.raises(OptionError, match="activation_function is 'relu' and only 'gelu'"):
        family(config, "it").model(config)
    config = speech.config().to_dict() | {"decoder_ffn_dim": 7}
    with pytest.raises(OptionError, match="encoder_ffn_dim is 48 and decoder_ffn_dim 7"):
        family(config, "it").model(config)
