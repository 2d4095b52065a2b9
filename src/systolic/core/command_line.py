"""The command line that a verb's function is called from, for files that name the command that made them."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

_words: tuple[str, ...] = ()


def command_line() -> tuple[str, ...]:
    """Words as they were typed, from ``systolic`` on; empty in Python."""
    return _words


@contextmanager
def typed(words: Sequence[str]) -> Generator[None]:
    """Sets the command line within."""
    global _words
    before, _words = _words, tuple(words)
    try:
        yield
    finally:
        _words = before
