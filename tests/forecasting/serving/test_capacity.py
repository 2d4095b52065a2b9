"""Capacity of a server: memory and floors of a small decoder counted by hand."""

import json
import re
from dataclasses import replace

import pytest

from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.cli.main import main
from systolic.compiling import Compiler, PagedProgram
from systolic.core.errors import OptionError
from systolic.forecasting import forecast_program
from systolic.forecasting.display.serving import lines
from systolic.forecasting.serving.capacity import floor_seconds, forecast_serving, ladder
from systolic.forecasting.serving.forecast import LatencyLimits, Load, ServingForecast, latency
from systolic.forecasting.serving.layout import engine_layout, layout_of_requests, serving_layout
from systolic.formats.matrices import whole
from systolic.job import Layout, WeightFormat
from systolic.recipes.jobs import source_of
from tests.compiles import cheap

pytestmark = pytest.mark.own_programs

WORDS = "--model.layers=2 --model.d-model=64 --model.d-ff=128 --model.heads=4 --model.kv-heads=2 --model.head-dim=16 --model.vocab=512"
PARAMETERS = 512 * 64 + 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
KEYS_AND_VALUES = 2 * 2 * 2 * 16
"""Elements of a position: layers x (key and value) x kv_heads x head_dim."""


def test_a_server_on_this_machine(capsys) -> None:
    """One text, and as many as fit; and the most within a latency between those of the two."""
    words = ["--prompt-tokens=64", "--output-tokens=32", "--page-size=32", "--chunk=32"]
    asked = ["lm", *WORDS.split(), "--on=cpu", *words, "--concurrency", "1", "1000000000"]
    asked += [f"--flags={flags}"] if (flags := cheap("")) else []
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
    assert made["program"] == "step over pages, as systolic serve runs it"
    room, held = made["concurrency"], (memory["pages"] - 1) // 3
    # 96 tokens, and a page for padding; fewer where a step of so many has not been compiled.
    assert 0.9 * held < room <= held
    assert [one["concurrency"] for one in made["points"]] == [1, room]
    assert (made["refused"], room > 1000) == ([1_000_000_000], True)
    first, *tried, whole, chunk = [(s["rows"], s["tokens"], s["context"]) for s in made["steps"]]
    assert (first, whole) == ((1, 1, 96), (room, 1, 96))
    assert len(tried) <= 1  # a step by whose temporaries more fit
    assert all(0.7 * room < rows < room for rows, *_ in tried)
    assert chunk == (1, 32, 64)  # after 0 tokens and after 32: 48 on average, in pages of 32
    one, steps = made["points"][0], made["steps"]
    assert one["time_to_first_token_seconds"] == pytest.approx(2 * steps[-1]["seconds"])
    assert one["time_per_output_token_seconds"] == pytest.approx(steps[0]["seconds"])
    alone, most = (point["time_per_output_token_seconds"] for point in made["points"])
    within = f"--tpot={500 * (alone + most)}ms"
    assert main(["forecast", "--serve", *asked, within]) == 0
    shown = capsys.readouterr().out
    assert f"no room for 1,000,000,000 at once: {room:,} fit, the others would wait" in shown
    (told,) = re.findall(r"most tokens within .*: ([0-9,]+) at once: ", shown)
    assert 1 < int(told.replace(",", "")) < room
    assert main(["forecast", "--serve", *asked, f"--tpot={500 * alone}ms"]) == 0
    assert "no load keeps per token" in capsys.readouterr().out


def test_adapters_side_by_side_take_memory_and_are_read_in_every_step(capsys) -> None:
    words = [
        "lm",
        "--model.layers=1",
        *WORDS.split()[1:],
        "--on=v6e-1",
        "--prompt-tokens=32",
        "--output-tokens=32",
    ]
    words += ["--concurrency", "1", "--quick"]
    plain, adapted = (
        json.loads(capsys.readouterr().out)
        for more in ((), ("--adapters=8", "--rank=16"))
        if main(["forecast", "--serve", *words, *more, "--json"]) == 0
    )
    # Inputs and outputs of query, key, value and out, and of gate, up and down; bfloat16.
    size = 2 * (8 * 16) * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    memory, before = adapted["memory"], plain["memory"]
    assert memory["adapters_bytes"] == size == 262_144
    assert memory["weights_bytes"] - before["weights_bytes"] == size
    assert "adapters_bytes" not in before
    seconds = [made["steps"][0]["floor_seconds"] for made in (plain, adapted)]
    rate = slice("v6e-1").chip.hbm_bytes_per_second
    assert rate is not None
    assert (seconds[1] - seconds[0]) * rate == pytest.approx(size)
    for wrong, line in (
        (["--rank=16"], "--rank has no effect without --adapters"),
        (["--adapters=2000"], "--adapters 2000 of --rank 16 have 32,000 columns side by side"),
    ):
        assert main(["forecast", "--serve", *words, *wrong]) == 2
        assert line in capsys.readouterr().err
    assert main(["forecast", "--serve", *words, "--adapters=8", "--rank=16"]) == 0
    shown = re.findall(r"adapters +(\S+) (\S+) +(.*)", capsys.readouterr().out)
    assert shown == [("256.0", "KiB", "all read in every step")]
    coded = ["--adapters=8", "--weights=int8", "--json"]
    assert main(["forecast", "--serve", *words, *coded]) == 0
    beside_codes = json.loads(capsys.readouterr().out)["memory"]
    assert beside_codes["adapters_bytes"] == size
    assert beside_codes["weights_bytes"] < memory["weights_bytes"]


@pytest.mark.slow
def test_requests_whose_step_does_not_fit_are_refused(capsys) -> None:
    # The logits of 60,000 texts alone are 58.6 GiB; their pages would fit.
    words = ["--model.vocab=262144", "--on=cpu", "--prompt-tokens=16", "--output-tokens=16"]
    asked = ["lm", *WORDS.split()[:-1], *words, "--page-size=32", "--concurrency", "1", "60000"]
    assert main(["forecast", "--serve", *asked, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    # In place of what has no room stands the room itself.
    assert [one["concurrency"] for one in made["points"]] == [1, made["concurrency"]]
    assert made["refused"] == [60_000]
    logits, capacity = 262_144 * 4, made["memory"]["capacity_bytes"]
    assert capacity / logits / 12 < made["concurrency"] < capacity / logits
    # By the logits, which are known before any compile: no step was compiled that does not fit.
    assert not any("needs more memory" in note for note in made["notes"])


@pytest.mark.slow
def test_the_last_load_is_the_room_and_the_cheapest_is_named(wordy) -> None:
    """The step of many texts has logits that take room from pages: what fits beside it is what is forecast."""
    pytest.importorskip("libtpu")
    made = wordy()
    room, (alone, last) = made.concurrency, made.points
    assert (alone.concurrency, last.concurrency, list(made.refused)) == (1, room, [100_000])
    # By hand: 72 pages of 0.5 MiB a request, and six arrays of a text's logits, 1 MiB each, in its step.
    memory, each = made.memory, 72 * (1 << 19)
    free = memory.capacity_bytes - memory.weights_bytes
    assert memory.page_bytes == 1 << 19
    assert free / (each + 10 * (1 << 20)) < room < free / (each + 5 * (1 << 20))
    assert made.best is last
    shown = [line.plain for line in lines(made, 120)]
    assert f"no room for 100,000 at once: {room:,} fit, the others would wait in the queue" in shown
    assert any(line.startswith(f"cheapest: {room:,} at once, all that fit: ") for line in shown)


@pytest.mark.slow
def test_the_best_load_within_a_latency_lies_between_those_of_the_table(wordy) -> None:
    pytest.importorskip("libtpu")
    alone, last = wordy().points
    limit = (alone.state.token_seconds + last.state.token_seconds) / 2
    made = wordy(token_seconds=limit)
    best = made.best
    assert best is not None
    assert [one.concurrency for one in made.points] == [1, best.concurrency, last.concurrency]
    assert 1 < best.concurrency < last.concurrency
    assert best.state.token_seconds <= limit
    assert made.to_json()["best"] == best.concurrency
    none = wordy(token_seconds=alone.state.token_seconds / 2)
    assert none.best is None
    assert any(line.plain.startswith("no load keeps per token") for line in lines(none, 100))


@pytest.mark.parametrize("text", ["50", "fast", "-1s", "0ms", "1h"])
def test_a_latency_that_is_none(text: str) -> None:
    with pytest.raises(OptionError, match=r"--tpot is '.*'; write a time such as 50ms"):
        latency(text, "--tpot")


def test_latencies() -> None:
    assert latency("50ms", "--tpot") == 0.05
    assert latency("1.5s", "--ttft") == 1.5
    assert latency(0.05, "--tpot") == 0.05
    assert latency(None, "--tpot") is None


def test_the_layout_of_requests_that_several_engines_hold() -> None:
    job, load = source_of("llama-3.1-8b", {}).job, Load(prompt_tokens=1024, output_tokens=256)
    # Eight engines of 16 texts; more texts than these have room for on one device each are split.
    for requests in (16, 64, 128):
        assert layout_of_requests(job, slice("v6e-8"), load, requests).layout.data == 8
    assert layout_of_requests(job, slice("v6e-8"), load, 2048).layout.tensor > 1


def test_the_layout_that_a_server_chooses() -> None:
    job = source_of("llama-3.1-8b", {}).job
    short, long = Load(prompt_tokens=1024, output_tokens=256), Load(prompt_tokens=100_000)

    # 14.96 GiB of weights and 2.5 GiB of pages for 16 texts of 1,280 tokens fit on a device of 31.25 GiB, not on one of 15.75.
    def chosen(on: str, load: Load) -> Layout:
        found = engine_layout(job, slice(on), load)
        assert found.idle == ""
        return found.layout

    assert chosen("v6e-8", short) == Layout(data=8, fsdp=1, tensor=1)
    assert chosen("v5e-8", short) == Layout(data=4, fsdp=1, tensor=2)
    # 196 GiB of pages.
    assert chosen("v6e-8", long) == Layout(data=1, fsdp=1, tensor=8)


NINE = ("--model.heads=9", "--model.kv-heads=3", "--model.head-dim=64", "--model.d-model=576")
"""Heads of SmolLM2-135M, which 2, 4 and 8 devices do not divide."""


@pytest.mark.slow
def test_devices_that_no_engine_takes_are_named_and_the_server_leaves_the_same(capsys) -> None:
    """40.5 GiB of weights: three devices of v5e hold them, and two engines of three leave two idle."""
    sizes = ("--model.layers=3", "--model.d-ff=4194048", "--model.vocab=512")
    words = ["lm", *NINE, *sizes, "--on=v5e-8", "--concurrency", "1", "--quick", "--json"]
    assert main(["forecast", "--serve", *words, "--prompt-tokens=64", "--output-tokens=16"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"] == "data 2, tensor 3"
    assert made["program"] == "step over pages, as systolic serve runs it"
    note = made["notes"][0]
    assert note.startswith("2 of 8 devices are idle: 2 engines of 3 take 6 (weights and pages of ")
    assert note.endswith(
        "; take a number of devices that 3 divides, or another --layout.tensor that the model's sizes allow"
    )
    assert made["memory"]["replicas"] == 2


def test_tensor_first_then_experts_then_replicas() -> None:
    job = source_of("llama-3.1-8b", {}).job
    assert serving_layout(job, slice("v6e-4")) == Layout(data=1, fsdp=1, tensor=4)
    assert serving_layout(job, slice("v6e-16")) == Layout(data=2, fsdp=1, tensor=8)
    mixture = source_of("qwen3-30b-a3b", {}).job
    assert serving_layout(mixture, slice("v6e-8")) == Layout(data=1, fsdp=1, tensor=4, expert=2)


@pytest.fixture
def wordy():
    """A small model of 262,144 words on v5e-1 at 1 and at more texts than fit, for a limit of the seconds of a token."""
    job = source_of("llama-3.1-8b", {"layout": Layout(data=1, fsdp=1, tensor=1)}).job
    sizes = {
        "layers": 1,
        "d_model": 512,
        "d_ff": 1024,
        "heads": 16,
        "kv_heads": 16,
        "vocab": 262_144,
    }
    on = slice("v5e-1")

    def made(token_seconds: float | None = None) -> ServingForecast:
        return forecast_serving(
            replace(job, model=replace(job.model, **sizes)),
            on,
            Load(prompt_tokens=4000, output_tokens=600, chunk=64),
            concurrency=(1, 100_000),
            limits=LatencyLimits(token_seconds=token_seconds),
            compiler=Compiler(flags=resolved("", on.chip)).quick(),
        )

    return made


def test_concurrencies() -> None:
    assert ladder(0) == []
    assert ladder(1) == [1]
    assert ladder(16) == [1, 4, 16]
    assert ladder(189) == [1, 4, 16, 64, 189]


def test_a_count_that_is_none() -> None:
    job = source_of("llama-3.1-8b", {}).job
    with pytest.raises(OptionError, match=r"--concurrency is 0; it takes at least 1"):
        forecast_serving(job, "v6e-8", Load(), concurrency=(0,))


WEIGHTS = 2 * (8_030_261_248 - 128_256 * 4096) / 4
"""Bytes that a device of four reads of Llama 3.1 8B in bf16: all but the embedding's rows."""
POSITION = 2 * 32 * 8 * 128 * 2
"""Bytes of a position of its cache: keys and values of 32 layers with 8 heads of 128 elements in bf16."""


@pytest.fixture(scope="module")
def llama() -> ServingForecast:
    """Llama 3.1 8B, all layers, by the step of ``systolic serve``: three programs, 1 and 16 texts and a chunk."""
    on = slice("v6e-4")
    return forecast_serving(
        source_of("llama-3.1-8b", {"layout": Layout(data=1, fsdp=1, tensor=4)}).job,
        on,
        Load(prompt_tokens=1024, output_tokens=256, chunk=256),
        concurrency=(1, 16, 100_000),
        compiler=Compiler(flags=resolved("", on.chip)).quick(),
    )


@pytest.mark.slow
def test_floors_and_the_screen_for_a_slice(llama: ServingForecast) -> None:
    made = llama
    decode = next(one for one in made.steps if one.rows == 16)
    assert decode.floor_seconds == pytest.approx(
        (WEIGHTS + 16 * 1152 * POSITION / 4) / 1638e9, rel=0.01
    )
    assert decode.floor_seconds < decode.seconds < 3 * decode.floor_seconds
    alone, point, last = made.points
    assert [one.concurrency for one in made.points] == [1, 16, made.concurrency]
    assert last.output_tokens_per_second > point.output_tokens_per_second
    for one in made.points:
        assert one.output_tokens_per_second < (one.floor_output_tokens_per_second or 0)
        assert one.usd_per_hour is not None
        assert one.usd_per_million_output_tokens == pytest.approx(
            one.usd_per_hour / 3600 / one.output_tokens_per_second * 1e6
        )
    # More texts at once: more tokens in all, a longer step.
    assert point.output_tokens_per_second > alone.output_tokens_per_second
    assert point.state.token_seconds > alone.state.token_seconds
    # A prompt of 1,024 tokens takes its FLOPs at the peak of 918 TFLOP/s.
    assert alone.state.first_token_seconds > 2 * 7.5e9 * 1024 / (4 * 918e12)
    assert list(made.refused) == [100_000]
    shown = [line.plain for line in lines(made, 100)]
    assert shown[0] == "llama-3.1-8b served on v6e-4: fits"
    assert any("as systolic serve runs it; ragged paged attention" in line for line in shown)
    assert any(line.startswith("no room for 100,000 at once") for line in shown)
    # Hidden behind steps of 5 ms and more, and said all the same.
    assert made.load.host_seconds == 1.2e-3
    assert any(line.startswith("host's work of 1.2 ms a step (--host-ms)") for line in shown)
    assert max(map(len, shown)) <= 100


@pytest.mark.slow
def test_memory_as_the_engine_has_it(llama: ServingForecast) -> None:
    memory = llama.memory
    # Matrices and embeddings lie over the devices, norms are whole on each.
    norms = 2 * (2 * 32 + 1) * 4096
    assert memory.weights_bytes == (2 * 8_030_261_248 - norms) // 4 + norms
    assert memory.page_bytes == 64 * POSITION // 4
    # One page is for padding, and 1,280 tokens have 20.
    free = memory.capacity_bytes - memory.weights_bytes - memory.temporary_bytes
    assert llama.concurrency == (free // memory.page_bytes - 1) // 20
    # Logits in float32 of as many texts as there is room for, at least: the choice of tokens gathers them.
    logits = llama.concurrency * 128_256 * 4
    assert logits < memory.temporary_bytes < 8 * logits, (llama.concurrency, logits)


def step_seconds(model: str, on: str, context: int, rows: int, **layout: int) -> float:
    """Seconds of a decode step of four layers of a published model."""
    job = source_of(model, {"layout": Layout(**({"data": 1, "fsdp": 1} | layout))}).job
    target = slice(on)
    made = forecast_program(
        PagedProgram(
            job=replace(job, model=replace(job.model, layers=4)),
            rows=rows,
            pages=context // 64,
            num_pages=rows * context // 64 + 1,
        ),
        job.name,
        target,
        compiler=Compiler(flags=resolved("", target.chip)).quick(),
    )
    floor = floor_seconds(made)
    assert made.step_seconds is not None
    assert floor is not None
    assert floor < made.step_seconds
    return made.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WeightFormat.int8, WeightFormat.w8a8])
def test_a_quantized_step_is_above_its_floor_by_hand(kind: WeightFormat) -> None:
    """Two layers of Llama 3.1 8B and the output matrix, a byte for each weight; a chunk of 1,024 tokens at the peak of its operands, or as long as its weights take."""
    layer, vocabulary = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336, 128_256 * 4096
    job, on = source_of("llama-3.1-8b", {"layout": Layout(data=1, fsdp=1)}).job, slice("v6e-1")
    job = replace(job, model=replace(job.model, layers=2))
    job = replace(job, quantization=whole(job.model, kind))
    pages = {"pages": 16, "page_size": 64, "num_pages": 16 * 16 + 1}
    weights = (2 * layer + vocabulary) / 1638e9
    cache = 16 * 1024 * 2 * 2 * 8 * 128 * 2 / 1638e9
    rate = 1836e12 if kind is WeightFormat.w8a8 else 918e12
    computing = 2 * (2 * layer * 1024 + vocabulary) / rate
    decode, chunk = weights + cache, max(weights, computing)
    for sizes, floor in (({"rows": 16}, decode), ({"rows": 0, "chunk": 1024}, chunk)):
        program = PagedProgram(job=job, **{**pages, **sizes})
        compiler = Compiler(flags=resolved("", on.chip)).quick()
        made = forecast_program(program, job.name, on, compiler=compiler)
        assert made.step_seconds is not None
        assert made.step_seconds > floor
        assert floor_seconds(made) == pytest.approx(floor, rel=0.05)


@pytest.mark.slow
def test_more_context_is_not_faster_and_more_chips_are_not_slower() -> None:
    for model in ("smollm2-135m", "llama-3.1-8b"):
        short = step_seconds(model, "v6e-1", 1024, 16)
        assert step_seconds(model, "v6e-1", 4096, 16) > short
    assert step_seconds("llama-3.1-8b", "v6e-4", 1024, 16, tensor=4) < short


@pytest.mark.slow
def test_engines_beside_each_other_take_as_long_as_one() -> None:
    alone = step_seconds("smollm2-135m", "v6e-1", 1024, 16)
    assert step_seconds("smollm2-135m", "v6e-8", 1024, 16, data=8) == pytest.approx(alone, rel=0.02)
