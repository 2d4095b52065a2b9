"""Trains a tokenizer on a corpus: byte-level BPE, by the ``tokenizers`` library."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import DataError, extra
from systolic.data.text.documents import Documents
from systolic.data.text.packed import find_packed, fresh_folder
from systolic.data.text.tokenizer import CONFIG, Tokenizer
from systolic.job import Split

if TYPE_CHECKING:
    from systolic.data.text.corpus import Corpus

START, END = "<|begin_of_text|>", "<|end_of_text|>"
"""Tokens before and after each document."""
READ = 256
"""Documents read at a time."""
MEASURED = 256
"""Most held-out documents to count tokens on."""

Tell = Callable[[int, int], None]


def train(
    data: Documents, to: Path, vocab: int, documents: int = 0, tell: Tell = lambda done, total: None
) -> dict[str, Any]:
    """Learns merges from the training documents and writes ``tokenizer.json`` and its config.

    Every byte is a token, so any text can be written and comes back as it was (Radford et al. 2019).

    Args:
        data: The text.
        to: A new folder to write.
        vocab: Tokens at most, :data:`SMALLEST_VOCAB` or more: the 256 bytes, start and end among them; fewer where the text has no
            more pairs that come twice.
        documents: Number of documents, spread over the text; 0 for all.
        tell: Called with the documents read and their number.

    Returns:
        vocab, documents, bytes (read) and bytes_per_token on held-out documents, which are not
        learned from; null where there is none.

    Raises:
        OptionError: the folder exists.
        DataError: no documents, or they are packed.
        MissingExtraError: ``tokenizers`` is not installed.
    """
    if find_packed(data.path) is not None:
        raise DataError(
            f"{data.path} is packed, so it is tokens already; give the text it was made of"
        )
    corpus, kept = data.documents(Split.train)
    if not len(kept):
        raise DataError(f"{data.path} has no documents; give some text")
    kept = _spread(kept, documents)
    backend, trainer = _untrained(vocab)
    size = 0

    def texts() -> Iterator[list[str]]:
        nonlocal size
        for done, part in _read(corpus, kept):
            size += sum(map(len, part))
            tell(done, len(kept))
            yield [text.decode("utf-8", "replace") for text in part]

    with fresh_folder(to) as scratch:
        backend.train_from_iterator(texts(), trainer)
        backend.save(str(scratch / "tokenizer.json"))
        config = {"bos_token": START, "eos_token": END}
        (scratch / CONFIG).write_text(json.dumps(config, indent=2))
    tokenizer = Tokenizer(path=to)
    return {
        "vocab": tokenizer.vocab_size,
        "documents": len(kept),
        "bytes": size,
        "bytes_per_token": _bytes_per_token(tokenizer, data),
    }


def _untrained(vocab: int) -> tuple[Any, Any]:
    """A byte-level BPE model without merges, and its trainer."""
    with extra("training a tokenizer", "text"):
        import tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[START, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return backend, trainer


def _bytes_per_token(tokenizer: Tokenizer, data: Documents) -> float | None:
    corpus, held_out = data.documents(Split.validation)
    num_bytes = num_tokens = 0
    for _, part in _read(corpus, _spread(held_out, MEASURED)):
        num_bytes += sum(map(len, part))
        num_tokens += sum(map(len, tokenizer.encode_all(part)))
    return num_bytes / num_tokens if num_tokens else None


def _spread(numbers: np.ndarray, count: int) -> np.ndarray:
    """``count`` of some numbers, evenly spread; all if there are no more, or ``count`` is 0."""
    if not count or count >= len(numbers):
        return numbers
    return numbers[np.arange(count) * len(numbers) // count]


def _read(corpus: "Corpus", numbers: np.ndarray) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the number of documents read, and the last of them."""
    for start in range(0, len(numbers), READ):
        part = numbers[start : start + READ]
        yield start + len(part), corpus.read(part)
