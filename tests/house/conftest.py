"""Syntax trees of all files are a million objects without a cycle among them: nothing is collected while they are made."""

import gc
from collections.abc import Iterator

import pytest

from tests.house import trees


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    trees.nodes.cache_clear()
    trees.tree.cache_clear()
    gc.enable()
