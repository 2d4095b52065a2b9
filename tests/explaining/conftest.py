"""Real runs, so their programs are compiled once and quickly."""

from tests.training.conftest import compiled_once

__all__ = ["compiled_once"]
