"""What every contender trains: sizes and optimizer constants, plain Python and NumPy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = 400
"""Batches that are made; a contender never sees the end of them."""

IGNORED = -100
"""The target of a row's last token for PyTorch and Keras; Systolic's is -1."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """A decoder in the shape of GPT-2: LayerNorm, learned positions, GELU, biases, tied embeddings."""

    layers: int = 6
    d_model: int = 320
    heads: int = 5
    vocab: int = 8192
    sequence: int = 256
    batch: int = 8

    @property
    def units_per_step(self) -> int:
        """Tokens."""
        return self.batch * self.sequence


@dataclass(frozen=True, kw_only=True)
class Vision:
    """ResNet-18 with a 3x3 stem of stride 1, as is usual for images of 32 pixels."""

    width: int = 64
    size: int = 32
    classes: int = 10
    batch: int = 64

    @property
    def units_per_step(self) -> int:
        """Images."""
        return self.batch


KINDS = {"language": Language, "vision": Vision}

TINY = {
    "language": Language(layers=2, d_model=64, heads=2, vocab=256, sequence=32, batch=4),
    "vision": Vision(width=8, size=16, batch=8),
}
"""To try the harness."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The update rule of every contender, at a constant rate; the decay spares vectors."""

    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


ADAMW = AdamW()


def to_json(kind: str, sizes: Any) -> dict[str, Any]:
    """Sizes as plain values."""
    return {"kind": kind, **asdict(sizes)}


def from_json(plain: Mapping[str, Any]) -> Any:
    """Inverse of :func:`to_json`."""
    values = dict(plain)
    return KINDS[values.pop("kind")](**values)


def tokens(sizes: Language) -> np.ndarray:
    """int32[examples, sequence] of a Markov chain with Zipf's frequencies, so that there is something to learn."""
    random = np.random.default_rng(0)
    shape = (BATCHES * sizes.batch, sizes.sequence)
    fresh = np.minimum(random.zipf(1.3, shape) - 1, sizes.vocab - 1).astype(np.int32)
    follow = random.permutation(sizes.vocab).astype(np.int32)
    repeats = random.random(shape) < 0.5
    made = fresh.copy()
    for column in range(1, sizes.sequence):
        made[:, column] = np.where(
            repeats[:, column], follow[made[:, column - 1]], fresh[:, column]
        )
    return made


def targets(rows: np.ndarray, ignored: int) -> np.ndarray:
    """The next token of each token of int32[examples, sequence]; ``ignored`` at the end of a row."""
    last = np.full((len(rows), 1), ignored, np.int32)
    return np.concatenate([rows[:, 1:], last], axis=1)


def images(sizes: Vision) -> tuple[np.ndarray, np.ndarray]:
    """uint8[examples, size, size, 3], noise over a pattern of the class, and int32[examples]."""
    random = np.random.default_rng(0)
    count = BATCHES * sizes.batch
    label = random.integers(0, sizes.classes, count).astype(np.int32)
    shape = (sizes.size, sizes.size, 3)
    pattern = random.integers(0, 128, (sizes.classes, *shape), dtype=np.uint8)
    image = random.integers(0, 128, (count, *shape), dtype=np.uint8)
    for index in range(sizes.classes):
        image[label == index] += pattern[index]
    return image, label


class Work:
    """A folder with what the contenders share: sizes, batches in order, first weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batches(self) -> dict[str, np.ndarray]:
        """Name to array [batches, batch, ...]."""
        return dict(np.load(self.folder / "batches.npz"))

    def weights(self) -> dict[str, np.ndarray]:
        """Systolic's name of each parameter to its first value."""
        return dict(np.load(self.folder / "weights.npz"))
