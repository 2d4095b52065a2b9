"""A cache in pages: any cut of a text into chunks and tokens, over pages in any order, has the logits of the whole text."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.job import ServedCache
from systolic.models.attention import Logits
from systolic.models.decoder.cache import coded
from systolic.models.decoder.config import Dispatch
from systolic.models.decoder.options import Latent
from systolic.models.decoder.page_arrays import LayerPages, PageArrays, PageRows, kernel_of_gpus
from systolic.models.decoder.paged import Reading, layers_of, page_arrays, read
from tests.models.decoders import module, program
from tests.steps import tiny
from tests.tiers import some

LATENT = Latent(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
BASE = replace(tiny.MODEL, layers=2)
CONFIGS = {
    "grouped": BASE,
    "one query a head": replace(BASE, kv_heads=BASE.heads),
    "windows": replace(BASE, window=3, global_every=2),
    "sinks and caps": replace(BASE, sinks=True, attention_cap=5.0),
    "n-grams": replace(BASE, ngrams=3, ngram_rows=64, ngram_dim=8),
    "all of these": replace(
        BASE,
        window=3,
        global_every=2,
        sinks=True,
        attention_cap=5.0,
        ngrams=3,
        ngram_rows=64,
        ngram_dim=8,
    ),
    "latents": replace(BASE, kv_heads=BASE.heads, latent=LATENT),
    "mixture": replace(BASE, experts=4, dense_layers=1, dispatch=Dispatch.dropless),
    "every other layer a mixture": replace(
        BASE, experts=4, mixture_every=2, dispatch=Dispatch.dropless
    ),
}
DEFAULT = ("all of these", "latents", "every other layer a mixture")
SIZE = 4
"""Positions of a page."""
LENGTHS = (13, 7, 1)
CUTS = {"chunks": (8,), "both": (4, 1, 1, 1, 1), "tokens": ()}


@pytest.mark.parametrize("name", some(list(CONFIGS), DEFAULT))
def test_any_cut_over_pages_has_the_logits_of_the_whole(name: str) -> None:
    """All of them by chunks; one model also by pages and tokens."""
    net = module(CONFIGS[name])
    known = whole(net)
    step = step_of(net)
    for cuts in CUTS.values() if name == "latents" else (CUTS["chunks"],):
        for row, made in enumerate(cut_over_pages(net, step, cuts)):
            wanted = known[row, : LENGTHS[row]]
            np.testing.assert_allclose(np.stack(made), wanted, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param("grouped", ServedCache.int8, marks=pytest.mark.parity),
        pytest.param("latents", ServedCache.int8, marks=pytest.mark.parity),
        pytest.param("grouped", ServedCache.fp8, marks=pytest.mark.parity),
    ],
)
def test_pages_in_8_bits_have_the_same_logits_by_any_cut(name: str, cache: ServedCache) -> None:
    """What a token finds in the pages does not depend on the steps that wrote them."""
    net = module(CONFIGS[name])
    step, known = step_of(net, cache), whole(net)
    tokens, chunks = (cut_over_pages(net, step, CUTS[cuts], cache) for cuts in ("tokens", "chunks"))
    for row, (some_way, other) in enumerate(zip(tokens, chunks, strict=True)):
        np.testing.assert_allclose(np.stack(some_way), np.stack(other), atol=2e-5, rtol=2e-4)
        assert np.abs(np.stack(some_way) - known[row, : LENGTHS[row]]).max() > 1e-5


def texts() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 64, length) for length in LENGTHS]


def step_of(net: Any, cache: ServedCache = ServedCache.plain) -> Any:
    """One step over pages, compiled once for each width of a chunk."""
    layers, states = layers_of(net)

    def step(reading, pages, chunk):
        paired = list(zip(layers, states, strict=True))
        hidden, pages = read(net, paired, reading, pages, chunk, cache)
        return net.logits(hidden[:, None])[:, 0], pages

    return jax.jit(step, static_argnames="chunk")


def cut_over_pages(
    net: Any, step: Any, cuts: tuple[int, ...], cache: ServedCache = ServedCache.plain
) -> list[list[np.ndarray]]:
    """Logits after each token of the texts, which are read by turns over pages in any order."""
    config, each, draw = net.config, texts(), np.random.default_rng(1)
    order = iter(draw.permutation(np.arange(1, 16)))
    table = np.zeros((3, 4), np.int32)
    for row, length in enumerate(LENGTHS):
        for page in range(-(-length // SIZE)):
            table[row, page] = next(order)
    arrays = page_arrays(net, SIZE, cache)
    # What is not written yet must not be read.
    pages = [
        jax.tree.map(lambda a: a + jnp.asarray(99, a.dtype), arrays.empty(16, jnp.dtype("float32")))
        for _ in range(config.layers)
    ]
    found: list[list[np.ndarray]] = [[], [], []]
    history = max(config.ngrams - 1, 0)
    starts, turn = [0, 0, 0], 0
    while any(start < len(text) for start, text in zip(starts, each, strict=True)):
        # One text reads a chunk while the others read a token, in turn.
        cut = cuts[turn] if turn < len(cuts) else 1
        chunked = turn % 3 if cut > 1 and starts[turn % 3] % SIZE == 0 else None
        plain = [row for row in range(3) if row != chunked]
        tokens, recent, counts, begins, rows = [], [], [], [], []
        for row in [*plain, *([] if chunked is None else [chunked])]:
            width = 1 if row in plain else cut
            part = each[row][starts[row] : starts[row] + width]
            tokens += [*part, *[0] * (width - len(part))]
            for place in range(width):
                before = each[row][: starts[row] + place][-history:] if history else []
                recent.append([*[-1] * (history - len(before)), *before])
            counts.append(len(part))
            begins.append(starts[row] if len(part) else 0)
            rows.append(table[row] if len(part) else np.zeros_like(table[row]))
        reading = Reading(
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(recent, jnp.int32).reshape(len(tokens), history),
            jnp.asarray(begins, jnp.int32),
            jnp.asarray(counts, jnp.int32),
            jnp.asarray(np.stack(rows)),
        )
        logits, pages = step(reading, pages, chunk=(0, 0) if chunked is None else (1, cut))
        for place, row in enumerate(plain):
            found[row] += list(np.asarray(logits)[place : place + counts[place]])
            starts[row] += counts[place]
        if chunked is not None:
            found[chunked] += list(np.asarray(logits)[2 : 2 + counts[-1]])
            starts[chunked] += counts[-1]
        turn += 1
    return found


@pytest.mark.parametrize("cache", [ServedCache.plain, ServedCache.int8])
def test_the_kernel_of_gpus_reads_what_xla_reads(
    cache: ServedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of_gpus()
    monkeypatch.setattr(
        kernel, "paged_attention", functools.partial(kernel.paged_attention, interpret=True)
    )
    draw, (heads, kv_heads, width, size) = np.random.default_rng(0), (6, 2, 16, 8)

    def read_on(platform: str) -> np.ndarray:
        layout = SimpleNamespace(num_devices=1)
        target: Any = SimpleNamespace(
            platform=platform, layout=layout, constrain=lambda array, *_: array
        )
        arrays = PageArrays(target, kv_heads, (width, width), size, cache=cache)
        made = jax.jit(
            lambda query, pages, rows: arrays.read(
                [query], pages, rows, 0, Logits(scale=0.3, cap=5.0)
            )
        )
        return np.asarray(made(query, pages, rows))

    shape = (kv_heads, 10, size, width)
    pages = LayerPages(*(jnp.asarray(draw.normal(size=shape), jnp.float32) for _ in range(2)))
    if cache is ServedCache.int8:
        (key, of_key), (value, of_value) = (coded(part, jnp.float32) for part in pages[:2])
        pages = LayerPages(key, value, (of_key, of_value))
    table = draw.permutation(np.arange(1, 10)).reshape(3, 3)
    # In the first page, at the end of one, and at the very end.
    positions = jnp.asarray([[2], [15], [23]], jnp.int32)
    rows = PageRows(jnp.asarray(table, jnp.int32), positions, jnp.ones(3, jnp.int32))
    query = jnp.asarray(draw.normal(size=(3, 1, heads, width)), jnp.float32)
    np.testing.assert_allclose(read_on("gpu"), read_on("other"), atol=1e-5)


def whole(net: Any) -> np.ndarray:
    """Logits after each token of the texts, each read at once."""
    rows = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, text in zip(rows, texts(), strict=True):
        row[: len(text)] = text

    def logits(net: Any, rows: jax.Array) -> jax.Array:
        return net.logits(net.prefill(rows, jnp.array(LENGTHS), 16, jnp.dtype("float32"))[0])

    return np.asarray(program(net, logits)(jnp.asarray(rows)))
