"""Text and bytes of single tokens, for log-probabilities."""

from functools import lru_cache

from systolic.data.text.tokenizer import Tokenizer

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Sign to byte of byte-level vocabularies (openai/gpt-2, encoder.py: bytes_to_unicode)."""
    visible = {chr(byte): byte for byte in _VISIBLE}
    others = [byte for byte in range(256) if byte not in visible.values()]
    return visible | {chr(256 + number): byte for number, byte in enumerate(others)}


class Vocabulary:
    """Text and bytes of single tokens.

    Args:
        tokenizer: Of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        mark = tokenizer.encode("a")
        self._mark = mark[-1:]
        self._before = tokenizer.decode(self._mark)
        # A space that is written as this sign tells byte-level vocabularies from all others.
        probe = tokenizer.encode(" a")
        self._byte_level = bool(probe) and tokenizer.token(probe[0]).startswith("\u0120")

    def text(self, index: int) -> str:
        """The text of a token; of one that is no whole character ``bytes:\\xe2\\x80``, as OpenAI writes it."""
        return self._both(index)[0]

    def raw(self, index: int) -> list[int]:
        """The bytes of a token."""
        return self._both(index)[1]

    def _both(self, index: int) -> tuple[str, list[int]]:
        text_and_bytes = self._known.get(index)
        if text_and_bytes is None:
            text_and_bytes = self._known[index] = self._read(index)
        return text_and_bytes

    def _read(self, index: int) -> tuple[str, list[int]]:
        if self._tokenizer.path is None:
            raw = bytes([index]) if index < 256 else b""
            return _shown(raw) if raw else self._tokenizer.token(index), list(raw)
        # After another token, since some tokenizers drop the space before a text.
        text = self._tokenizer.decode([*self._mark, index])[len(self._before) :]
        if "\ufffd" not in text:
            text = text or self._tokenizer.token(index)
            return text, list(text.encode())
        piece = self._tokenizer.token(index)
        if len(piece) == 6 and piece.startswith("<0x"):
            raw = bytes([int(piece[3:5], 16)])
        elif self._byte_level:
            raw = bytes(_byte_of()[sign] for sign in piece if sign in _byte_of())
        else:
            raw = text.encode()
        return _shown(raw), list(raw)


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, kept."""
    return Vocabulary(tokenizer)
