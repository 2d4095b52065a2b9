"""Optuna and SQLAlchemy, imported when a study is opened."""

import contextlib
import warnings
from collections.abc import Generator
from functools import cache
from importlib import import_module
from typing import Any

from systolic.core.errors import extra


@cache
def optuna() -> Any:
    """Optuna, with its own logging off.

    Raises:
        MissingExtraError: it is not installed.
    """
    with extra("systolic tune", "tune"):
        module = import_module("optuna")
    module.logging.set_verbosity(module.logging.ERROR)
    return module


@contextlib.contextmanager
def settled() -> Generator[None]:
    """Suppresses Optuna's warnings about experimental features; its version is pinned by an upper bound."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        yield


def sqlalchemy() -> Any:
    """SQLAlchemy, which Optuna's storage uses."""
    return import_module("sqlalchemy")
