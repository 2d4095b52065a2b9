"""Grouped matmuls by the Pallas kernels: values and gradients of the dense product, under any sizes of groups."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import systolic
from systolic.job import Layout
from systolic.models.grouped import (
    VMEM_BYTES,
    GroupedProduct,
    _vmem,
    grouped_product,
    pallas_product,
    tiles_of,
)
from systolic.steps.target import MeshTarget
from tests.models.drawing import normal

GROUPS = {
    "even": (64, 64, 64, 64),
    "uneven": (3, 130, 100, 23),
    "empty": (0, 200, 0, 56),
    "none at the end": (70, 0, 40, 0),
    "no row": (0, 0, 0, 0),
}


def dense(x: Any, matrices: Any, sizes: Any) -> jax.Array:
    """Every row times every matrix, then that of its group; zero for rows of none."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(x.shape[0])[:, None]
    share = (rows < ends) & (rows >= ends - sizes)
    every = jnp.einsum("rd,gdc->rgc", x, matrices, precision="highest")
    return jnp.where(share[:, :, None], every, 0).sum(1)


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
def test_values_and_gradients_are_those_of_the_dense_product(sizes: tuple[int, ...]) -> None:
    """No dim is a multiple of a tile's; groups begin inside tiles."""
    rows, depth, columns = 300, 160, 130
    x = normal(0, (rows, depth))
    matrices = normal(1, (4, depth, columns)) / depth**0.5
    weigh = normal(2, (rows, columns))
    real = (jnp.arange(rows) < sum(sizes))[:, None]
    # Whatever lies behind the last group must not reach a gradient.
    dirty = jnp.where(real, x, jnp.nan)
    groups = jnp.array(sizes, jnp.int32)

    def kernel(x: Any, matrices: Any) -> Any:
        out = pallas_product(x, matrices, groups, sum(sizes), interpret=True)
        return (jnp.where(real, out, 0) * weigh).sum(), out

    def wanted(x: Any, matrices: Any) -> Any:
        return (dense(x, matrices, groups) * weigh).sum(), dense(x, matrices, groups)

    (_, out), (to_x, to_matrices) = jax.value_and_grad(kernel, (0, 1), has_aux=True)(
        dirty, matrices
    )
    (_, known), gradients = jax.value_and_grad(wanted, (0, 1), has_aux=True)(x, matrices)
    np.testing.assert_allclose(jnp.where(real, out, 0), known, atol=1e-5)
    np.testing.assert_allclose(jnp.where(real, to_x, 0), gradients[0], atol=1e-5)
    np.testing.assert_allclose(to_matrices, gradients[1], atol=1e-4)


@pytest.mark.slow
def test_gradients_on_a_tpu_take_the_flops_of_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense product of every row for each of 16 groups takes 16 times as many."""
    pytest.importorskip("libtpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layout = Layout(fsdp=1)
    mesh = jax.sharding.AbstractMesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    target = MeshTarget(platform="tpu", layout=layout, dtype="bfloat16", mesh=mesh)

    def gradients(x: Any, matrices: Any, sizes: Any, to: Any) -> Any:
        _, back = jax.vjp(lambda x, w: grouped_product(target, x, w, sizes, 2048), x, matrices)
        return back(to)

    of = jax.ShapeDtypeStruct
    x, matrices = of((2048, 512), jnp.bfloat16), of((16, 512, 384), jnp.bfloat16)
    to = of((2048, 384), jnp.bfloat16)
    made = systolic.forecast(
        gradients, x, matrices, of((16,), jnp.int32), to, on="v5e-1", quick=True
    )
    assert made.answer is not None
    assert made.hardware_flops == pytest.approx(2 * 2 * 2048 * 512 * 384, rel=0.02)
    kernels = re.findall(r"op_name=\"[^\"]*rows_2048_of_2048[^\"]*pallas_call\"", made.answer.hlo)
    assert len(kernels) == 2


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "matrices"])
@pytest.mark.parametrize(
    ("rows", "groups", "depth", "columns"),
    [
        (128, 4, 16, 24),
        (640, 7, 4096, 1000),
        (131072, 256, 7168, 2048),
        (524288, 128, 2816, 704),
        (98304, 8, 4096, 14336),
    ],
)
def test_tiles_fit_and_are_what_the_kernels_take(
    rows: int, groups: int, depth: int, columns: int, transposed: bool
) -> None:
    for element_bytes in (2, 4):
        work = GroupedProduct(
            rows=rows,
            expected=rows,
            groups=groups,
            depth=depth,
            columns=columns,
            element_bytes=element_bytes,
        )
        tall, deep, wide = tiles = tiles_of(work, transposed=transposed)
        assert rows % tall == 0
        # The last two dims of a window are multiples of 8 x 128, or the whole dim.
        assert deep % 128 == 0 or deep == depth
        assert wide % 128 == 0 or wide == columns
        assert _vmem(tiles, work, transposed) <= VMEM_BYTES
        # On v4 and v5p two cores share the columns.
        assert columns <= 128 or wide < columns


def test_on_a_gpu_the_work_with_all_experts_is_told() -> None:
    x, matrices = jnp.ones((8, 16)), jnp.ones((4, 16, 32))
    sizes = jnp.array([2, 2, 2, 2])
    for platform, told in (("gpu", True), ("cpu", False)):
        mesh = jax.sharding.AbstractMesh((1,), ("fsdp",))
        target = MeshTarget(platform=platform, layout=Layout(fsdp=1), dtype="float32", mesh=mesh)
        grouped_product(target, x, matrices, sizes, 8)
        assert any("with all 4 experts" in note for note in target.notes) == told
