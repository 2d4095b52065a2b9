"""The error tree. A user's mistake is one line: what was given, the limit, the next step.

Expected outcomes (a program that does not fit, a candidate that is rejected) are values, not
exceptions. What is raised here reaches the terminal as one line and a non-zero exit code.
"""

import difflib
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager


class SystolicError(Exception):
    """Base of all errors that a user can cause or fix. ``str(error)`` is one line."""

    exit_code = 1
    """2 for a wrong command line: an option, its value, or a path that is missing, taken or of a kind that the verb does not take,
    such as a model of an unknown family. 1 for a right one: files are damaged, have other contents or do not match, or the machine,
    the compiler or the training failed; a verb returns 1 itself where its answer is no (does not fit, differs, lines that failed)."""
    short_name = ""
    """Name of its kind in docs/errors.md; empty where that has none."""

    @property
    def line(self) -> str:
        """The line that a verb prints: the message, then the short name in brackets."""
        return f"{self} [{self.short_name}]" if self.short_name else str(self)


class OptionError(SystolicError):
    """A command line option or argument that does not exist, does not parse, or asks for the impossible."""

    short_name = "option"
    exit_code = 2


class NotFoundError(SystolicError):
    """A name, a file or a folder that does not exist."""

    short_name = "not-found"
    exit_code = 2


class DataError(SystolicError):
    """Data that is empty, damaged or of another kind than the recipe reads."""

    short_name = "data"


class LayoutError(SystolicError):
    """A layout that does not divide the model, the batch or the slice."""

    short_name = "layout"
    exit_code = 2


class RunError(SystolicError):
    """A run that cannot continue: damaged, diverged, or failed to save."""

    short_name = "run"


class LostError(RunError):
    """Another process of the job died or is out of reach; this one can go on when all are started again."""

    short_name = "lost"
    exit_code = 75
    """EX_TEMPFAIL of sysexits.h, so that a cluster can tell the survivors of a lost host from a training that failed."""


class TakenError(RunError):
    """A folder for a new run that is not empty."""

    short_name = "taken"
    exit_code = 2


class OutOfRangeError(OptionError):
    """A number that is outside of its option's range, whatever the other options are."""

    short_name = "range"


class MissingExtraError(SystolicError):
    """A feature whose packages are not installed. The command line is right, and the machine lacks something: exit code 1."""

    short_name = "missing-extra"

    def __init__(self, feature: str, extra: str = "", *, package: str = "") -> None:
        what = package or f"'systolic[{extra}]'"
        super().__init__(f"{feature} needs packages that are not installed: pip install {what}")


@contextmanager
def extra(feature: str, name: str) -> Generator[None, None, None]:
    """Turns an import that fails within it into a MissingExtraError: the feature needs the extra of this name."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(feature, name) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the closest of ``known``, else ``""``."""
    folded = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]}?" if close else ""


def misspelt(name: str, known: Iterable[str]) -> str:
    """Hint as of :func:`nearest` for a name from a file, given only for slips of the keyboard.

    ``gemma`` is no misspelt ``gemma3``, nor ``gpt_neox`` ``gpt_oss``: they are other things.
    """
    folded = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.85)
    if not close or close[0] in name.lower() or _letters(close[0]) == _letters(name):
        return ""
    return f"; did you mean {folded[close[0]]}?"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


@contextmanager
def called(option: str) -> Generator[None]:
    """Errors of the block, or of a function, name an option in the place of ``--path``, as which other verbs take the same data."""
    try:
        yield
    except SystolicError as error:
        error.args = (str(error).replace("--path", option),)
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX says that a device had too little memory."""
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))
