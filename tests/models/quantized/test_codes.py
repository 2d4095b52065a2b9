"""Quantized matrices: their codes, what they restore to, and their products."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.job import MatrixFormat, WeightFormat
from systolic.models.adapters import inputs_of
from systolic.models.linear import product
from systolic.models.quantized.activations import w8a8
from systolic.models.quantized.codes import (
    FEW_ROWS,
    NF4_VALUES,
    Quantized,
    held_dtype,
    members_apart,
    quantized,
    quantized_product,
    stored_bytes,
)
from tests.models.drawing import normal
from tests.tiers import some

INT8 = MatrixFormat(format=WeightFormat.int8)
INT4 = MatrixFormat(format=WeightFormat.int4, group=2)
FP8 = MatrixFormat(format=WeightFormat.fp8)
NF4 = MatrixFormat(format=WeightFormat.nf4, group=2)


def test_codes_and_scales_by_hand() -> None:
    made = quantized(jnp.array([[1.0, -0.5], [-2.0, 0.25]]), (0,), INT8, jnp.float32)
    assert made.codes.dtype == jnp.int8
    # The range of a code ends half a step behind the largest.
    np.testing.assert_allclose(made.scales, [[2 / 127.5, 0.5 / 127.5]])
    np.testing.assert_allclose(made.codes, [[63.75, -127.5], [-127.5, 63.75]], atol=0.51)


def test_groups_of_inputs_have_their_own_scales() -> None:
    value = jnp.array([[7.5], [1.0], [0.75], [-0.1]])
    made = quantized(value, (0,), INT4, jnp.float32)
    np.testing.assert_allclose(made.scales, [[1.0], [0.1]])
    np.testing.assert_array_equal(np.asarray(made.codes, np.int8), [[7], [1], [7], [-1]])
    np.testing.assert_allclose(made.restored(), [[7.0], [1.0], [0.7], [-0.1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "most"), [(INT8, 0.75 / 127), (INT4, 0.5 / 7), (FP8, 1 / 16), (NF4, 0.16)]
)
def test_what_is_restored_is_within_a_step(how: MatrixFormat, most: float) -> None:
    value = jax.random.normal(jax.random.key(0), (3, 64, 5)).at[1, :, 2].set(0)

    @jax.jit
    def restored(value: jax.Array) -> Any:
        made = quantized(value, (1,), how)
        return made.restored(jnp.float32) - value, made.restored()

    away, narrow = restored(value)
    away = np.abs(away)
    # A scale that bfloat16 makes 0.2 % smaller puts the largest a quarter of a step of int8 behind the last code.
    assert (away <= 1.05 * most * np.abs(value).max(axis=1, keepdims=True)).all()
    assert not np.asarray(narrow)[1, :, 2].any()


PRODUCTS: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("bsd,dhe->bshe", (6, 4, 2), (0,)),
    ("bshe,hed->bsd", (4, 2, 6), (0, 1)),
    ("bshe,hed->bsd", (4, 6, 6), (0, 1)),
    ("bshe,rhe->bshr", (4, 4, 2), (0,)),  # absorbed: what the scales belong to is summed over
    ("becd,edf->becf", (4, 6, 5), (1,)),
]
FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8, "nf4": NF4}


@pytest.mark.parametrize("how", some(FORMATS, ("int8", "int4", "nf4")))
def test_a_product_is_that_of_the_restored_matrix(
    how: MatrixFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products of a format in one program."""
    draw = np.random.default_rng(0)

    def products(given: list[tuple[Any, Any]]) -> list[Any]:
        return [
            ways(spec, x, quantized(matrix, inputs, how), how, monkeypatch)
            for (spec, _, inputs), (x, matrix) in zip(PRODUCTS, given, strict=True)
        ]

    given = []
    for spec, shape, _ in PRODUCTS:
        first, second = spec.split("->")[0].split(",")
        sizes = dict(zip(second, shape, strict=True)) | {"b": 2, "s": 3, "c": 3}
        drawn = [sizes[letter] for letter in first], shape
        given.append(tuple(draw.normal(size=size).astype(np.float32) for size in drawn))
    for (spec, *_), (wanted, made, restored) in zip(
        PRODUCTS, jax.jit(products)(given), strict=True
    ):
        for one in made:
            np.testing.assert_allclose(one, wanted, atol=1e-5, err_msg=spec)
        for one in restored[1:]:
            np.testing.assert_array_equal(one, restored[0], err_msg=spec)


def ways(
    spec: str, x: Any, weights: Quantized, how: MatrixFormat, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[Any], list[Any]]:
    """The product with the restored matrix, that of each way to make it, and the matrix as each way restores it."""
    calls: list[str] = []

    def make(spec: str, *operands: jax.Array) -> jax.Array:
        calls.append(spec)
        return jnp.einsum(spec, *operands)

    wanted = jnp.einsum(spec, x, weights.restored(jnp.float32))
    made = [
        quantized_product(spec, x, weights, make, by_group=by_group) for by_group in (False, True)
    ]
    # In a stack of layers the members of a group have a dim of their own.
    codes = members_apart(weights.codes[None], weights.scales[None])[0]
    apart = Quantized(codes=codes, scales=weights.scales)
    assert apart.shape == weights.shape
    assert apart.apart is weights.grouped
    restored = [weights.restored()]
    for most in (FEW_ROWS, 0):
        monkeypatch.setattr("systolic.models.quantized.codes.FEW_ROWS", most)
        restored.append(apart.restored())
        made.append(quantized_product(spec, x, apart, by_group=True))
    monkeypatch.undo()
    # The scales of an absorbed matrix can't be applied to sums, nor does it have groups of what is summed over.
    by_itself = "rhe" not in spec and (how is INT4 or weights.grouped)
    assert len(calls) == (1 if by_itself else 2)
    return wanted, made, restored


def test_many_rows_are_multiplied_with_the_restored_matrix() -> None:
    weights = quantized(normal(1, (4, 3)), (0,), INT4)
    for rows, whole in ((FEW_ROWS, False), (FEW_ROWS + 1, True)):
        program = jax.make_jaxpr(
            lambda x: quantized_product("bd,df->bf", x, weights, by_group=True)
        )(jnp.ones((rows, 4)))
        products = [one for one in program.eqns if one.primitive.name == "dot_general"]
        assert (len(products[0].outvars[0].aval.shape) == 2) is whole
        dims = [len(one.aval.shape) for one in products[0].invars]
        assert dims == [3, 3]  # groups and members apart


def test_dims_that_products_sum_over() -> None:
    assert inputs_of(("layers", "embed", "heads", "head_dim")) == (1,)
    assert inputs_of(("heads", "head_dim", "embed")) == (0, 1)
    assert inputs_of(("layers", "experts", "expert_embed", "mlp")) == (2,)
    assert inputs_of((None, None, "conv_in", "conv_out")) == (0, 1, 2)


def test_four_bits_lie_two_to_a_byte() -> None:
    assert stored_bytes((3, 5), jnp.int4) == 8
    assert stored_bytes((3, 5), jnp.uint4) == 8
    assert stored_bytes((3, 5), jnp.int8) == 15
    assert stored_bytes((3, 5), jnp.bfloat16) == 30


def test_a_cpu_holds_codes_of_four_bits_in_bytes() -> None:
    for how, dtype in ((INT4, "int8"), (NF4, "uint8")):
        assert held_dtype(how, "cpu") == dtype
        assert held_dtype(how, "tpu") == how.format.dtype
        made = quantized(normal(0, (4, 3)), (0,), how)
        held = Quantized(codes=made.codes.astype(dtype), scales=made.scales)
        np.testing.assert_array_equal(held.restored(), made.restored())
        assert held.scaled_after == made.scaled_after


def test_four_bits_need_groups() -> None:
    with pytest.raises(OptionError, match="group is 0, and int4 has a scale for each group"):
        MatrixFormat(format=WeightFormat.int4)


def test_it_is_read_as_a_parameter_is() -> None:
    made = quantized(jnp.ones((4, 2)), (0,), INT8)
    assert made[...] is made
    assert isinstance(jax.tree.map(lambda a: a[None], made), Quantized)


def served(platform: str = "cpu", serves: bool = True) -> Any:
    return SimpleNamespace(
        platform=platform,
        serves=serves,
        layout=SimpleNamespace(num_devices=1),
        matmul_format=None,
    )


@pytest.mark.parametrize(
    ("spec", "shape", "inputs"),
    [
        ("bsd,dhe->bshe", (64, 4, 8), (0,)),
        ("bshe,hed->bsd", (4, 16, 24), (0, 1)),
        ("bsd,vd->bsv", (96, 64), (1,)),
    ],
)
@pytest.mark.parametrize("rows", some([1, 3], [3]))
def test_a_server_on_a_cpu_multiplies_codes_as_they_are(
    spec: str, shape: tuple[int, ...], inputs: tuple[int, ...], rows: int
) -> None:
    draw = np.random.default_rng(0)
    value = draw.normal(size=shape).astype(np.float32)
    codes = jax.jit(lambda value: quantized(value, inputs, INT8))(value)
    sizes = dict(zip(spec.split(",")[1].partition("->")[0], shape, strict=True))
    given = [{"b": rows, "s": 1}.get(one) or sizes[one] for one in spec.partition(",")[0]]
    x = draw.normal(size=given).astype(np.float32)
    # One input a thousand times larger than the others, as in the first token of a text.
    x[(0,) * x.ndim] = 1000.0
    both = jax.jit(
        lambda x, codes: [product(served(serves=on), spec, x, codes) for on in (False, True)]
    )
    wanted, made = map(np.asarray, both(x, codes))
    # Half a step of 32,384 to each side, of each input's row.
    step = np.abs(np.asarray(x)).max() / 32_384 / 2
    largest = np.abs(np.asarray(codes.restored(jnp.float32))).max()
    away = np.abs(made - wanted).max()
    assert away <= step * largest * np.prod([shape[one] for one in inputs]) + 1e-3
    assert away <= 1e-4 * np.abs(wanted).max()
    # No float of all codes: of int8 and int32 alone is the product made.
    jaxpr = str(jax.make_jaxpr(lambda x, codes: product(served(), spec, x, codes))(x, codes))
    ((line,),) = [[one for one in jaxpr.splitlines() if "dot_general" in one]]
    assert "i32" in line
    assert f"f32{list(shape)}".replace(" ", "") not in jaxpr


def test_one_row_of_rounded_activations_is_multiplied_as_two() -> None:
    value, x = np.random.default_rng(0).normal(size=(64, 8)), np.linspace(-1, 1, 64)[None]
    how = MatrixFormat(format=WeightFormat.w8a8)
    value, x = value.astype(np.float32), x.astype(np.float32)
    made = jax.jit(lambda value: w8a8(value, np.abs(x[0]) + 0.01, (0,), (0,), how))(value)
    both = jax.jit(
        lambda x: [product(served(serves=on), "bd,df->bf", x, made) for on in (False, True)]
    )
    np.testing.assert_array_equal(*both(x))
    jaxpr = str(jax.make_jaxpr(lambda x: product(served(), "bd,df->bf", x, made))(x))
    assert "i8[2,64]" in jaxpr  # XLA's kernel takes two rows at least


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_codes_of_nf4_are_looked_up_without_a_gather(dtype: Any) -> None:
    """TPUs compute a gather of single elements one by one: QLoRA's step took four times as long with it."""
    codes = jnp.arange(16, dtype=jnp.uint8).reshape(4, 4)
    matrix = Quantized(codes=codes, scales=jnp.ones((1, 4), dtype))
    expected = np.asarray(jnp.array(NF4_VALUES, dtype)).reshape(4, 4)
    np.testing.assert_array_equal(np.asarray(matrix.restored()), expected)
    assert "gather" not in str(
        jax.make_jaxpr(lambda codes: replace(matrix, codes=codes).restored())(codes)
    )
