"""Fields that a family does not read are found without a list of those that it does."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers

from systolic.models.families import HOMES, family, published, unread

MORE: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 2}}
"""Fields that transformers' own defaults lack."""


def model(kind: str) -> Callable[[Any], Any]:
    return family({"model_type": kind}, kind).model


@pytest.mark.parametrize("kind", sorted(HOMES))
def test_no_field_of_a_family_is_reported(kind: str) -> None:
    made = transformers.AutoConfig.for_model(kind, **MORE.get(kind, {}))
    assert unread(made.to_dict(), model(kind)) == []


@pytest.mark.parametrize("name", published())
def test_no_field_of_a_published_model_is_reported(name: str) -> None:
    config = published()[name].config
    assert unread(config, model(config["model_type"])) == []


def test_other_fields_are_reported() -> None:
    config = published()["llama-3.1-8b"].config
    strange = {"logits_scaling": 8.0, "clip_qkv": 0, "is_causal": False, "attention_multiplier": 1}
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 32}
    without_effect = {"attention_dropout": 0.1, "torch_dtype": "bfloat16", "bos_token_id": 1}
    given = {**config, **strange, **windows, **without_effect, "rope_theta": 1e4, "nothing": None}
    assert unread(given, model("llama")) == sorted({**strange, **windows})


def test_windows_that_are_switched_off_are_no_fields() -> None:
    config = published()["qwen3-8b"].config
    off = {**config, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 36}
    assert unread(off, model("qwen3")) == []
    assert unread(off | {"final_logit_softcapping": 30.0}, model("qwen3")) == [
        "final_logit_softcapping"
    ]


def test_the_language_part_of_a_larger_model_is_searched() -> None:
    text = dict(published()["gemma-3-27b"].config)
    whole = {"model_type": "gemma3", "text_config": text | {"strange": 1}, "odd": 2}
    assert unread(whole, model("gemma3")) == ["odd", "strange"]
