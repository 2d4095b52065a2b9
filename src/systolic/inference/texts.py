"""Vectors of texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.data.text.sentences import Sentences, read_text
from systolic.inference.predictor import Predictor
from systolic.inference.readers import TextReader
from systolic.inference.rows import Bucket, enough
from systolic.runs.weights import Weights
from systolic.steps.steps import StepFunctions

SHORTEST = 8
"""Fewest tokens of a row."""


def embeddings(
    steps: StepFunctions, weights: Weights, texts: Sequence[str | Path]
) -> Iterator[tuple[str | Path, dict[str, Any]]]:
    """``embedding``, a list of numbers, of each text, in their order.

    A text that is the path of a file stands for its content; for one that can't be read ``error`` has the reason.
    """
    data = steps.job.data
    assert isinstance(data, Sentences)
    reader = TextReader(steps, data)
    run = Predictor(reader.form, weights.params, weights.model_state)
    for start in range(0, len(texts), enough(len(texts))):
        group = texts[start : start + enough(len(texts))]
        contents = [_content(text) for text in group]
        rows = [
            example.rows[0]
            for example in reader.read([text for text, error in contents if error is None])
        ]
        made = iter(())
        if rows:
            # Few lengths mean few programs to compile, and a short text takes a short time.
            longest = max(row.length for row in rows)
            width = min(max(SHORTEST, 1 << (longest - 1).bit_length()), data.sequence)
            made = iter(run(rows, Bucket(rows=run.up(enough(len(rows))), length=width)))
        for text, (_, error) in zip(group, contents, strict=True):
            if error is None:
                yield text, {"embedding": next(made)["embedding"].astype(np.float32).tolist()}
            else:
                yield text, {"error": error}


def _content(text: str | Path) -> tuple[str, str | None]:
    """A text, or "" and the reason that there is none."""
    try:
        if isinstance(text, Path) or is_file(text):
            name, content = str(text), read_text(Path(text))
        else:
            name, content = "a text", text
    except (DataError, NotFoundError) as error:
        return "", str(error)
    return content, None if content else f"{name} is empty; give a text"


def is_file(text: str) -> bool:
    """Whether a text is the path of a file; a text may be longer than any path."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False
