"""How a decoder's parameters move when its width is not the one that learning rates were chosen for (muP).

Tensor Programs V (Yang et al. 2022), Table 8, for rules like Adam's, whose updates don't depend on the size of gradients:

- Matrices whose inputs grow with the width sum as many more terms, so that their updates shrink by as much.
- Embeddings, norms and biases keep theirs: what they read does not grow.
- What reads the stream for a fixed number of outputs (the output matrix, a router) begins smaller besides: its first
  values must not outweigh what it learns.
- Products of queries and keys are divided by the width of a head, not by its root, where heads are what grows.

All widths (d-ff, heads or head-dim) are taken to grow by the factor of d-model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from systolic.job import OptimizerKind
from systolic.models.decoder.config import STANDARD, Decoder, NormKind

GROWING = ("query", "key", "value", "out", "gate", "up", "down", "router", "unembedding")
"""Last names of the matrices whose inputs grow with the width."""
NGRAMS = "ngrams"
"""Whose output matrix reads the rows of its tables, which don't grow."""


def update_factor(config: Decoder, path: str, kind: OptimizerKind) -> float:
    """Factor of a rule's updates of the parameter at a path."""
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
    # An orthogonal update grows what it reads by the root of the width, and what it makes as well where that grows.
    return config.shrinkage**0.5 if adapter or name == "router" else 1.0


class StandardWeights(Mapping[str, Any]):
    """Weights of a decoder with a base width as those of :func:`standard`, each made when it is asked for."""

    def __init__(self, model: Decoder, weights: Mapping[str, Any]) -> None:
        self._weights, self._changes = weights, _changes(model)

    def __getitem__(self, path: str) -> Any:
        array = self._weights[path]
        if path not in self._changes:
            return array
        given = np.asarray(array)
        return self._changes[path](given.astype(np.float32)).astype(given.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def standard(model: Decoder) -> Decoder:
    """The decoder in the standard parametrisation that computes the same with :class:`StandardWeights`."""
    if not model.mup:
        return model
    scale = model.embedding_factor if model.tie_embeddings else 1.0
    return replace(model, mup=STANDARD, embedding_scale=scale)


def _changes(model: Decoder) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """What takes a weight to its standard form, by path."""
    found: dict[str, Callable[[np.ndarray], np.ndarray]] = {}

    def scaled(path: str, factor: float, offset: float = 0.0) -> None:
        if factor != 1:
            found[path] = lambda array: (array + offset) * factor - offset

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
    return found
