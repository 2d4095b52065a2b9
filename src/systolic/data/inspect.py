"""Inspects data: what a model will see, as one plain record."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from systolic.core.errors import DataError
from systolic.data.text.documents import Documents
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import TextData
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import MASK, Data, Read, Split

_BATCH = 16
_COMMON = 10
"""Number of most common tokens to report."""


def inspect(data: Data, split: Split, examples: int, seed: int = 0) -> dict[str, Any]:
    """Inspects the fields, the counts, and the first examples in training order.

    Args:
        data: any data.
        split: split to inspect.
        examples: most examples to inspect.
        seed: of the shuffle.

    Returns:
        JSON values: data, fields, splits, split, examples, labels, notes (such as what was left out), values
        (each field's range), and for text ``text``, for labelled data ``label_counts``.

    Raises:
        DataError: no examples in the split, or damaged data.
    """
    fields = data.fields()
    sample = _sample(data, split, examples, seed)
    record: dict[str, Any] = {
        "data": type(data).__name__,
        "fields": {
            name: {"shape": list(field.shape), "dtype": field.dtype}
            for name, field in fields.items()
        },
        "splits": {part.value: _counts(data, part) for part in Split},
        "split": split.value,
        "examples": len(next(iter(sample.values()))),
        "labels": list(data.labels()),
        "notes": list(_notes(data, split)),
        "values": {
            name: {
                "min": array.min().item(),
                "max": array.max().item(),
                "mean": float(array.mean()),
            }
            for name, array in sample.items()
            if array.size
        },
    }
    if isinstance(data, TextData) and "targets" in fields:
        record["text"] = _text(sample, data.get_tokenizer(), turns=isinstance(data, Instructions))
    elif "label" in sample and sample["label"].ndim == 1:
        record["label_counts"] = _labels(sample["label"], data.labels())
    return record


def _notes(data: Data, split: Split) -> tuple[str, ...]:
    """Warnings as those of a training, such as how many conversations were left out of a split."""
    return data.split_notes(split) if isinstance(data, Instructions) else data.notes()


def pictures(data: Data, split: Split, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The first examples of a split, for a contact sheet; empty for data without images."""
    image = data.fields().get("image")
    return {} if image is None or len(image.shape) != 3 else _sample(data, split, count, seed)


def _sample(data: Data, split: Split, examples: int, seed: int) -> dict[str, np.ndarray]:
    if examples < 1:
        raise DataError(f"examples is {examples}; give 1 or more")
    batches = data.open(Read(split=split, batch=min(_BATCH, examples), seed=seed, epochs=1))
    parts, have = [], 0
    try:
        for batch in batches:
            kept = batch[MASK] > 0
            parts.append({name: array[kept] for name, array in batch.items() if name != MASK})
            have += int(kept.sum())
            if have >= examples:
                break
    finally:
        batches.close()
    return {
        name: np.concatenate([part[name] for part in parts])[:examples] for name in data.fields()
    }


def _counts(data: Data, split: Split) -> dict[str, Any]:
    """Number of examples; of documents if rows are not known before packing."""
    size = data.size(split)
    counts: dict[str, Any] = {"examples": size}
    if isinstance(data, Documents) and size is None:
        counts["documents"] = len(data.documents(split)[1])
    return counts


def _labels(labels: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    tally = Counter(labels.tolist())
    counts = {name: tally.pop(number, 0) for number, name in enumerate(names)}
    return counts | {str(number): count for number, count in sorted(tally.items())}


def _text(sample: Mapping[str, np.ndarray], tokenizer: Tokenizer, *, turns: bool) -> dict[str, Any]:
    inside = sample["segments"] > 0
    targets = sample["targets"][sample["targets"] >= 0]
    ids, counts = np.unique(targets, return_counts=True)
    shares = counts / max(counts.sum(), 1)
    first = sample["positions"][inside] == 0
    text = tokenizer.decode(targets.tolist())
    common = np.argsort(-counts, kind="stable")[:_COMMON]
    return {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest(),
        "padding_share": float(1 - inside.mean()),
        "documents_per_row": float(first.sum() / len(inside)),
        "distinct_tokens": len(ids),
        "bytes_per_token": len(text.encode()) / max(len(targets), 1),
        "entropy_bits_per_token": float(-(shares * np.log2(shares)).sum()),
        "most_common": [
            {"token": tokenizer.token(int(ids[n])), "id": int(ids[n]), "share": float(shares[n])}
            for n in common
        ],
        "row": _row({name: array[0] for name, array in sample.items()}, tokenizer, turns=turns),
    }


def _row(
    row: Mapping[str, np.ndarray], tokenizer: Tokenizer, *, turns: bool
) -> list[dict[str, Any]]:
    """Documents of one row: their places, their text with the last target, and what of it is trained on where that is a part; of conversations with special tokens, which are the ends of their turns."""
    decode = tokenizer.shown if turns else tokenizer.decode
    parts = []
    for segment in range(1, int(row["segments"].max()) + 1):
        at = np.flatnonzero(row["segments"] == segment)
        targets = row["targets"][at]
        ids = [
            *row["tokens"][at].tolist(),
            *(number for number in targets[-1:].tolist() if number >= 0),
        ]
        part = {
            "from": int(at[0]),
            "places": len(at),
            "starts": ids[0] == tokenizer.start,
            "text": decode(ids),
        }
        if (targets < 0).any():
            part["trained"] = decode(targets[targets >= 0].tolist())
            part["starts"] = True  # a conversation is only cut at its end
        parts.append(part)
    return parts
