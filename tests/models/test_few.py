"""Experts of few tokens: the kernel has the results of grouped products, reads chosen experts alone, and a step copies none."""

import functools
import gzip
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.chips import slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, PagedProgram
from systolic.forecasting import Forecast, forecast_program
from systolic.forecasting.serving.capacity import floor_seconds
from systolic.job import Layout
from systolic.models.decoder import few
from systolic.models.decoder.config import Dispatch, Mlp
from systolic.models.decoder.few import HALVES, FewSizes, few_product, visits
from systolic.models.decoder.moe import _grouped
from systolic.models.quantized.codes import quantized
from systolic.models.quantized.placement import INT8
from systolic.recipes.jobs import source_of
from systolic.sim.grouped import pace_of
from tests.tiers import some

EXPERTS, WIDTH, UNITS, CHOSEN = 6, 48, 40, 2


@functools.partial(jax.jit, static_argnums=(0, 1))
def given(tokens: int, seed: int = 0) -> tuple[Any, ...]:
    """Tokens, choices, weights, matrices and biases."""
    keys = jax.random.split(jax.random.key(seed), 8)
    x = jax.random.normal(keys[0], (tokens, WIDTH))
    weights, chosen = jax.lax.top_k(jax.random.uniform(keys[1], (tokens, EXPERTS)), CHOSEN)
    shapes = [(EXPERTS, WIDTH, UNITS), (EXPERTS, WIDTH, UNITS), (EXPERTS, UNITS, WIDTH)]
    matrices = [jax.random.normal(k, s) / 6 for k, s in zip(keys[2:5], shapes, strict=True)]
    biases = tuple(jax.random.normal(key, (EXPERTS, UNITS)) for key in keys[5:7])
    return x, chosen, weights, tuple(matrices), biases


TARGET: Any = SimpleNamespace(platform="cpu", layout=Layout(fsdp=1), serves=True, dtype="float32")
"""Of one device; grouped products run as on a CPU."""


@pytest.mark.parametrize("tokens", some([1, 21], [21]))
@pytest.mark.parametrize(
    "kind",
    some(["plain", "biased", "int8", "tiles", "others"], ("biased", "int8", "tiles", "others")),
)
def test_the_kernel_has_the_results_of_grouped_products(
    tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, chosen, weights, matrices, biases = given(tokens)
    mlp, biases = (Mlp.swiglu_clamped, biases) if kind == "biased" else (Mlp.swiglu, ())
    if kind == "int8":
        matrices = tuple(quantized(matrix, (1,), INT8, jnp.float32) for matrix in matrices)
    if kind == "others":
        # A token of padding chooses none, other devices have the rest.
        chosen = (chosen - 3).at[-1].set(-1)
    if kind == "tiles":
        monkeypatch.setattr(few, "LEAST_TILE", 8)
        monkeypatch.setattr(few, "VMEM_BYTES", 60_000)
        assert few.sizes_of(tokens, "float32", matrices).tile == 8

    @jax.jit
    def both(x: Any, chosen: Any, weights: Any, matrices: Any) -> Any:
        grouped = (chosen[:, None], weights[:, None])
        wanted = _grouped(TARGET, mlp, x[:, None], grouped, matrices, biases)
        routing = (chosen, weights)
        found = few_product(TARGET, mlp, x, routing, matrices, biases=biases, interpret=True)
        return found, wanted[:, 0]

    np.testing.assert_allclose(*both(x, chosen, weights, matrices), atol=2e-5)


def test_an_overflow_is_that_of_the_tokens_that_chose_the_expert() -> None:
    x, _, weights, matrices, _ = given(4)
    chosen = jnp.array([[0, 1], [0, 2], [3, 4], [4, 5]])
    matrices = (matrices[0].at[0].set(jnp.inf), *matrices[1:])
    found = jax.jit(lambda *given: few_product(TARGET, Mlp.swiglu, *given, interpret=True))(
        x, (chosen, weights), matrices
    )
    assert list(np.isfinite(found).all(1)) == [False, False, True, True]


def test_places_of_a_grid_are_the_chosen_experts_and_fetch_none_twice() -> None:
    active = jnp.array([False, True, True, False, False, True, True, True])
    count, experts = visits(active)
    assert int(count[0]) == 5
    # Two halves take every second one; the second's third place is what it has already.
    assert list(experts[:6]) == [1, 2, 5, 6, 7, 6]
    assert experts.shape == (8 + HALVES,)
    assert int(visits(jnp.zeros(8, bool))[0][0]) == 0


@pytest.mark.parametrize(
    ("tokens", "d_model", "d_ff", "tile"),
    [
        (16, 2048, 192, 192),  # Qwen3 30B over four devices
        (16, 2880, 360, 120),  # gpt-oss 120B over eight
        (16, 4096, 1792, 224),  # Mixtral 8x7B over eight
        (256, 7168, 256, None),  # DeepSeek-V3: tokens and their sums alone are 17.5 MiB
    ],
)
def test_tiles_fit_beside_the_tokens(
    tokens: int, d_model: int, d_ff: int, tile: int | None
) -> None:
    sizes = FewSizes(
        tokens=tokens, d_model=d_model, d_ff=d_ff, experts=128, item_bytes=2, activation_bytes=2
    )
    assert sizes.tile == tile


def step(
    model: str, on: str, tensor: int, *, rows: int = 16, chunk: int = 0, **sizes: Any
) -> Forecast:
    """A step of two layers of a published model, all engines of a slice; ``sizes`` are other fields of the model."""
    target = slice(on)
    job = source_of(model, {"layout": Layout(data=-1, fsdp=1, tensor=tensor)}).job
    job = replace(job, model=replace(job.model, layers=2, **sizes))
    texts = {"rows": 0, "chunk": chunk} if chunk else {"rows": rows}
    program = PagedProgram(job=job, pages=4, num_pages=4 * (rows or 1) + 1, page_size=64, **texts)
    compiler = Compiler(flags=resolved("", target.chip)).quick()
    return forecast_program(program, job.name, target, compiler=compiler)


def copied_bytes(made: Forecast) -> int:
    """Largest array that an op of its own copies."""
    assert made.answer is not None
    text = gzip.decompress((made.answer.folder / "module.hlo.gz").read_bytes()).decode()
    sizes = [
        2 * int(np.prod([int(size) for size in found[1].split(",")]))
        for found in re.finditer(r" = bf16\[([\d,]+)\]\S* copy\(", text)
    ]
    return max(sizes, default=0)


CASES = [
    ("qwen3-30b-a3b", "v6e-8", 4),
    pytest.param("qwen3-30b-a3b", "v5e-8", 8, marks=pytest.mark.slow),
    pytest.param("qwen3-235b-a22b", "v5p-16", 8, marks=pytest.mark.slow),
    pytest.param("mixtral-8x7b", "v6e-8", 8, marks=pytest.mark.slow),
    pytest.param("gpt-oss-20b", "v6e-4", 4, marks=pytest.mark.slow),
    pytest.param("gpt-oss-120b", "v5e-16", 8, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "on", "tensor"), CASES)
def test_a_step_copies_no_matrix_and_is_near_its_floor(model: str, on: str, tensor: int) -> None:
    """Experts in another order than their kernel's were copied in every step, which took most of it."""
    pytest.importorskip("libtpu")
    made = step(model, on, tensor)
    floor = floor_seconds(made)
    assert made.step_seconds is not None
    assert floor is not None
    assert floor < made.step_seconds < 2.2 * floor
    assert copied_bytes(made) < 8 << 20
    assert any("are read" in note for note in made.notes)


@pytest.mark.slow
def test_tokens_of_a_mixture_with_slots_have_one_each_and_read_their_experts_alone() -> None:
    """As 128 experts of one slot each, every token was multiplied with all of them."""
    pytest.importorskip("libtpu")
    made = step("qwen3-30b-a3b", "v6e-8", 4, dispatch=Dispatch.slots)
    dropless = step("qwen3-30b-a3b", "v6e-8", 4)
    assert made.step_seconds == pytest.approx(dropless.step_seconds, rel=0.02)
    assert made.hardware_flops == pytest.approx(dropless.hardware_flops, rel=0.02)


def test_the_kernel_takes_the_steps_of_the_chosen_experts() -> None:
    """v6e by hand: 82 of 128 experts, each one step of three matrices of 2,048 x 192 in bf16."""
    pytest.importorskip("libtpu")
    made = step("qwen3-30b-a3b", "v6e-8", 4)
    assert made.timeline is not None
    kernels = [span for span, _ in made.timeline.leaves() if "few_experts" in span.name]
    assert len(kernels) == 2
    read = round(128 * (1 - (1 - 8 / 128) ** 16))
    pace = pace_of("v6e")
    each = 3 * 2048 * 192 * 2 / (pace.share * 1638e9) + pace.wait_seconds
    assert kernels[0].seconds == pytest.approx((read + 1) * each, rel=0.01)
    assert kernels[0].seconds > read * 3 * 2048 * 192 * 2 / 1638e9


@pytest.mark.slow
def test_a_chunk_of_more_tokens_copies_no_matrix() -> None:
    """Grouped products of 512 tokens take the matrices in the order that they lie in."""
    pytest.importorskip("libtpu")
    made = step("qwen3-30b-a3b", "v6e-8", 4, chunk=512)
    assert copied_bytes(made) < 8 << 20
    assert made.answer is not None
    assert "few_experts" not in made.answer.hlo
