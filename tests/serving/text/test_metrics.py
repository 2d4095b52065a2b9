"""Metrics of a real engine against counts by hand; the documented ones are those that there are."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from systolic.serving.facts import CompileFacts
from systolic.serving.http.keys import HttpLimits
from systolic.serving.http.metrics import (
    PREFIX,
    BatchMetrics,
    Metrics,
    TextLoadMetrics,
    TextMetrics,
)
from systolic.serving.http.state import ServerState
from systolic.serving.registry import ModelRegistry, ServedText
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from tests.serving.http.running import wait
from tests.serving.text.engine import SIZES, Small, shared

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"


class Silent:
    def write(self, event: str, **fields) -> None:
        pass


def opened(small: Small, metrics: Metrics, **changed) -> Engine:
    meter = TextMetrics(metrics).of("m")
    sizes = replace(SIZES, programs=(1, 1, 1), **changed)
    opening = TextLoadMetrics("m", meter, Silent())
    return open_engine(small.steps, small.params, small.rest, sizes, meter, opening)


def request(first: int, size: int, answer: int) -> TextRequest:
    """A prompt that shares no page with those of other first tokens."""
    return TextRequest(
        tokens=[first, *range(1, size)],
        max_tokens=answer,
        sampling=SamplingParams(temperature=0.0),
        ignore_ends=True,
    )


@pytest.fixture(scope="module")
def small() -> Small:
    return shared()


def test_requests_steps_and_padding(small: Small) -> None:
    metrics = Metrics()
    engine = opened(small, metrics)

    def value(name: str, **labels: str) -> float:
        at = {"model_name": "m", "version": "1", "engine": "0", **labels}
        found = metrics.registry.get_sample_value(f"systolic:{name}", at)
        assert found is not None, name
        return found

    # A decode, a prefill, choices of 1 and 4 in two kinds, and the program that scores.
    programs = [*engine.runner.programs.read, "choices"]
    assert len(programs) == 3
    names = ["prefill 1 x 24, 12 pages", "decode 4, 12 pages", "score prefill 1 x 24, 12 pages"]
    names += [f"choice of {n}{all_}" for n in (1, 4) for all_ in ("", " by all settings")]
    assert all(value("compile_total", bucket=name, cause="start") == 1 for name in names)
    total = value("compile_cache_hits_total") + value("compile_cache_misses_total")
    assert total == len(names) == engine.runner.programs.count
    assert value("compile_seconds_total") > 0
    kinds = ("weights", "pages", "temporaries", "free")
    assert sum(value("hbm_bytes", kind=kind) for kind in kinds) == value("hbm_limit_bytes")
    assert value("hbm_bytes", kind="pages") == engine.memory.pages_bytes

    engine.start()
    try:
        list(engine.submit(request(100, 30, 5)))
        # The prompt's 30 tokens in chunks of 24 and 6; the first new token is of the second chunk.
        assert value("bucket_selected_total", bucket="prefill 1 x 24, 12 pages") == 2
        assert value("bucket_selected_total", bucket="decode 4, 12 pages") == 4
        assert value("useful_tokens_total") == 30 + 4
        assert value("padding_tokens_total") == (48 - 30) + 4 * 3
        assert value("iteration_tokens_total_count") == 6
        # Its three full pages are found again; the fourth is not full.
        list(engine.submit(request(100, 30, 1)))
        assert value("prefix_cache_queries_total") == 60
        assert value("prefix_cache_hits_total") == 24
        assert value("prompt_tokens_total") == 60
        assert value("generation_tokens_total") == 6
        assert value("request_success_total", finished_reason="length") == 2
        assert value("time_to_first_token_seconds_count") == 2
        # The second one has no token after the first.
        assert value("time_per_output_token_seconds_count") == 1
        assert value("kv_cache_pages") == 4 * 12
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_pages_in_use"):
            assert value(name) == 0
        assert value("recompile_after_ready_total") == value("num_preemptions_total") == 0
    finally:
        engine.stop()


def test_a_text_that_loses_its_pages(small: Small) -> None:
    metrics = Metrics()
    engine = opened(small, metrics, pages=13)
    # When the older one's 57th position takes its eighth page of twelve, the younger one has four and is at its 32nd.
    # It needs a fifth, loses all, and comes back when the older one has ended.
    streams = [engine.submit(request(100, 47, 20)), engine.submit(request(101, 23, 20))]
    engine.start()
    try:
        for stream in streams:
            list(stream)
        at = {"model_name": "m", "version": "1", "engine": "0"}
        read = metrics.registry.get_sample_value
        assert read("systolic:num_preemptions_total", at) == 1
        assert read("systolic:generation_tokens_total", at) == 40
        assert read("systolic:kv_cache_pages_in_use", at) == 0
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def alone(small: Small) -> Iterator[tuple[Engine, Metrics]]:
    """An engine that runs one text at a time."""
    metrics = Metrics()
    engine = opened(small, metrics, rows=1)
    engine.start()
    yield engine, metrics
    engine.stop()


def test_seconds_of_a_start_are_those_of_all_engines() -> None:
    metrics = Metrics()
    texts = TextMetrics(metrics)
    for number, seconds in enumerate((30.0, 1.0)):
        meter = texts.of("m", 1, number)
        meter.placed(2 * seconds)
        phases = {"compile": seconds}
        meter.compiled(CompileFacts(bucket="b", seconds=seconds, cached=False, phases=phases))
    for phase, seconds in (("compile", 31.0), ("weights", 62.0), ("load", 0.0)):
        at = {"model_name": "m", "version": "1", "phase": phase}
        assert metrics.registry.get_sample_value("systolic:startup_seconds", at) == seconds


def test_waiting_texts_that_are_cancelled_are_counted_no_more(
    alone: tuple[Engine, Metrics],
) -> None:
    engine, metrics = alone
    streams = [engine.submit(request(first, 8, 40)) for first in (100, 101, 102)]
    for stream in streams[1:]:
        stream.cancel()
    for stream in streams:
        list(stream)
    at = {"model_name": "m", "version": "1", "engine": "0"}
    assert metrics.registry.get_sample_value("systolic:num_requests_waiting", at) == 0
    # Two prompts were never read, and a scored one is never looked up.
    scored = replace(request(103, 8, 1), prompt_logprobs=True, logprobs=0)
    list(engine.submit(scored))
    for name, count in (("prompt_tokens", 16), ("prefix_cache_queries", 8)):
        assert metrics.registry.get_sample_value(f"systolic:{name}_total", at) == count


def test_a_step_that_hangs_is_not_ready_and_comes_back(
    alone: tuple[Engine, Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = alone
    served = ServedText(name="m", engine=engine, tokenizer=engine.tokenizer)
    limits = HttpLimits(heartbeat_seconds=0.1)
    state = ServerState(
        registry=ModelRegistry([served]), limits=limits, metrics=Metrics(), opened=True
    )
    go_on, collect = threading.Event(), engine.runner.collect
    monkeypatch.setattr(engine.runner, "collect", lambda flight: go_on.wait(60) and collect(flight))
    wait(lambda: state.ready and state.alive)
    stream = engine.submit(request(100, 8, 3))
    wait(lambda: not state.ready)
    wait(lambda: not state.alive)
    go_on.set()
    assert sum(len(piece.token_ids) for piece in stream) == 3
    wait(lambda: state.ready and state.alive)


def test_documented_names_are_those_of_the_page() -> None:
    metrics = Metrics()
    TextMetrics(metrics), BatchMetrics(metrics)
    families = list(text_string_to_metric_families(metrics.page().decode()))
    own = {
        one.name.removeprefix(PREFIX) + ("_total" if one.type == "counter" else ""): one
        for one in families
        if one.name.startswith(PREFIX)
    }
    text = DOCS.read_text().partition("## Metrics")[2]
    named = re.findall(r"`([a-z0-9_]+)(?:\{([a-z_,]+)\})?`", text)
    documented = {name for name, _ in named if "_" in name or name == "ready"}
    labels = {"model_name", "lora_name"}
    assert documented - labels == set(own)
