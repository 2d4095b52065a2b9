"""The error tree. A user's mistake is one line: what was given, the limit, what to do next.

Expected outcomes (a program that does not fit, a candidate that is rejected) are values, not
exceptions. What is raised here reaches the terminal as one line and a non-zero exit code.
"""

import difflib
from collections.abc import Iterable


class SystolicError(Exception):
    """Base of all errors that a user can cause or mend. ``str(error)`` is one line."""

    exit_code = 1
    """2 where the command line is wrong: an option, its value, a path that leads nowhere, to something of another
    kind or to a place that is taken. 1 where the line is right: what files hold is damaged or does not fit
    together, or the machine, the compiler or the training failed."""


class OptionError(SystolicError):
    """A command line option or argument that does not exist, does not parse, or asks for what can't be."""

    exit_code = 2


class NotFoundError(SystolicError):
    """A name, a file or a folder that is not there."""

    exit_code = 2


class DataError(SystolicError):
    """Data that is empty, damaged or of another kind than the recipe reads."""


class LayoutError(SystolicError):
    """A layout that does not divide the model, the batch or the slice."""

    exit_code = 2


class RunError(SystolicError):
    """A run that cannot go on: damaged, diverged, or failed to save."""


class TakenError(RunError):
    """A folder for a new run that holds something already."""

    exit_code = 2


class MissingExtraError(SystolicError):
    """A feature whose optional packages are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs packages that are not installed: pip install 'systolic[{extra}]'"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the closest of ``known``, else ``""``."""
    folded = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]}?" if close else ""
