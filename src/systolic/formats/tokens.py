"""The tokenizer of an imported model, checked against the model's vocabulary."""

import json
from pathlib import Path

from systolic.core.errors import DataError, OptionError
from systolic.formats.source import Source

OLDER = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
"""Files of tokenizers of other forms, which transformers makes a tokenizer.json of."""


def tokenizer_of(source: Source, vocab: int, *, texts: bool) -> Path | None:
    """The tokenizer.json of a source.

    Args:
        source: The model in files.
        vocab: Tokens of the model.
        texts: Whether one is needed; without, ``None`` stands for a source that has none.

    Raises:
        OptionError: there is none, or it is of a model with more tokens.
        DataError: it has no tokens.
    """
    file = source.tokenizer
    if file is None:
        if texts:
            raise OptionError(_lacking(source.path))
        return None
    number = _own_tokens(file)
    if number == 0:
        raise DataError(f"{file} has no tokens; copy it again from where the model came from")
    if number is not None and number > vocab:
        raise OptionError(
            f"{file} has {number} tokens and the model {vocab}; copy the tokenizer that belongs to the model"
        )
    return file


def _lacking(path: Path) -> str:
    older = next((name for name in OLDER if (path / name).is_file()), None)
    if older is not None:
        return f"{path} has no tokenizer.json and its tokenizer in {older}; write it with transformers: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    return (
        f"{path} has no tokenizer.json; copy it from where the model came from, beside config.json"
    )


def _own_tokens(file: Path) -> int | None:
    """One more than the largest id of a vocabulary, tokens added to it left out; ``None`` where the file is no tokenizer, which its reader reports.

    Added tokens may lie beyond a model's: Gemma 3's text models have one for images.
    """
    try:
        described = json.loads(file.read_bytes())
        added = {token["content"] for token in described.get("added_tokens", ())}
        vocab = described["model"]["vocab"]
        if isinstance(vocab, list):
            return len(vocab)
        ids = [int(number) for token, number in vocab.items() if token not in added]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return max(ids, default=-1) + 1
