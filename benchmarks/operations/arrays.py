"""Shapes as ``ops.json`` writes them, and abstract arrays of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "bool": jnp.bool_,
    "s32": jnp.int32,
}


def array(text: Any) -> jax.ShapeDtypeStruct:
    """``bf16[32,512,64]`` as an abstract array.

    Raises:
        ValueError: the text is no shape of a known dtype.
    """
    match = _SHAPE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[1] not in _DTYPES:
        raise ValueError(f"{text!r} is no shape of {', '.join(_DTYPES)}")
    dims = tuple(int(n) for n in match[2].split(",") if n)
    return jax.ShapeDtypeStruct(dims, _DTYPES[match[1]])


def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)
