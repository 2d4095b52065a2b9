"""Cosines between vectors of two models: what a search by embeddings compares, where the largest component says nothing."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    """Of each vector with its counterpart."""

    mean: float
    least: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray) -> "Cosine":
        """Of the vectors along the last dim, arrays [..., n]."""
        one, other = (np.asarray(side, np.float64) for side in (ours, theirs))
        lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
        with np.errstate(invalid="ignore"):
            found = (one * other).sum(-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
        return cls(mean=float(found.mean()), least=float(found.min()))

    def __str__(self) -> str:
        return f"cosine {self.mean:.5f} in the mean, {self.least:.5f} at least"
