"""The table of memory is that of the arrays on the device, and too little is refused before any is allocated."""

import jax
import pytest

from systolic.core.errors import RunError
from systolic.serving.text import memory
from tests.serving.text.engine import SIZES, Small


@pytest.fixture(scope="module")
def small():
    return Small()


def held(arrays) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


def test_weights_and_pages_are_those_on_the_device(small):
    engine = small.engine(programs=(1, 1, 1))
    try:
        found = engine.memory
        assert found.weights_bytes == held(engine.runner._weights)
        assert found.pages_bytes == held(engine.runner._pages)
        # Keys and values of 2 layers, 1 head of 16 elements, 8 positions, float32.
        assert found.page_bytes == 2 * 2 * 1 * 16 * 8 * 4
        # Four texts of 96 positions in pages of 8, and one page for padding.
        assert found.pages == 4 * 12 + 1
        assert sum(row.bytes for row in found.rows()) == found.capacity_bytes
        # At least the logits of four texts, float32.
        assert found.temporary_bytes > 4 * 264 * 4
        text = "\n".join(engine.runner.buckets.lines())
        assert "assumed: no traffic was given" in text
        assert f"{len(engine.runner.programs.read)} programs of steps" in text
    finally:
        engine.stop()


@pytest.mark.parametrize("room", [30, 12])
def test_pages_are_as_many_as_fit_or_it_is_refused(small, monkeypatch, room):
    engine = small.engine(programs=(1, 1, 1))
    engine.stop()
    found = engine.memory
    much = found.weights_bytes + found.temporary_bytes + room * found.page_bytes + 100
    monkeypatch.setattr(memory, "capacity_bytes", lambda: much)
    if room < 13:
        with pytest.raises(RunError, match="longest text needs 13 pages"):
            small.engine(programs=(1, 1, 1))
        return
    engine = small.engine(programs=(1, 1, 1))
    engine.stop()
    assert engine.memory.pages == room
    assert SIZES.pages == 0
