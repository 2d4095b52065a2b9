"""Published models by name: their sizes are those that were published."""

from typing import Any

import pytest
import torch
import transformers

from systolic.core.errors import OptionError
from systolic.models.families import family, find_published, published


@pytest.mark.parametrize("name", published())
def test_its_parameters_are_those_published(name: str) -> None:
    found = published()[name]
    model: Any = found.model()
    assert model.num_parameters == found.parameters
    assert found.config_source
    assert found.counted_by


@pytest.mark.slow
@pytest.mark.parametrize("name", published())
def test_transformers_counts_the_same(name: str) -> None:
    found = published()[name]
    fields = {key: value for key, value in found.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(found.config["model_type"], **fields)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert made.num_parameters() == found.parameters


def test_a_name_is_that_here_or_on_hugging_face() -> None:
    found = published()["llama-3.1-70b"]
    assert find_published("Llama-3.1-70B") is found
    assert find_published("meta-llama/Llama-3.1-70B") is found
    assert find_published("llama-3.1") is None


def test_an_unknown_kind_of_model_is_refused() -> None:
    with pytest.raises(OptionError, match=r"config.json is of the kind 'lama'; did you mean llama"):
        family({"model_type": "lama"}, "config.json")


@pytest.mark.parametrize("kind", ["gemma", "gpt_neox", "qwen2_vl", "roberta", "mistral3"])
def test_another_kind_of_model_is_no_misspelt_one(kind: str) -> None:
    with pytest.raises(OptionError) as raised:
        family({"model_type": kind}, "config.json")
    assert f"config.json is of the kind {kind!r}; known are bert, " in str(raised.value)
