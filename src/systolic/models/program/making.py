"""Calls of users' functions that make models."""

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from systolic.core.errors import MissingExtraError, OptionError, SystolicError

SEED = 0
"""Seed of a framework's random numbers before a user's function is called, so that every process makes the same model."""


def made_by(function: Callable[[], Any], framework: str, source: str) -> Any:
    """Result of a user's function, called with the framework's random numbers seeded.

    Args:
        function: The user's.
        framework: ``torch`` or ``keras``.
        source: Its name, for messages.

    Raises:
        MissingExtraError: the framework is not installed.
        OptionError: the function fails, or Keras computes with another backend than JAX.
    """
    seed(framework)
    try:
        return function()
    except SystolicError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"{source} failed: {type(error).__name__}: {reason}; call it alone to see where"
        ) from error


def seed(framework: str) -> None:
    """Seeds a framework's random numbers; raises as :func:`made_by`."""
    if framework == "torch":
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("a PyTorch module", "torch")
        import torch

        torch.manual_seed(SEED)
    else:
        load_keras().utils.set_random_seed(SEED)


def load_keras() -> Any:
    """Keras on its JAX backend.

    Raises:
        MissingExtraError: Keras is not installed.
        OptionError: it was loaded with another backend, or its environment asks for one.
    """
    if "keras" not in sys.modules:
        if importlib.util.find_spec("keras") is None:
            raise MissingExtraError("a Keras model", "keras")
        chosen = os.environ.setdefault("KERAS_BACKEND", "jax")
        if chosen != "jax":
            raise OptionError(
                f"KERAS_BACKEND is {chosen}, and models run here on jax; set KERAS_BACKEND=jax"
            )
    import keras

    backend = keras.backend.backend()
    if backend != "jax":
        raise OptionError(
            f"Keras is loaded with the backend {backend}, and models run here on jax; set KERAS_BACKEND=jax before keras is imported"
        )
    return keras
