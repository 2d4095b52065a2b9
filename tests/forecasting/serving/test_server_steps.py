"""Programs that a server's forecast compiles: the engine's own wherever it runs the model, by sizes counted by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from systolic.chips import slice
from systolic.compiling import PagedProgram, ServingProgram
from systolic.compiling.tracing import _read_share
from systolic.core.errors import OptionError
from systolic.forecasting.serving.forecast import Load
from systolic.forecasting.serving.server_steps import (
    CHOICE_LOGITS,
    BatchSteps,
    EngineSteps,
    ServerSteps,
    server_steps,
    with_formats,
)
from systolic.job import ExpertAxis, Layout, Served, ServedCache, ServedWeights
from systolic.models.decoder.config import Decoder
from systolic.recipes.jobs import source_of

pytestmark = pytest.mark.own_programs

LOAD = Load(prompt_tokens=1000, output_tokens=256, chunk=256)


def steps_of(model: str, on: str, served: Served | None = None, **layout: int) -> ServerSteps:
    job = source_of(model, {"layout": Layout(**({"data": 1, "fsdp": 1} | layout))}).job
    return server_steps(job, slice(on), LOAD, 64, served)


def test_the_step_of_an_engine() -> None:
    steps = steps_of("llama-3.1-8b", "v6e-8", data=2, tensor=4)
    assert isinstance(steps, EngineSteps)
    assert steps.replicas == 2
    # 1,000 positions and half of 256 new ones: 18 pages of 64.
    program = steps.program((16, 1))
    assert isinstance(program, PagedProgram)
    assert (program.rows, program.chunk, program.pages, program.num_pages) == (16, 0, 18, 289)


@pytest.mark.parametrize(("texts", "pages"), [(1, 3), (4, 9), (8, 18)])
def test_rows_of_padding_have_no_pages_beside_those_of_the_texts(texts: int, pages: int) -> None:
    program = steps_of("llama-3.1-8b", "v6e-1").program((texts, 1))
    assert isinstance(program, PagedProgram)
    # 18 pages of each text, over eight rows.
    assert (program.rows, program.pages) == (8, pages)
    assert program.rows * program.pages - texts * 18 < 8


def test_a_chunk_has_the_positions_before_it_on_average() -> None:
    steps = steps_of("llama-3.1-8b", "v6e-1")
    assert steps.prompts == [256]
    # Four chunks end at 256, 512, 768 and 1,024.
    assert steps.context(256) == 640
    program = steps.program((1, 256))
    assert isinstance(program, PagedProgram)
    assert (program.rows, program.chunk, program.pages) == (0, 256, 10)


@pytest.mark.parametrize(
    "served",
    [
        Served(weights=ServedWeights.int8),
        Served(cache=ServedCache.int8),
        Served(expert_axis=ExpertAxis.heads),
    ],
)
def test_what_the_engine_has_not_is_forecast_by_a_batch(served: Served) -> None:
    steps = steps_of("qwen3-30b-a3b", "v6e-8", served, expert=8)
    assert isinstance(steps, BatchSteps)
    assert isinstance(steps.program((4, 1)), ServingProgram)


@pytest.mark.parametrize("cache", ServedCache)
def test_pages_in_a_format_are_the_engines(cache: ServedCache) -> None:
    steps = steps_of("llama-3.1-8b", "v6e-8", Served(cache=cache), tensor=8)
    assert isinstance(steps, EngineSteps)
    program = steps.program((16, 1))
    assert isinstance(program, PagedProgram)
    assert program.cache is cache
    assert program.key()["paged"]["cache"] == cache.value


def test_a_batch_has_no_cache_in_fp8() -> None:
    with pytest.raises(OptionError, match=r"--kv-dtype is fp8, .* take plain or int8"):
        steps_of("llama-3.1-8b", "v6e-8", Served(cache=ServedCache.fp8), fsdp=8)


GEMMA = Decoder(
    layers=6, d_model=64, d_ff=64, heads=4, kv_heads=2, head_dim=16, vocab=264, window=128, global_every=6
)  # fmt: skip
"""Five layers with a window of 128 and one without."""


@pytest.mark.parametrize(
    ("model", "pages", "chunk", "share"),
    [
        # 640 positions, of which a new token has 128 to read in five layers.
        (GEMMA, 10, 0, (5 * 128 + 640) / (6 * 640)),
        # The first of 256 tokens sees 127 positions before itself: 383 in all.
        (GEMMA, 10, 256, (5 * 383 + 640) / (6 * 640)),
        # Texts no longer than the window.
        (GEMMA, 2, 0, 1.0),
        (GEMMA, 5, 256, 1.0),
        # A pattern of six over eight layers begins again: seven with a window.
        (replace(GEMMA, layers=8), 10, 0, (7 * 128 + 640) / (8 * 640)),
        # Mistral's window is that of all layers; Llama has none.
        (replace(GEMMA, global_every=0), 10, 0, 128 / 640),
        (replace(GEMMA, global_every=0, window=0), 10, 0, 1.0),
    ],
)
def test_positions_that_layers_have_to_read(
    model: Decoder, pages: int, chunk: int, share: float
) -> None:
    job = replace(source_of("lm", {}).job, model=model)
    program = PagedProgram(job=job, rows=4, pages=pages, num_pages=99, page_size=64, chunk=chunk)
    assert _read_share(model, program) == pytest.approx(share)


def test_the_choice_by_all_settings_needs_what_is_counted_for_it() -> None:
    """By the program that a server compiles on this machine; :data:`CHOICE_LOGITS` says how TPUs' were measured."""
    import jax
    import jax.numpy as jnp

    from systolic.steps.logits import Cuts, Draw, choose_by_all

    def some(dtype: Any, *size: int) -> Any:
        return jax.ShapeDtypeStruct(size, dtype)

    integer, real, texts, vocab = jnp.int32, jnp.float32, 8, 32_000
    numbers = [some(real, texts) for _ in range(5)]
    ids, biases = some(integer, texts, 64), (some(integer, texts, 300), some(real, texts, 300))
    cuts = Cuts(some(integer, texts), *numbers, ids, some(integer, texts), *biases)
    given = (some(real, texts, vocab), some(integer, 17), some(integer, 4, texts), cuts)
    jitted = jax.jit(lambda a, b, c, d: choose_by_all(a, b, Draw.unpacked(c), d), donate_argnums=1)
    found = jitted.lower(*given).compile().memory_analysis()
    own = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    assert own == pytest.approx(CHOICE_LOGITS["cpu"] * texts * vocab * 4, rel=0.01)


def test_formats_of_weights_are_programs_of_their_own() -> None:
    """A forecast of one is not answered by what was compiled for another."""
    job = source_of("llama-3.1-8b", {"layout": Layout(data=1, fsdp=1, tensor=8)}).job
    keys = set()
    for weights in ServedWeights:
        made = with_formats(job, "llama-3.1-8b", weights)
        steps = server_steps(made, slice("v6e-8"), LOAD, 64, None)
        assert isinstance(steps, EngineSteps)
        keys.add(json.dumps(steps.program((16, 1)).key(), sort_keys=True))
    assert len(keys) == len(ServedWeights)


def test_other_axes_and_experts_alone() -> None:
    assert isinstance(steps_of("llama-3.1-8b", "v6e-8", fsdp=8), BatchSteps)
    # Qwen3-30B-A3B has 4 key-value heads: the engine copies them over 8 devices.
    assert isinstance(steps_of("qwen3-30b-a3b", "v6e-8", tensor=8), EngineSteps)
    assert isinstance(steps_of("qwen3-30b-a3b", "v6e-8", tensor=4, expert=2), EngineSteps)
    # Formats that the engine has, and no expert axis to use.
    assert isinstance(steps_of("llama-3.1-8b", "v6e-8", Served(), tensor=8), EngineSteps)
