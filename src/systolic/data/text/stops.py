"""End of a generated text, and its reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from systolic.core.errors import OptionError


class Finish(StrEnum):
    """Why a text ended."""

    stop = "stop"
    """An end token or a stop string."""
    length = "length"
    """Its number of tokens, or the model's context."""
    cancelled = "cancelled"
    deadline = "deadline"
    error = "error"


@dataclass(kw_only=True, eq=False)
class Continuation(Iterator[str]):
    """Text after a prompt: an iterator of its pieces, and then how it ended."""

    finish: Finish | None = None
    """``stop`` or ``length``; None while there are more pieces."""
    pieces: Iterator[str] = field(default_factory=lambda: iter(()), repr=False)
    at_length: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called where it ended by its length."""

    def __next__(self) -> str:
        return next(self.pieces)


class Stops:
    """Ends a text before the first complete stop string, for any division into pieces.

    Args:
        strings: One or more; a str is one.

    Raises:
        OptionError: a string is empty.
    """

    def __init__(self, strings: str | Sequence[str]) -> None:
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in strings:
            raise OptionError("a stop string is empty; give one with a character or leave it out")
        self.strings = strings
        self.met = False
        """Whether a stop string was found."""
        self._held = ""

    def push(self, piece: str) -> str:
        """Text without a stop string so far; a possible start of one is held back."""
        text = self._held + piece
        matches = [(text.find(stop) + len(stop), stop) for stop in self.strings if stop in text]
        if matches:
            self.met, self._held = True, ""
            # Prefers the longer of two that end at the same place.
            end = min(end for end, _ in matches)
            return text[: end - max(len(stop) for at, stop in matches if at == end)]
        longest = max((_overlap(text, stop) for stop in self.strings), default=0)
        certain = len(text) - longest
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Text held back at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that are the start of ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
