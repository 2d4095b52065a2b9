"""Under load every request ends once with the tokens that it would have alone, and nothing of it stays."""

import time
import tracemalloc
from dataclasses import replace

import pytest

from systolic.serving.registry import ServedText
from tests.serving.http.running import running
from tests.serving.text.engine import SIZES, shared
from tests.serving.text.storm import Storm, Watched

ROWS, PAGES = 8, 33
"""Pages for three texts at their longest, so that others lose theirs."""


def storm(requests: int, threads: int) -> None:
    begin = time.perf_counter()
    small, watched = shared(), Watched()
    sizes = replace(SIZES, rows=ROWS, pages=PAGES, queued=24, programs=(1, 1, 1))
    engine = small.opened(sizes, watched)
    served = ServedText(name="small", engine=engine, tokenizer=engine.tokenizer)
    with running([served]) as server:
        print(f"opened in {time.perf_counter() - begin:.1f} s")
        made = Storm(engine, server, watched, 256)
        third, held = requests // 3, []
        begin = time.perf_counter()
        tracemalloc.start()
        try:
            for number in range(3):
                made.run(third, threads, number * third)
                made.check()
                held.append(made.held())
        finally:
            tracemalloc.stop()
        seconds = time.perf_counter() - begin
        counts = watched.counts
        print(f"{requests} requests by {threads} threads in {seconds:.1f} s:", dict(made.did))
        print(f"{dict(counts.ended)}, {counts.preempted} preempted, {counts.steps} steps")
        print([(one.traced_bytes >> 10, one.resident_bytes >> 20) for one in held])
    assert counts.preempted > requests / 100
    assert counts.most_running == ROWS
    assert counts.fullest == 1.0
    assert min(counts.ended.values()) > 0
    # An object that each request leaves would be 50 bytes and more.
    assert held[2].traced_bytes - held[0].traced_bytes < 2 * third * 40 + 50_000
    assert held[2].resident_bytes - held[1].resident_bytes < 30 << 20


@pytest.mark.slow
def test_a_storm_leaves_nothing() -> None:
    storm(180, 8)


@pytest.mark.long
def test_a_storm_of_ten_thousand_leaves_nothing() -> None:
    storm(10_000, 12)
