"""A step in bfloat16 on a CPU: its numbers, and that XLA converts neither its weights nor its pages to float32."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.formats.matrices import whole
from systolic.job import WeightFormat
from systolic.models.decoder.config import Decoder
from systolic.models.linear import (
    MatrixParts,
    Turned,
    codes_product,
    integer_product,
    joined_matrices,
    plain_product,
    products,
)
from systolic.models.quantized.codes import Quantized
from systolic.steps.paged import PagedSteps, StepInput, StepShape, paged_target
from systolic.steps.programs import jit_paged
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


@pytest.mark.parametrize("rows", [1, 2, 3, 70])
@pytest.mark.parametrize(
    ("spec", "given", "matrix", "inputs"),
    [
        ("bsd,df->bsf", (8,), (8, 6), 1),
        ("bsd,df->bsf", (8,), (8, 12), 1),
        ("bsd,df->bsf", (8,), (8, 7), 1),
        ("bsd,dhe->bshe", (8,), (8, 2, 4), 1),
        ("bshe,hed->bsd", (2, 4), (2, 4, 6), 2),
    ],
)
def test_products_of_a_turned_matrix_are_those_of_the_matrix(
    spec: str, given, matrix, inputs: int, rows: int
) -> None:
    draw = np.random.default_rng(0)
    target = paged_target(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE)).target)
    x = jnp.asarray(draw.normal(size=(1, rows, *given)), jnp.float32)
    weights = jnp.asarray(draw.normal(size=matrix), jnp.float32)
    codes = jnp.asarray(draw.integers(-127, 128, matrix), jnp.int8)
    whole = jnp.round(x * 20).astype(jnp.int8)
    turned, turned_codes = (Turned.of(array, inputs) for array in (weights, codes))
    assert (turned.shape, turned.ndim) == (matrix, len(matrix))

    def exact(x: jax.Array, weights: jax.Array) -> np.ndarray:
        return np.einsum(spec, *(np.asarray(part, np.float64) for part in (x, weights)))

    # Weights of 16 bits that are held as float32: only the activations and the result are rounded.
    narrow = x.astype(jnp.bfloat16)

    @jax.jit
    def run() -> tuple[jax.Array, ...]:
        return (
            plain_product(target, spec, x, turned),
            plain_product(target, spec, narrow, turned),
            integer_product(target, spec, whole, turned_codes),
            codes_product(target, spec, x, turned_codes),
            codes_product(target, spec, x * np.nan, turned_codes),
        )

    plain, rounded, integers, of_codes, of_nothing = run()
    np.testing.assert_allclose(plain, exact(x, weights), atol=1e-5, rtol=1e-5)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(rounded, np.float64), exact(narrow, weights), atol=1e-2, rtol=2**-8
    )
    np.testing.assert_array_equal(integers, exact(whole, codes))
    assert np.isnan(of_nothing).all()
    np.testing.assert_allclose(of_codes, exact(x, codes), atol=1, rtol=1e-3)


def step_text(paged: PagedSteps, rows: int) -> str:
    """A compiled step of one token a text."""
    shape = StepShape(rows, 0, 0, 2)
    whole = sum(int(np.prod(size)) for size in StepInput.sizes(shape, 0))
    arguments = (
        paged.placed_weights,
        paged.placed_pages(PAGES),
        *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows + 1, whole)),
    )
    return jit_paged(paged, shape).lower(*arguments).compile().as_text()


def matrices_of(paged: PagedSteps) -> list[tuple[int, int]]:
    """Outputs and inputs of the matrices of a layer."""
    arrays = [leaf for leaf in jax.tree.leaves(paged.abstract_weights.layers) if leaf.ndim > 1]
    d, heads = MODEL.d_model, MODEL.heads * MODEL.head_dim
    outputs = [d if leaf.shape[0] == d else leaf.size // d for leaf in arrays]
    assert heads == d
    return [(size, leaf.size // size) for size, leaf in zip(outputs, arrays, strict=True)]


@pytest.mark.parametrize("rows", [TEXTS])
def test_a_step_has_its_matrices_as_left_operands_and_turns_none(rows: int) -> None:
    paged = paged_steps("float32")
    program = step_text(paged, rows)
    products = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", program)
    for outputs, _ in matrices_of(paged):
        assert (str(outputs), str(rows)) in products
        assert (str(rows), str(outputs)) not in products
    turned = {f"f32[{b},{a}]" for a, b in matrices_of(paged) if a != b}
    moved = re.findall(r"= (f32\[[\d,]+\])\S* (?:copy|transpose)\(", program)
    assert not turned & set(moved)


def test_weights_of_16_bits_are_held_as_float32_and_pages_are_not() -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=MODEL), dtype="bfloat16")
    paged = PagedSteps(steps, SIZE, wide=True)
    logits, program = texts_read(paged, TEXTS)
    matrices = [a for a in jax.tree.leaves(paged.abstract_weights) if a.ndim > 1]
    assert {a.dtype.name for a in matrices} == {"float32"}
    pages = jax.eval_shape(lambda: paged.empty_pages(1))
    assert {a.dtype.name for a in jax.tree.leaves(pages)} == {"uint16"}
    assert "bf16[512,192]" not in program
    np.testing.assert_allclose(logits, exact(), atol=0.05 * np.abs(exact()).max())


@pytest.mark.parametrize(("rows", "joined"), [(1, 4), (2, 2), (3, 1)])
def test_few_rows_read_outputs_of_int8_together(rows: int, joined: int) -> None:
    """The kernel takes 4 rows at the price of one, and a row of the matrix costs more than its inputs: 4 x 1 and 2 x 2 rows are a product of 4."""
    target = paged_target(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE)).target)
    codes = jax.ShapeDtypeStruct((320, 192), jnp.int8)
    x = jax.ShapeDtypeStruct((rows, 1, 192), jnp.int8)

    def run(x: jax.Array, codes: jax.Array) -> jax.Array:
        return integer_product(target, "bsd,df->bsf", x, Turned(rows=codes, inputs=1))

    program = jax.jit(run).lower(x, codes).compile().as_text()
    products = re.findall(r"= s32\[([\d,]+)\]\S* dot\(", program)
    assert products == [f"{320 // joined},4" if joined > 1 else f"{rows},320"]


@pytest.mark.parametrize("kind", [WeightFormat.int8, WeightFormat.w8a8])
def test_a_step_of_int8_has_all_codes_as_left_operands(kind: WeightFormat) -> None:
    """One text is two rows of digits, or with W8A8 one row but for the vocabulary: codes of 2 or 4 outputs in one row. W8A8 has activations for each group of outputs."""
    model = replace(MODEL, tie_embeddings=False)
    job = replace(tiny.job(layout=tiny.ONE_DEVICE, model=model), quantization=whole(model, kind))
    paged = PagedSteps(tiny.steps(job), SIZE)
    program = step_text(paged, 1)
    products = re.findall(r"= s32\[(\d+),4\]\S* dot\(", program)
    joined = 4 if kind is WeightFormat.w8a8 else 2
    layer = [size // joined for size in (192, 192)]
    groups = [f"5,{64 // 4}", f"2,{320 // 4}"] if joined == 4 else []
    layer += [] if joined == 4 else [320 // joined, 640 // joined]
    assert sorted(map(int, products)) == sorted([*layer, 512 // 2])
    assert sorted(re.findall(r"= s32\[(\d+,\d+),4\]\S* dot\(", program)) == sorted(groups)
    assert not re.findall(r"= s8\[\d{3,},\d{3,}\]\S* (?:copy|transpose)\(", program)


@pytest.mark.parametrize("size", [448, 512, 1024])
def test_a_row_of_a_small_matrix_is_multiplied_by_its_halves(size: int) -> None:
    """XLA's CPU compiler gives such a product to one core."""
    target = paged_target(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE)).target)
    x, rows = (jax.random.normal(jax.random.key(n), (n, size)) for n in (1, size))

    def run(x: jax.Array, rows: jax.Array) -> jax.Array:
        return plain_product(target, "bd,df->bf", x, Turned(rows=rows, inputs=1))

    program = jax.jit(run).lower(x, rows).compile()
    shape = f"2,{size // 2},1" if size < 1024 else f"{size},1"
    assert f"= f32[{shape}]" in program.as_text().replace("{", " {")
    np.testing.assert_allclose(program(x, rows), x @ rows.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("inputs", [8, 800])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("outputs", [(3, 2, 1), (8, 4, 4)])
def test_products_of_joined_codes_with_factors_of_their_own(
    outputs: tuple[int, ...], rows: int, inputs: int
) -> None:
    draw = np.random.default_rng(0)
    target = paged_target(tiny.steps(tiny.job(layout=tiny.ONE_DEVICE)).target)
    x = jnp.asarray(draw.normal(size=(1, rows, inputs)), jnp.float32)

    def drawn(count: int) -> Quantized:
        codes = jnp.asarray(draw.integers(-127, 128, (inputs, count)), jnp.int8)
        scales, factors = (
            jnp.asarray(draw.uniform(0.5, 2, size), jnp.bfloat16)
            for size in ((1, count), (inputs, 1))
        )
        return Quantized(codes=Turned.of(codes, 1), scales=scales, inputs=factors)

    apart = [drawn(count) for count in outputs]
    parts = joined_matrices([MatrixParts(each.codes, each.scales, each.inputs) for each in apart])
    assert parts is not None
    joined = Quantized(codes=parts.rows, scales=parts.scales, inputs=parts.inputs)
    run = jax.jit(lambda x, matrices: list(products(target, "bsd,df->bsf", x, matrices)))
    wanted, found = run(x, apart), run(x, [joined])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


JOINING = replace(
    MODEL, qkv_bias=True, qk_norm=True, mlp_bias=True, out_bias=True, tie_embeddings=False
)


@pytest.mark.parametrize(
    ("kind", "layers"), [(None, 2), (WeightFormat.int8, 1), (WeightFormat.w8a8, 1)]
)
def test_joined_matrices_have_the_logits_of_the_model(
    kind: WeightFormat | None, layers: int
) -> None:
    """With biases and norms of heads."""
    model = replace(JOINING, layers=layers)
    job = tiny.job(layout=tiny.ONE_DEVICE, model=model)
    if kind is not None:
        job = replace(job, quantization=whole(model, kind))
    steps = tiny.steps(job)
    draw = np.random.default_rng(0)

    def drawn(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        if like.dtype == jnp.int8:
            made = draw.integers(-127, 128, like.shape)
        elif path.endswith(("/scales", "/inputs")):
            made = draw.uniform(0.5, 1.5, like.shape) / 1000
        else:
            made = draw.normal(size=like.shape) / 10
        return jnp.asarray(made.astype(like.dtype))

    params, rest = (
        {path: drawn(path, like) for path, like in group.items()} for group in steps.network.shapes
    )
    paged = PagedSteps(steps, SIZE)
    weights = jax.jit(paged.weights)(params, rest)
    turned = [
        leaf
        for leaf in jax.tree.leaves(weights.layers, is_leaf=lambda leaf: isinstance(leaf, Turned))
        if isinstance(leaf, Turned)
    ]
    assert len(turned) == layers * 4
    shape = StepShape(TEXTS, 0, 0, 1)
    tokens = np.array([5, 300, 41])
    packed = np.concatenate(
        [tokens, np.full(TEXTS, -1), np.zeros(TEXTS), np.ones(TEXTS), 1 + np.arange(TEXTS)]
    )
    latest = jnp.zeros((TEXTS + 1,), jnp.int32)

    @jax.jit
    def read(weights, packed):
        step_input = StepInput.unpacked(packed, shape, 0)
        return paged.read(weights, paged.empty_pages(TEXTS + 1), latest, step_input, (0, 0))[0]

    @jax.jit
    def whole_text(params, rest, tokens):
        zeros = jnp.zeros((TEXTS, 1), jnp.int32)
        return steps.network.module(params, rest, train=False)(tokens, zeros, zeros)[:, 0]

    logits = read(weights, jnp.asarray(packed, jnp.int32))
    wanted = whole_text(params, rest, tokens[:, None])
    np.testing.assert_allclose(logits, wanted, atol=2e-3 * float(jnp.abs(wanted).max()))
