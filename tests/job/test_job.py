"""A job as JSON, and what it refuses."""

import json

import ml_dtypes
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.job import Batch
from systolic.job.precision import Stored
from tests.steps import tiny


def test_a_job_is_plain_values_with_its_parts_by_class() -> None:
    plain = tiny.job(steps=7).to_json()
    plain = json.loads(json.dumps(plain))
    assert (plain["name"], plain["steps"], plain["batch"]) == (
        "tiny",
        7,
        {"total": 16, "per_device": None},
    )
    types = [plain[part]["type"] for part in ("model", "task", "data")]
    assert types == ["Decoder", "LanguageModel", "Tokens"]
    assert plain["model"]["d_model"] == tiny.MODEL.d_model
    assert "quantization" not in plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"total": 0}, "batch.total is 0"),
        ({"per_device": -1.5}, "batch.per-device is -1.5"),
        ({}, "give exactly one of them"),
        ({"total": 8, "per_device": 1.0}, "give exactly one of them"),
    ],
)
def test_a_batch_is_a_number_of_examples(given: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError) as refused:
        Batch(**given)
    assert said in str(refused.value)


def test_stored_elements_have_the_bytes_of_their_dtype() -> None:
    dtypes = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    for one in Stored:
        assert one.bytes == np.dtype(dtypes[one.dtype]).itemsize
