"""Pages as TPUs read them have the results of pages that XLA reads; in place of the kernel runs its module's own reference."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernel

from systolic.job import Layout, ServedCache
from systolic.models.attention import Logits
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import Latent
from systolic.models.decoder.page_arrays import DraftRows, PageArrays, PageRows
from systolic.models.decoder.paged import HeadRows, RaggedArrays, page_arrays
from systolic.steps.target import MeshTarget, make_mesh
from tests.steps import tiny

BASE = tiny.MODEL
CONFIGS = {
    "heads side by side": BASE,
    "three heads, filled up": replace(BASE, heads=6, kv_heads=3, head_dim=40),
    "wide heads": replace(BASE, head_dim=256, kv_heads=1),
}
KINDS = {"cpu": PageArrays, "tpu": RaggedArrays}
SIZE, ROWS, CHUNK, PAGES = 4, 3, 8, 4


def target(platform: str) -> MeshTarget:
    layout = Layout().on(1)
    mesh = make_mesh(layout, jax.devices()[:1])
    return MeshTarget(platform=platform, layout=layout, dtype="float32", mesh=mesh)


def arrays_of(config: Decoder, platform: str, cache: ServedCache = ServedCache.plain) -> Any:
    """What :func:`page_arrays` chooses for a model's sizes, and its target."""
    made: Any = SimpleNamespace(config=config, target=target(platform))
    return page_arrays(made, SIZE, cache), made.target


def reference(query: jax.Array, pages: jax.Array, *given: jax.Array, **settings: Any) -> jax.Array:
    """The kernel by its module's reference, which takes lengths as numbers; op by op each would be compiled."""
    settings.pop("num_kv_pages_per_block")
    settings.pop("num_queries_per_block")
    lengths = [np.asarray(one) for one in given]
    program = jax.jit(
        lambda query, pages: kernel.ref_ragged_paged_attention(query, pages, *lengths, **settings)
    )
    return program(query, pages)


@pytest.mark.parametrize(
    ("name", "window", "cache"),
    [
        ("wide heads", 3, ServedCache.plain),
        ("heads side by side", 0, ServedCache.int8),
        pytest.param("heads side by side", 0, ServedCache.plain, marks=pytest.mark.slow),
        pytest.param("heads side by side", 3, ServedCache.plain, marks=pytest.mark.slow),
        pytest.param("three heads, filled up", 0, ServedCache.plain, marks=pytest.mark.slow),
        pytest.param("three heads, filled up", 3, ServedCache.plain, marks=pytest.mark.slow),
        pytest.param("wide heads", 0, ServedCache.plain, marks=pytest.mark.slow),
        pytest.param("wide heads", 3, ServedCache.int8, marks=pytest.mark.slow),
        pytest.param("three heads, filled up", 0, ServedCache.int8, marks=pytest.mark.slow),
        pytest.param("three heads, filled up", 3, ServedCache.fp8, marks=pytest.mark.slow),
    ],
)
def test_ragged_pages_have_the_results_of_xla(
    name: str, window: int, cache: ServedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS[name]
    monkeypatch.setattr(kernel, "ragged_paged_attention", reference)
    # On one device the whole is the part; the reference needs the lengths as numbers, so nothing is traced.
    monkeypatch.setattr(jax, "shard_map", lambda function, **_: function)
    draw = np.random.default_rng(0)
    pages = {on: arrays_of(config, on, cache)[0].empty(17, jnp.dtype("float32")) for on in KINDS}
    table = draw.permutation(np.arange(1, 17)).reshape(4, PAGES)
    logits = Logits(scale=0.3, cap=2.0)
    sizes = (config.heads, config.kv_heads, config.kv_heads)
    # Three texts read a token while a fourth reads its prompt in two chunks, the second padded; one row is padding.
    for starts, count in (((0, 0, 0, 0), 8), ((6, 9, 0, 8), 5)):
        query, key, value = (
            jnp.asarray(draw.normal(size=(ROWS + CHUNK, heads, config.head_dim)), jnp.float32)
            for heads in sizes
        )
        counts = np.array([1, 1, 0, count], np.int32)
        begin = np.asarray(starts, np.int32)
        place = np.where(counts[:, None] > 0, table, 0).astype(np.int32)
        parts = (begin[:ROWS, None], begin[ROWS:, None] + np.arange(CHUNK))
        groups = [
            PageRows(jnp.asarray(place[some]), jnp.asarray(part), jnp.asarray(counts[some]))
            for some, part in zip((slice(ROWS), slice(ROWS, None)), parts, strict=True)
        ]
        found = {}
        for on, kind in KINDS.items():
            arrays, _ = arrays_of(config, on, cache)
            assert isinstance(arrays, kind)
            asked = ((query,), (key, value))
            attend = partial(arrays.attend, window=window, logits=logits)
            attend = jax.jit(attend) if on == "cpu" else attend
            pages[on], made = attend(pages[on], groups, asked)
            found[on] = np.asarray(made)
        real = [0, 1, *range(ROWS, ROWS + count)]
        padding = [2, *range(ROWS + count, ROWS + CHUNK)]
        np.testing.assert_allclose(found["tpu"][real], found["cpu"][real], atol=2e-6, rtol=2e-5)
        np.testing.assert_array_equal(found["tpu"][padding], 0)
    # Proposals begin within a page, and pass into the next.
    query, key, value = (
        jnp.asarray(draw.normal(size=(10, heads, config.head_dim)), jnp.float32) for heads in sizes
    )
    positions = jnp.asarray([[7], [9]]) + jnp.arange(5)
    drafts = DraftRows(jnp.asarray(table[[0, 3]], jnp.int32), positions, jnp.asarray([5, 3]))
    found = {}
    for on in KINDS:
        attend = partial(arrays_of(config, on, cache)[0].attend, window=window, logits=logits)
        attend = jax.jit(attend) if on == "cpu" else attend
        pages[on], made = attend(pages[on], [drafts], ((query,), (key, value)))
        found[on] = np.asarray(made)
    np.testing.assert_allclose(found["tpu"][:8], found["cpu"][:8], atol=2e-6, rtol=2e-5)
    np.testing.assert_array_equal(found["tpu"][8:], 0)


@pytest.mark.parametrize("cache", [ServedCache.int8, ServedCache.fp8])
def test_pages_in_8_bits_are_those_of_rounded_keys_and_values(cache: ServedCache) -> None:
    """Among them values beyond the largest of float8, which become it."""

    def rounded(new: jax.Array) -> jax.Array:
        if cache is ServedCache.fp8:
            wide = jnp.clip(new, -448, 448).astype(jnp.float8_e4m3fn)
            return wide.astype(jnp.float32)
        scales = jnp.abs(new).max(-1, keepdims=True) / 127
        return jnp.round(new / scales) * scales

    draw = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(draw.normal(size=(CHUNK, heads, BASE.head_dim)), jnp.float32)
        for heads in (BASE.heads, BASE.kv_heads, BASE.kv_heads)
    )
    value = value.at[3, 0, 1].set(600.0)
    positions = jnp.arange(CHUNK)[None]
    rows = PageRows(jnp.asarray([[3, 1]], jnp.int32), positions, jnp.asarray([CHUNK]))
    found = []
    for kept, new in ((cache, (key, value)), (ServedCache.plain, (rounded(key), rounded(value)))):
        arrays, _ = arrays_of(BASE, "cpu", kept)
        pages = arrays.empty(4, jnp.dtype("float32"))

        @jax.jit
        def attend(*given: Any, arrays: Any = arrays) -> Any:
            return arrays.attend(*given, 0, Logits(scale=0.3))[1]

        found.append(attend(pages, [rows], ((query,), new)))
    np.testing.assert_allclose(*found, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "packing", "stored"),
    [
        (32, 8, 64, 2, (4, 128)),
        (32, 8, 128, 2, (8, 128)),
        (9, 3, 64, 2, (2, 128)),
        (8, 1, 256, 2, (1, 256)),
        (4, 1, 64, 2, (1, 128)),
        (12, 6, 80, 2, (8, 128)),
        (20, 5, 128, 1, (8, 128)),
    ],
)
def test_rows_are_whole_registers(
    heads: int, kv_heads: int, head_dim: int, packing: int, stored: tuple[int, int]
) -> None:
    lying = HeadRows(heads=heads, kv_heads=kv_heads, head_dim=head_dim, packing=packing)
    assert (lying.rows, lying.width) == stored
    query = jnp.arange(2.0 * heads * head_dim).reshape(2, heads, head_dim)
    again = jax.jit(lambda query: lying.answer(lying.ask(query)))(query)
    np.testing.assert_array_equal(again, query)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {
                "kv_heads": 4,
                "latent": Latent(
                    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
                ),
            },
            "latents",
        ),
        ({"sinks": True}, "sinks"),
    ],
)
def test_a_model_that_the_kernel_does_not_take_says_why(
    changes: dict[str, Any], reason: str
) -> None:
    arrays, on = arrays_of(replace(BASE, **changes), "tpu")
    assert isinstance(arrays, PageArrays)
    assert any(reason in note and "XLA" in note for note in on.notes)
    assert arrays.kernel.startswith("XLA: ")
    assert reason in arrays.kernel
