"""Progress and warnings of long work: one object, which says nothing unless a caller puts another in its place.

``with reporting(Mine()): systolic.plan("lm", on="v5e-16")`` hands stages and warnings to ``Mine``, a
:class:`Reporter`; the command line puts one there that draws on stderr. Work reports to :func:`reporter`.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class Reporter:
    """Silent; subclasses show what they are given."""

    shows_events = False
    """Whether :meth:`update` shows the events of a training, so that those that are warnings need no line of their own."""

    def begin(self, title: str) -> None:
        """A piece of work begins: ``lm for v5e-16``. Its stages follow, until :meth:`end`."""

    def end(self) -> None:
        """The piece of work that began last is over, or failed."""

    def stage(self, text: str) -> None:
        """Shows what the work does now, in a few words: ``compiling``."""

    def update(self, state: Any) -> None:
        """Shows how far a search, a study or a training is: a record of its own package."""

    def warn(self, text: str) -> None:
        """One line that a user should read, now; results that have ``warnings`` hold it too."""


_current = Reporter()


def reporter() -> Reporter:
    """The reporter in place."""
    return _current


@contextmanager
def reporting(to: Reporter) -> Generator[Reporter]:
    """Puts a reporter in place for all threads of this process, and the one before back at the end."""
    global _current
    before, _current = _current, to
    try:
        yield to
    finally:
        _current = before


@contextmanager
def working(title: str) -> Generator[Reporter]:
    """A piece of work with a title; what is reported within belongs to it."""
    to = reporter()
    to.begin(title)
    try:
        yield to
    finally:
        to.end()
