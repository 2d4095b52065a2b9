"""Capacity of a server: memory and floors of a small decoder counted by hand."""

import json

import pytest

from systolic.aot import Compiler
from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.forecasting.serving import Load
from systolic.job import Layout
from systolic.report.forecast.serving import lines
from systolic.session.capacity import forecast_serving, ladder, serving_layout
from systolic.session.job_source import source_of

WORDS = "--model.layers=2 --model.d-model=64 --model.d-ff=128 --model.heads=4 --model.kv-heads=2 --model.head-dim=16 --model.vocab=512"
PARAMETERS = 512 * 64 + 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
KEYS_AND_VALUES = 2 * 2 * 2 * 16
"""Elements of a position: layers x (key and value) x kv_heads x head_dim."""


def test_a_server_on_this_machine(capsys) -> None:
    words = ["--prompt-tokens=64", "--output-tokens=32", "--page-size=32", "--chunk=32"]
    asked = ["lm", *WORDS.split(), "--on=cpu", *words, "--concurrency", "1", "4"]
    assert main(["forecast", "--serve", *asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    memory = made["memory"]
    assert memory["weights_bytes"] == 4 * PARAMETERS
    assert memory["page_bytes"] == 32 * 4 * KEYS_AND_VALUES
    assert (
        memory["weights_bytes"]
        + memory["temporary_bytes"]
        + memory["pages_bytes"]
        + memory["left_bytes"]
        == memory["capacity_bytes"]
    )
    assert made["concurrency"] == memory["pages"] // 3  # 96 tokens
    assert [one["concurrency"] for one in made["points"]] == [1, 4]
    assert [(one["rows"], one["tokens"], one["context"]) for one in made["steps"]] == [
        (1, 1, 96),
        (4, 1, 96),
        (1, 32, 32),
        (1, 64, 64),
    ]
    one, steps = made["points"][0], made["steps"]
    chunk = max(steps[2]["seconds"], steps[3]["seconds"] / 2)
    assert one["time_to_first_token_seconds"] == pytest.approx(2 * chunk)
    assert one["time_per_output_token_seconds"] == pytest.approx(steps[0]["seconds"])


def test_tensor_first_then_experts_then_replicas() -> None:
    job = source_of("llama-3.1-8b", {}).job
    assert serving_layout(job, slice("v6e-4")) == Layout(data=1, fsdp=1, tensor=4)
    assert serving_layout(job, slice("v6e-16")) == Layout(data=2, fsdp=1, tensor=8)
    mixture = source_of("qwen3-30b-a3b", {}).job
    assert serving_layout(mixture, slice("v6e-8")) == Layout(data=1, fsdp=1, tensor=4, expert=2)


def test_concurrencies() -> None:
    assert ladder(0) == []
    assert ladder(1) == [1]
    assert ladder(16) == [1, 4, 16]
    assert ladder(189) == [1, 4, 16, 64, 189]


def test_a_count_that_is_none() -> None:
    job = source_of("llama-3.1-8b", {}).job
    with pytest.raises(OptionError, match=r"--concurrency is 0; it takes at least 1"):
        forecast_serving(job, "v6e-8", Load(), concurrency=(0,))


@pytest.mark.slow
def test_floors_and_the_screen_for_a_slice() -> None:
    job = source_of("llama-3.1-8b", {}).job
    on = slice("v6e-4")
    made = forecast_serving(
        source_of("llama-3.1-8b", {"layout": serving_layout(job, on)}).job,
        on,
        Load(prompt_tokens=1024, output_tokens=256),
        concurrency=(16, 100_000),
        compiler=Compiler(flags=resolved("", on.chip)).quick(),
    )
    # 8,030,261,248 parameters less an embedding of 128,256 x 4,096, in bf16; 131,072 bytes of cache a position.
    weights = 2 * (8_030_261_248 - 128_256 * 4096) / 4
    cache = 16 * 1152 * 131_072 / 4
    decode = next(one for one in made.steps if one.rows == 16)
    assert decode.floor_seconds == pytest.approx((weights + cache) / 1638e9, rel=0.01)
    assert decode.floor_seconds < decode.seconds < 3 * decode.floor_seconds
    # A prompt of 1,024 tokens takes its FLOPs at the peak of 918 TFLOP/s, and no server is faster than its floor.
    prompt = max(made.steps, key=lambda one: one.tokens)
    assert prompt.seconds > 2 * 7.5e9 * 1024 / (4 * 918e12)
    (point,) = made.points
    assert point.state.first_token_seconds > prompt.seconds * 0.99
    assert point.output_tokens_per_second < (point.floor_output_tokens_per_second or 0)
    assert point.usd_per_hour is not None
    assert point.usd_per_million_output_tokens == pytest.approx(
        point.usd_per_hour / 3600 / point.output_tokens_per_second * 1e6
    )
    memory = made.memory
    free = memory.capacity_bytes - memory.weights_bytes - memory.temporary_bytes
    assert made.concurrency == free // memory.page_bytes // 10  # 1,280 positions
    assert made.memory.page_bytes == 128 * 131_072 // 4
    assert list(made.refused) == [100_000]
    shown = [line.plain for line in lines(made, 100)]
    assert shown[0] == "llama-3.1-8b served on v6e-4: fits"
    assert any(line.startswith("no room for 100,000 at once") for line in shown)
    assert max(map(len, shown)) <= 100
