"""Vectors of texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.artifact.weights import Weights
from systolic.core.errors import DataError, NotFoundError
from systolic.data.text.sentences import Sentences, read_text
from systolic.job.data import MASK
from systolic.training.predict import enough
from systolic.training.setup import Setup


def embeddings(
    setup: Setup, weights: Weights, texts: Sequence[str | Path]
) -> Iterator[tuple[str | Path, dict[str, Any]]]:
    """``embedding``, a list of numbers, of each text, in their order.

    A text that is the path of a file stands for its content; for one that can't be read ``error`` has the reason.
    """
    data, steps = setup.job.data, setup.steps
    assert isinstance(data, Sentences)
    program = jax.jit(steps.predict, compiler_options=steps.target.compiler_options)
    ways = setup.job.layout.batch_ways
    for start in range(0, len(texts), enough(len(texts))):
        group = texts[start : start + enough(len(texts))]
        contents = [_content(text) for text in group]
        known = [text for text, error in contents if error is None]
        rows = -(-enough(len(known)) // ways) * ways
        # Texts without letters fill the batch; their vectors are left out.
        batch = data.rows(data.encode([*known, *[""] * (rows - len(known))]))
        batch[MASK] = (np.arange(rows) < len(known)).astype(np.float32)
        placed = {
            name: jax.device_put(array, steps.batch_shardings[name])
            for name, array in batch.items()
        }
        made = program(weights.params, weights.model_state, placed)["embedding"]
        vectors = iter(np.asarray(made, np.float32).tolist())
        for text, (_, error) in zip(group, contents, strict=True):
            yield text, {"embedding": next(vectors)} if error is None else {"error": error}


def _content(text: str | Path) -> tuple[str, str | None]:
    """A text, or "" and the reason that there is none."""
    try:
        if isinstance(text, Path) or is_file(text):
            return read_text(Path(text)), None
    except (DataError, NotFoundError) as error:
        return "", str(error)
    return text, None


def is_file(text: str) -> bool:
    """Whether a text is the path of a file; a text may be longer than any path."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False
