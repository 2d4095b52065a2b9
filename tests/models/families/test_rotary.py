"""Rotary embeddings against transformers: wavelengths of every kind, and fields of config.json files of both forms."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from systolic.core.errors import OptionError
from systolic.models.decoder.families.fields import rotary, rotary_fields
from systolic.models.decoder.families.llama import llama
from systolic.models.decoder.layers import frequencies
from systolic.models.decoder.options import RopeScaling, Rotary, Stretching

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500_000.0},
    "linear": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "llama3": {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "deepseek": {"rope_theta": 10_000.0, "rope_scaling": DEEPSEEK},
    "gpt-oss": {"rope_parameters": {"rope_theta": 150_000.0, **GPT_OSS}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.8}},
}
"""Fields of config.json files."""


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_wavelengths_are_those_of_transformers(form: str, size: int) -> None:
    given = {"max_position_embeddings": 131_072, **FORMS[form]}
    config = transformers.LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, head_dim=size, **deepcopy(given)
    )
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, magnitude = 500_000.0 ** -(np.arange(0, size, 2) / size), 1.0
    else:
        theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config)
    for fields in (given, config.to_dict()):
        theta, scaling = rotary(fields)
        assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)
        np.testing.assert_allclose(frequencies(Rotary(theta, scaling), size), theirs, rtol=2e-6)


def test_no_original_length_is_the_longest_one() -> None:
    """As transformers fills it in."""
    _, scaling = rotary({**FORMS["yarn"], "max_position_embeddings": 2048})
    assert scaling.original_positions == 2048
    assert scaling.attention_factor == 0.8


@pytest.mark.parametrize("form", FORMS)
def test_fields_are_written_back(form: str) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, **deepcopy(FORMS[form])
    )
    model = llama(config.to_dict())
    again = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        **rotary_fields(model),
    )
    assert llama(again.to_dict()) == model
    for name, value in config.rope_parameters.items():
        assert again.rope_parameters.get(name) == value or name == "type"


def test_layers_of_a_kind_have_their_own() -> None:
    by_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = {"rope_parameters": by_kind}
    assert rotary(fields, layers="full_attention") == (
        1e6,
        RopeScaling(kind=Stretching.linear, factor=8.0),
    )
    assert rotary(fields, layers="sliding_attention") == (1e4, RopeScaling())


def test_softmax_scale_of_latent_attention() -> None:
    """By hand, as DeepSeek-V3's published code: (0.1 ln 40 + 1)^2 = 1.8738."""
    _, scaling = rotary(FORMS["deepseek"])
    assert scaling.softmax_factor == pytest.approx(1.8738, abs=1e-4)
    assert RopeScaling().softmax_factor == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "high-freq-factor 1.0 is not above",
        ),
    ],
)
def test_unknown_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rotary(fields)
