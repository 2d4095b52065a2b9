"""A step in bfloat16 on a CPU: its numbers, and that XLA converts neither its weights nor its pages to float32."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.models.decoder.config import Decoder
from systolic.models.linear import plain_product
from systolic.steps.paged import PagedSteps, StepInput, StepShape, paged_target
from tests.steps import tiny

pytestmark = pytest.mark.own_programs

PAGES, SIZE, TEXTS = 37, 4, 3
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Of the program that draws weights: optimized, it takes seconds to compile. The step is compiled as users do."""
# XLA multiplies smaller matrices in loops of its own, with converts inside.
MODEL = Decoder(
    layers=1,
    d_model=192,
    d_ff=320,
    heads=6,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    tie_embeddings=True,
)


def paged_steps(dtype: str) -> PagedSteps:
    return PagedSteps(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=MODEL), dtype=dtype), SIZE)


def texts_read(paged: PagedSteps, rows: int) -> tuple[np.ndarray, str]:
    """Logits after five tokens of each of the first ``rows`` texts, read one by one, and the compiled step."""
    shape = StepShape(rows, 0, 0, 2)
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, paged.vocab, (5, TEXTS)).astype(np.int32)[:, :rows]
    table = draw.permutation(np.arange(1, PAGES))[: rows * 2].astype(np.int32)
    first = jax.jit(lambda key: paged.weights(*paged.steps.network.init(key)))
    weights = first.lower(jax.random.key(0)).compile(QUICKLY)(jax.random.key(0))
    pages, latest = paged.empty_pages(PAGES), jnp.zeros((rows + 1,), jnp.int32)

    def asked(turn: int) -> np.ndarray:
        whole = (tokens[turn], np.full(rows, -1), np.full(rows, turn), np.ones(rows), table)
        return np.concatenate([part.astype(np.int32) for part in whole])

    def step(weights, pages, latest, packed):
        return paged.read(weights, pages, latest, StepInput.unpacked(packed, shape, 0), (0, 0))

    program = jax.jit(step, donate_argnums=1).lower(weights, pages, latest, asked(0)).compile()
    logits = None
    for turn in range(5):
        logits, pages = program(weights, pages, latest, asked(turn))
    return np.asarray(logits), program.as_text()


@cache
def exact() -> np.ndarray:
    """Logits in float32."""
    return texts_read(paged_steps("float32"), TEXTS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, TEXTS])
def test_a_step_in_bfloat16_has_the_logits_of_float32_and_converts_no_weights_and_no_pages(
    rows: int,
) -> None:
    paged = paged_steps("bfloat16")
    found, program = texts_read(paged, rows)
    np.testing.assert_allclose(found, exact()[:rows], atol=0.05 * np.abs(exact()).max())
    assert f"f32[{paged.arrays.kv_heads},{PAGES}," not in program
    sizes = {
        weight.shape for weight in jax.tree.leaves(paged.abstract_weights) if len(weight.shape) >= 2
    }
    # What a fusion converts inside is not stored.
    stored = re.findall(r"= f32\[([\d,]+)\]", program.split("ENTRY")[1])
    assert not sizes & {tuple(map(int, shape.split(","))) for shape in stored}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spec", "given", "matrix"),
    [
        ("bsd,df->bsf", (2, 3, 8), (8, 6)),
        ("bsd,df->bsf", (1, 1, 8), (8, 6)),
        ("bsd,dhe->bshe", (2, 3, 8), (8, 2, 4)),
        ("bshe,hed->bsd", (2, 3, 2, 4), (2, 4, 6)),
        ("bsd,vd->bsv", (1, 1, 8), (6, 8)),
        ("bshe,rhe->bshr", (2, 3, 2, 4), (5, 2, 4)),
        ("bsd,df->bsf", (2, 600, 8), (8, 6)),
    ],
)
def test_a_plain_product_is_the_einsum(spec: str, given, matrix, dtype: str) -> None:
    draw = np.random.default_rng(0)
    x, weights = (jnp.asarray(draw.normal(size=size), dtype) for size in (given, matrix))
    target = paged_target(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE)).target)
    found = plain_product(target, spec, x, weights)
    wanted = np.einsum(spec, *(np.asarray(part, np.float32) for part in (x, weights)))
    assert found.dtype == x.dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(found, np.float32), wanted, atol=tolerance, rtol=tolerance
    )
