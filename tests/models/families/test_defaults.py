"""Absent fields of a config.json: the values of transformers' own classes, field by field."""

from copy import deepcopy
from typing import Any

import pytest
import transformers

from systolic.core.errors import OptionError
from systolic.models.families import family
from tests.models.families import dense_models, test_mixtures

CASES = {
    **{name: dense_models.CASES[name] for name in dense_models.FAMILIES},
    **{name: test_mixtures.CASES[name] for name in test_mixtures.QUICK},
    "qwen2-sliding": dense_models.CASES["qwen2-sliding"],
    "qwen3-moe-window": (
        "qwen3_moe",
        {**test_mixtures.QWEN, "use_sliding_window": True, "sliding_window": 6},
    ),
}
NEUTRAL = {"model_type", "architectures", "dtype", "transformers_version"}
NONE = {"num_experts_per_tok", "n_group", "topk_group"}
"""Fields of DeepSeek-V2 without which transformers computes nothing."""


def whole(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """All fields as transformers has them."""
    given = {name: value for name, value in deepcopy(fields).items() if name not in NEUTRAL}
    return transformers.AutoConfig.for_model(kind, **given).to_dict()


def of(kind: str, fields: dict[str, Any]) -> Any:
    return family({"model_type": kind}, "config").model({**fields, "model_type": kind})


@pytest.mark.parametrize("name", CASES)
def test_an_absent_field_has_the_value_of_transformers(name: str) -> None:
    kind, fields = CASES[name]
    given = whole(kind, fields)
    wrong = {}
    for field in sorted(set(given) - NEUTRAL):
        less = {key: value for key, value in given.items() if key != field}
        try:
            full = whole(kind, less)
        except Exception as error:
            # Sizes that the class itself refuses; the error is of a package below transformers.
            if type(error).__name__ != "StrictDataclassClassValidationError":
                raise
            continue
        if kind == "deepseek_v2" and field in NONE:
            with pytest.raises(OptionError, match=f"{field} is absent"):
                of(kind, less)
            continue
        try:
            expected: Any = of(kind, full)
        except OptionError as error:
            expected = str(error)
        try:
            found: Any = of(kind, less)
        except OptionError as error:
            found = str(error)
        if found != expected:
            wrong[field] = (found, expected)
    assert not wrong


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES.values()}))
def test_a_config_without_fields_is_the_one_of_transformers(kind: str) -> None:
    if kind == "deepseek_v2":
        with pytest.raises(OptionError, match="num_experts_per_tok is absent"):
            of(kind, {})
        return
    assert of(kind, {}) == of(kind, whole(kind, {}))


LOGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2 reads no sliding_window_pattern": (
        "gemma2",
        {**dense_models.GEMMA, "sliding_window_pattern": 3},
    ),
    "gemma3 caps no attention": (
        "gemma3_text",
        {**dense_models.GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0},
    ),
}


@pytest.mark.parametrize("name", LOGITS)
def test_fields_that_transformers_ignores_are_ignored(name: str) -> None:
    kind, fields = LOGITS[name]
    plain = {
        key: value
        for key, value in fields.items()
        if key not in ("sliding_window_pattern", "attn_logit_softcapping")
    }
    assert of(kind, fields).windows == of(kind, plain).windows
    if kind == "gemma3_text":
        assert of(kind, fields).attention_cap == 0


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 2.0}},
            "attention_factor is 2.0 beside a factor of 1",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim is 1.0 beside rope_type linear",
        ),
    ],
)
def test_what_is_not_followed_is_named(kind: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        of(kind, fields)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
