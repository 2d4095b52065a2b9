"""Numbers that a model's dtype can't hold are refused, and bfloat16 is one that it can have."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.serving.batch.intake import _check_numbers
from systolic.serving.request import ANY, ArraySpec

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.array([1e39]), "float32"),
        (np.array([1e300, np.nan]), "float32"),
        (np.array([1.0, -70000.0], np.float32), "float16"),
        (np.array([10**6]), "float16"),
        (np.array([1e39]), "bfloat16"),
        (np.array([300]), "uint8"),
        (np.array([-1]), "uint8"),
    ],
)
def test_numbers_that_are_too_large_are_refused(given: np.ndarray, dtype: str) -> None:
    with pytest.raises(OptionError, match=rf"x has numbers from .* and {dtype} holds .* to"):
        _check_numbers(given, ArraySpec(name="x", dtype=dtype, shape=(ANY,)))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.array([3.4e38, np.inf, np.nan]), "float32"),
        (np.array([65504, -65504]), "float16"),
        (np.array([1.0, np.inf], BF16), "bfloat16"),
        (np.array([1.0, np.inf], BF16), "float32"),
        (np.array([3.3e38, -np.inf], np.float32), "bfloat16"),
        (np.array([7]), "bfloat16"),
        (np.zeros(0), "float16"),
        (np.array([True]), "bool"),
    ],
)
def test_others_are_taken(given: np.ndarray, dtype: str) -> None:
    _check_numbers(given, ArraySpec(name="x", dtype=dtype, shape=(ANY,)))


@pytest.mark.parametrize(
    ("given", "dtype"), [(np.array([1.0], BF16), "int32"), (np.array([0.5]), "int32")]
)
def test_numbers_of_another_kind_are_refused(given: Any, dtype: str) -> None:
    with pytest.raises(OptionError, match="and the model takes int32; convert it"):
        _check_numbers(given, ArraySpec(name="x", dtype=dtype, shape=(ANY,)))
