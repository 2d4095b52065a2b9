"""The table of memory is that of the arrays on the device, and too little is refused before any is allocated."""

from dataclasses import replace
from threading import Event

import jax
import psutil
import pytest

from systolic.chips import host, slice
from systolic.compiling import PagedProgram
from systolic.core.errors import RunError
from systolic.job import ServedCache
from systolic.job.serving_memory import ServingMemory
from systolic.serving.text import converting
from systolic.serving.text.converting import held_bytes
from systolic.serving.text.opening import engine_of, open_engine, plan_engine
from tests.serving.text.engine import SIZES, shared

KINDS = [(True, False), (False, True), (True, True)]
"""Whether a program generates, and whether it reads prompts."""


class Told:
    """Keeps the table of memory that an engine tells before it starts."""

    memory: ServingMemory
    kernel: str

    def sized(self, buckets, programs, kernel) -> None:
        self.kernel = kernel

    def compiled(self, facts) -> None:
        pass

    def measured(self, memory, context) -> None:
        self.memory = memory

    def placed(self, seconds) -> None:
        pass


@pytest.fixture(scope="module")
def small():
    return shared()


def held(arrays) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@pytest.fixture(scope="module")
def engine(small):
    made = small.engine(programs=(1, 1, 1))
    yield made
    made.stop()


def test_weights_and_pages_are_those_on_the_device(engine):
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


@pytest.mark.parametrize(
    ("cache", "page_bytes"),
    # Keys and values of 2 layers, 1 head of 16 elements, 8 positions, and a scale in float32 of each position.
    [(ServedCache.int8, 2 * 2 * 8 * (16 + 4)), (ServedCache.fp8, 2 * 2 * 8 * 16)],
)
def test_pages_in_8_bits_as_the_table_and_a_forecast_have_them(small, cache, page_bytes):
    plan = plan_engine(small.steps, replace(SIZES, cache=cache))
    empty = plan.paged.empty_pages(3)
    assert held(empty) == 3 * page_bytes == held_bytes(plan.paged.placed_pages(3))
    program = PagedProgram(
        job=small.steps.job, rows=1, pages=1, num_pages=2, page_size=8, cache=cache
    )
    on = slice("cpu")
    assert program.trace(on, jax.devices()[:1]).facts.page_bytes == page_bytes


def test_a_context_beyond_that_of_training_is_warned_of(small):
    trained = small.steps.job.data.context
    sizes = replace(SIZES, context=trained)
    assert plan_engine(small.steps, sizes).beyond is None
    longer = plan_engine(small.steps, replace(sizes, context=trained + 1))
    assert f"context is {trained + 1} and the model was trained on texts of {trained}" in (
        longer.beyond or ""
    )


def test_the_largest_programs_are_those_of_each_kind(small):
    programs = plan_engine(small.steps, replace(SIZES, mixed=True)).programs()
    largest = [one.key for one in programs.largest if one.where is programs.read]
    kinds = [[s for s in programs.shapes if (s.rows > 0, s.chunks > 0) == kind] for kind in KINDS]
    assert sorted(largest) == sorted(
        max(shapes, key=lambda s: (s.tokens * s.pages, s)) for shapes in kinds
    )


def test_what_lies_on_a_device_is_not_there_for_others(monkeypatch):
    class Device:
        def __init__(self, **stats) -> None:
            self.stats = stats

        def memory_stats(self):
            return self.stats or None

    several = [Device(bytes_limit=1000, bytes_in_use=used) for used in (100, 300)]
    assert converting.capacity_bytes(several) == 700
    # A CPU device counts nothing; its container's limit may be less than the machine's memory.
    monkeypatch.setattr(host, "memory_bytes", lambda: psutil.Process().memory_info().rss * 4)
    least = psutil.virtual_memory().total // len(jax.local_devices())
    assert 0 < converting.capacity_bytes([Device()]) < least
    monkeypatch.setattr(host, "memory_bytes", lambda: 0)
    assert converting.capacity_bytes([Device()]) == 0


@pytest.mark.parametrize("room", [30, 12])
def test_pages_are_as_many_as_fit_or_it_is_refused(small, engine, monkeypatch, room):
    found = engine.memory
    much = found.weights_bytes + found.temporary_bytes + room * found.page_bytes + 100
    monkeypatch.setattr(converting, "capacity_bytes", lambda _: much)
    if room < 13:
        with pytest.raises(RunError, match="longest text needs 13 pages"):
            small.engine(programs=(1, 1, 1))
        return
    told = Told()
    sizes = replace(SIZES, programs=(1, 1, 1))
    limited = open_engine(small.steps, small.params, small.rest, sizes, None, told)
    assert limited.memory.pages == told.memory.pages == room
    assert told.memory.weights_bytes == found.weights_bytes
    assert SIZES.pages == 0


def test_weights_are_read_while_programs_are_made_once_the_largest_are(small) -> None:
    plan = plan_engine(small.steps, SIZES)
    first, began, waited = plan.programs().largest, Event(), []

    class Opening(Told):
        def compiled(self, facts) -> None:
            done.append(facts.bucket)
            # The last program waits for the weights, which no program waits for if they come after all.
            if facts.done == facts.programs:
                waited.append(began.wait(60))

        def placed(self, seconds) -> None:
            pass

    done: list[str] = []

    def read() -> dict[str, jax.Array]:
        assert {program.spec.name for program in first} <= {*done}
        began.set()
        return {**small.params, **small.rest}

    engine_of(plan, read, None, Opening())
    assert waited == [True]
