"""Arrays on the wire of the Open Inference Protocol: JSON numbers, or raw bytes behind the JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from msgspec import Struct, field

from systolic.core.errors import OptionError
from systolic.serving.batch.request import BYTES, ArraySpec
from systolic.serving.batch.tensors import check_range
from systolic.serving.http.protocol import ProblemError, bad, with_infinities

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("float32"),
    "FP64": np.dtype("float64"),
}
"""Datatype of the protocol to that of NumPy; BYTES are object arrays."""


class WireTensor(Struct, kw_only=True):
    """An input of a request."""

    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)


def datatype(dtype: str) -> str:
    """The protocol's name of a dtype of an :class:`~systolic.serving.batch.request.ArraySpec`, as :func:`named` writes it."""
    if dtype == BYTES:
        return "BYTES"
    sent = named(np.zeros(0, np.dtype(dtype))).dtype
    return next(name for name, one in DTYPES.items() if one == sent)


def named(array: np.ndarray) -> np.ndarray:
    """An array in a dtype that the protocol has a name for: the next wider one where it has none for its own, such as float8."""
    if array.dtype == object or array.dtype in DTYPES.values():
        return array
    for wider in (np.uint8, np.int8, np.float32):
        if np.can_cast(array.dtype, wider):
            return array.astype(wider)
    raise ProblemError(
        status=400,
        message=f"an output is of the dtype {array.dtype}, which the protocol has no name for; leave it out of outputs",
    )


def described(spec: ArraySpec) -> dict[str, Any]:
    """An input or output as the model's metadata lists it."""
    return {"name": spec.name, "datatype": datatype(spec.dtype), "shape": list(spec.shape)}


def read_tensors(tensors: Sequence[WireTensor], raw: bytes) -> dict[str, np.ndarray]:
    """Inputs by name, from their JSON or from the bytes behind it.

    Raises:
        ProblemError: sizes, types or values do not agree.
    """
    found: dict[str, np.ndarray] = {}
    at = 0
    for one in tensors:
        if one.datatype not in DTYPES and one.datatype != "BYTES":
            raise bad(
                f"input {one.name} has the datatype {one.datatype[:20]!r}; known are BYTES, {', '.join(DTYPES)}"
            )
        if any(size < 0 for size in one.shape) or len(one.shape) > 32:
            raise bad(f"input {one.name} has the shape {one.shape[:8]}; sizes are 0 or more")
        if one.name in found:
            raise bad(f"input {one.name} is there twice; send each once")
        size = one.parameters.get("binary_data_size")
        if size is None:
            found[one.name] = _from_json(one)
            continue
        if not isinstance(size, int) or not 0 <= size <= len(raw) - at:
            raise bad(f"input {one.name} has {size} bytes by its JSON, and {len(raw) - at} follow")
        found[one.name] = _from_bytes(one, raw[at : at + size])
        at += size
    if at != len(raw):
        raise bad(f"{len(raw) - at} bytes follow the last input; binary_data_size does not add up")
    return found


def _from_json(one: WireTensor) -> np.ndarray:
    if not isinstance(one.data, list):
        raise bad(f"input {one.name} has no data; send a list, or bytes with binary_data_size")
    if one.datatype == "BYTES":
        flat = _flat(one.data)
        if not all(isinstance(text, str) for text in flat):
            raise bad(f"input {one.name} is of datatype BYTES; its data are texts")
        made = np.empty(len(flat), object)
        made[:] = [text.encode() for text in flat]
        return _shaped(one, made)
    dtype = DTYPES[one.datatype]
    try:
        plain = np.asarray(one.data)
        if plain.dtype == object or (plain.size and not _holds(plain, dtype)):
            raise ValueError(f"{plain.dtype} where {dtype} is expected")
        with np.errstate(over="raise"):
            check_range("it", plain, dtype)
            made = plain.astype(dtype)
    except (OptionError, ValueError, TypeError, OverflowError, FloatingPointError) as error:
        raise bad(f"input {one.name} does not fit {one.datatype} ({error})") from error
    return _shaped(one, made.reshape(-1))


def _holds(plain: np.ndarray, dtype: np.dtype) -> bool:
    """Whether values read from JSON keep their meaning in a dtype."""
    if dtype.kind == "b":
        return plain.dtype.kind == "b"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return plain.dtype.kind in "iu" and limits.min <= plain.min() and plain.max() <= limits.max
    return plain.dtype.kind in "iuf"


def _flat(data: list[Any]) -> list[Any]:
    while data and all(isinstance(one, list) for one in data):
        data = [value for one in data for value in one]
    return data


def _from_bytes(one: WireTensor, raw: bytes) -> np.ndarray:
    if one.datatype != "BYTES":
        dtype = DTYPES[one.datatype].newbyteorder("<")
        if len(raw) != math.prod(one.shape) * dtype.itemsize:
            raise bad(
                f"input {one.name} has {len(raw)} bytes; {one.datatype}{one.shape} has {math.prod(one.shape) * dtype.itemsize}"
            )
        made = np.frombuffer(raw, dtype)
        if one.datatype == "BOOL" and made.size and np.frombuffer(raw, np.uint8).max() > 1:
            raise bad(f"input {one.name} has a BOOL that is neither 0 nor 1")
        return _shaped(one, made)
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        if len(raw) - at < 4 + size:
            raise bad(
                f"input {one.name} ends within an element; each is 4 bytes of length and its bytes"
            )
        found.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    made = np.empty(len(found), object)
    made[:] = found
    return _shaped(one, made)


def _shaped(one: WireTensor, flat: np.ndarray) -> np.ndarray:
    if flat.size != math.prod(one.shape):
        raise bad(
            f"input {one.name} has {flat.size} values; its shape {one.shape} has {math.prod(one.shape)}"
        )
    try:
        return flat.reshape(one.shape)
    except ValueError as error:
        raise bad(f"input {one.name} has the shape {one.shape}, which is too large") from error


def to_bytes(array: np.ndarray) -> bytes:
    """An array as the protocol's raw bytes."""
    if array.dtype != object:
        return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()
    parts = []
    for one in array.reshape(-1):
        raw = one.encode() if isinstance(one, str) else bytes(one)
        parts += [len(raw).to_bytes(4, "little"), raw]
    return b"".join(parts)


def to_json(array: np.ndarray) -> list[Any]:
    """An array as a flat list for :func:`~systolic.serving.http.protocol.encode`, row-major.

    Raises:
        ProblemError: it holds bytes that are no UTF-8.
    """
    if array.dtype != object:
        wide = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        listed = wide.reshape(-1).tolist()
        if wide.dtype.kind != "f" or not np.isinf(wide).any():
            return listed
        return with_infinities(listed, b"Infinity")  # as Triton writes and its clients read it
    try:
        return [one if isinstance(one, str) else bytes(one).decode() for one in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise ProblemError(
            status=400, message="an output holds bytes that are no UTF-8; ask for it as binary data"
        ) from error
