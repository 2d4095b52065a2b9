"""Maximal update parametrisation (muP): learning rates tuned at one width of a decoder hold at others.

Tensor Programs V (Yang et al. 2022), Table 8, for rules such as Adam, whose updates don't depend on the scale of gradients:

- Updates of matrices whose fan-in grows with the width are divided by the growth, since their outputs sum more terms.
- Updates of embeddings, norms and biases stay: their inputs do not grow.
- Matrices from the residual stream to a fixed number of outputs (the output matrix, a router) also start smaller, so that
  their initial values do not outweigh what they learn.
- If head-dim grows, attention logits are divided by head-dim instead of its square root.

All widths (d-ff, heads or head-dim) are assumed to grow by the same factor as d-model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from systolic.job import OptimizerKind
from systolic.models.decoder.config import STANDARD, Decoder, NormKind

GROWING = ("query", "key", "value", "out", "gate", "up", "down", "router", "unembedding")
"""Names (last parts of paths) of the matrices whose fan-in grows with the width."""
NGRAMS = "ngrams"
"""Module whose output matrix reads rows of its tables, a fan-in that does not grow."""


def update_factor(config: Decoder, path: str, kind: OptimizerKind) -> float:
    """Factor of the update rule's updates for the parameter at a path."""
    from systolic.models.adapters import A, B

    *home, name = path.split("/")
    adapter = name == A
    if name == B or NGRAMS in home:
        return 1.0
    if adapter:
        name = home[-1]
    if name not in GROWING:
        return 1.0
    if kind is not OptimizerKind.muon or name == "unembedding":
        return config.shrinkage
    # An orthogonal update's output grows with the root of the fan-in: as it should if the fan-out grows too.
    return config.shrinkage**0.5 if adapter or name == "router" else 1.0


class StandardWeights(Mapping[str, Any]):
    """Weights of a decoder with muP converted to those of :func:`standard`, each on access.

    Arrays keep their dtype, but for scales of norms that add one: near -1, where a small factor puts them, bfloat16 would round the
    gain by some percent, so these are float32.
    """

    def __init__(self, model: Decoder, weights: Mapping[str, Any]) -> None:
        self._weights, self._changes = weights, _changes(model)
        self._offset = model.norm is NormKind.rms_offset

    def __getitem__(self, path: str) -> Any:
        array = self._weights[path]
        if path not in self._changes:
            return array
        values = np.asarray(array)
        changed = self._changes[path](values.astype(np.float32))
        offset = self._offset and path.endswith("norm/scale")
        return changed if offset else changed.astype(values.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def standard(model: Decoder) -> Decoder:
    """Equivalent decoder in the standard parametrisation, for :class:`StandardWeights`."""
    if not model.mup:
        return model
    scale = model.embedding_factor if model.tie_embeddings else 1.0
    return replace(model, mup=STANDARD, embedding_scale=scale)


def _changes(model: Decoder) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Conversions of weights to the standard parametrisation, by path."""
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {}

    def scaled(path: str, factor: float, offset: float = 0.0) -> None:
        if factor != 1:
            changes[path] = lambda array: (array + offset) * factor - offset

    if not model.tie_embeddings:
        scaled("embedding", model.embedding_factor)
    offset = 1.0 if model.norm is NormKind.rms_offset else 0.0
    scaled("norm/scale", model.output_factor, offset)
    if model.norm.biased:
        scaled("norm/bias", model.output_factor)
    attention = model.softmax_scale / standard(model).softmax_scale
    for blocks in ("blocks", "dense_blocks"):
        if model.qk_norm:
            scaled(f"{blocks}/query_norm/scale", attention, offset)
            if model.norm.biased:
                scaled(f"{blocks}/query_norm/bias", attention)
        else:
            scaled(f"{blocks}/query", attention)
            scaled(f"{blocks}/query_bias", attention)
    return changes
