"""A cache in pages: any cut of a text into chunks, over pages in any order, has the logits of the whole text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.paged import Pages, Reading, empty_pages, read
from systolic.models.decoder.switches import Latent
from tests.models.test_decoder import module
from tests.steps import tiny

LATENT = Latent(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
BASE = replace(tiny.MODEL, layers=3)
CONFIGS = {
    "grouped": BASE,
    "one query a head": replace(BASE, kv_heads=BASE.heads),
    "windows": replace(BASE, window=3, global_every=2),
    "sinks and caps": replace(BASE, sinks=True, attention_cap=5.0),
    "latents": replace(BASE, kv_heads=BASE.heads, latent=LATENT),
    "mixture": replace(BASE, experts=4, dense_layers=1, dispatch=Dispatch.dropless),
    "n-grams": replace(BASE, ngrams=3, ngram_rows=64, ngram_dim=8),
}
SIZE = 4
"""Positions of a page."""
LENGTHS = (13, 7, 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("cuts", [(5, 4, 4), (1,) * 13, (13,)], ids=["chunks", "tokens", "whole"])
def test_chunks_over_pages_have_the_logits_of_the_whole(
    config: Decoder, cuts: tuple[int, ...]
) -> None:
    net = module(config)
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 64, length) for length in LENGTHS]
    order = iter(draw.permutation(np.arange(1, 16)))
    table = np.full((3, 4), 1, np.int32)
    for row, length in enumerate(LENGTHS):
        for page in range(-(-length // SIZE)):
            table[row, page] = next(order)
    # What is not written yet must not be read.
    pages = Pages(*(part + 1e3 for part in empty_pages(net, 16, SIZE, jnp.dtype("float32"))))
    step = jax.jit(lambda reading, pages: read(net, reading, pages))
    found: list[list[np.ndarray]] = [[], [], []]
    history = max(config.ngrams - 1, 0)
    start = 0
    for cut in cuts:
        tokens = np.zeros((3, cut), np.int32)
        recent = np.full((3, history), -1, np.int32)
        count = np.zeros(3, np.int32)
        for row, text in enumerate(texts):
            part = text[start : start + cut]
            tokens[row, : len(part)], count[row] = part, len(part)
            before = text[:start][-history:] if history else text[:0]
            recent[row, history - len(before) :] = before
        reading = Reading(tokens, recent, np.full(3, start, np.int32), count, table)
        hidden, pages = step(jax.tree.map(jnp.asarray, reading), pages)
        for row in range(3):
            found[row] += list(np.asarray(net.logits(hidden))[row, : count[row]])
        start += cut
    for text, made in zip(texts, found, strict=True):
        row = jnp.asarray(text[None], jnp.int32)
        length = jnp.array([len(text)])
        whole = jax.jit(
            lambda row, length: net.logits(net.prefill(row, length, 16, jnp.dtype("float32"))[0])
        )(row, length)[0]
        np.testing.assert_allclose(np.stack(made), np.asarray(whole), atol=2e-5, rtol=2e-4)
