"""Optuna and SQLAlchemy, imported where a study is opened."""

import contextlib
import warnings
from collections.abc import Generator
from functools import cache
from importlib import import_module
from typing import Any

from systolic.core.errors import MissingExtraError


@cache
def optuna() -> Any:
    """The package, whose own messages are off.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        found = import_module("optuna")
    except ModuleNotFoundError as error:
        raise MissingExtraError("systolic tune", "tune") from error
    found.logging.set_verbosity(found.logging.ERROR)
    return found


@contextlib.contextmanager
def settled() -> Generator[None]:
    """Without Optuna's warnings that parts which are used here may change in a later version; the version is bounded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        yield


def sqlalchemy() -> Any:
    """The package beneath Optuna's storage."""
    return import_module("sqlalchemy")
