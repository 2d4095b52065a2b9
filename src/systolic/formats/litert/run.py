"""Running a .tflite file with ai-edge-litert; imports neither jax nor the rest of this package."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class LiteProgram:
    """A .tflite file's first signature over rows of inputs: numbers are quantized on the way in and out.

    Attributes:
        tensors: Input to the name of its tensor.
    """

    def __init__(self, content: bytes, threads: int = 1) -> None:
        from ai_edge_litert.interpreter import Interpreter  # ty: ignore[import-not-found]

        self._interpreter = Interpreter(model_content=content, num_threads=threads)
        self._call: Any = self._interpreter.get_signature_runner()
        self._inputs = self._call.get_input_details()
        self._outputs = self._call.get_output_details()
        self.tensors = {name: one["name"] for name, one in self._inputs.items()}

    def call(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs of one call; inputs that the file does not have are left out."""
        given = {name: _stored(inputs[name], one) for name, one in self._inputs.items()}
        made = self._call(**given)
        return {name: _plain(made[name], one) for name, one in self._outputs.items()}

    def rows(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs for rows of inputs, [rows, ...] each, as many in a call as the file takes."""
        first = next(iter(self._inputs))
        batch, count = int(self._inputs[first]["shape"][0]), len(inputs[first])
        parts = []
        for start in range(0, count, batch):
            part = {
                name: _filled(inputs[name][start : start + batch], batch) for name in self._inputs
            }
            parts.append(self.call(part))
        return {
            name: np.concatenate([part[name] for part in parts])[:count] for name in self._outputs
        }


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows with the last one repeated up to ``count``."""
    missing = count - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def _stored(array: np.ndarray, detail: Mapping[str, Any]) -> np.ndarray:
    """Numbers as a tensor holds them."""
    scale, zero = detail["quantization"]
    dtype: np.dtype[Any] = np.dtype(detail["dtype"])
    if not scale:
        return np.ascontiguousarray(array, dtype)
    limits = np.iinfo(dtype.name)
    rounded = np.round(np.asarray(array, np.float32) / scale) + zero
    return np.clip(rounded, limits.min, limits.max).astype(dtype)


def _plain(array: np.ndarray, detail: Mapping[str, Any]) -> np.ndarray:
    """A tensor's numbers."""
    scale, zero = detail["quantization"]
    return (array.astype(np.float32) - zero) * np.float32(scale) if scale else array
