"""Numbers of requests in the dtype of a model: NumPy knows neither bfloat16's kind nor when a number is too large."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from systolic.core.errors import OptionError


def kind_of(dtype: Any) -> str:
    """``f``, ``i``, ``u`` or ``b`` as of NumPy's own dtypes."""
    return "f" if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype).kind


def check_range(name: str, array: np.ndarray, dtype: Any) -> None:
    """Refuses numbers that a dtype can't hold; infinities and NaN are no numbers, and pass to floats.

    Raises:
        OptionError: some are too large or too small.
    """
    dtype, kind = np.dtype(dtype), kind_of(dtype)
    if array.dtype == dtype or not array.size or kind not in "fiu":
        return
    numbers = array if kind_of(array.dtype) != "f" else array[np.isfinite(array)]
    if not numbers.size:
        return
    least, most = numbers.min(), numbers.max()
    about: Any = jnp.finfo(dtype) if kind == "f" else jnp.iinfo(dtype)
    if kind == "f":
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.stack([least, most]).astype(dtype)).all()
    else:
        fits = least >= about.min and most <= about.max
    if not fits:
        raise OptionError(
            f"{name} has numbers from {least} to {most}, and {dtype} holds {about.min} to {about.max}"
        )
