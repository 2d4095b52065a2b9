"""Small programs whose compiler output is recorded: ``python -m tests.recorded.hlo.programs [NAME …]``.

Compiles each for its slice with the compiler that is installed, and leaves NAME.hlo.gz and NAME.json here.
"""

import base64
import gzip
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from systolic import recipes
from systolic.chips import slice
from systolic.cli.parse import parse
from systolic.compiling import Compiled, Compiler, JobProgram, StepKind
from systolic.compiling import compile as compile_program
from systolic.core.files import Store
from systolic.forecasting.function import Spread, function_program
from tests.recorded.hlo.record import HERE, record


def compiled(
    name: str,
    function: Callable[..., Any],
    *args: Any,
    spread: Spread | None = None,
    donate: tuple[int, ...] = (),
    compiler: Compiler | None = None,
) -> Path:
    """Records one function; the name ends with the slice. Returns the compiler's own text."""
    on = slice(name.split("-", 1)[1])
    program = function_program(function, args, {}, on, spread or Spread(donate_argnums=donate))
    compiler = compiler or Compiler().quick()
    outcome = compile_program(program, on, compiler)
    assert isinstance(outcome, Compiled), outcome
    entry = Store("programs", compiler.root).path(outcome.digest)
    record(entry, name)
    return entry / "module.hlo.gz"


def write_rows(cache: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Eight rows into a cache."""
    return cache.at[rows].set(new)


def scatter() -> None:
    array = jax.ShapeDtypeStruct
    compiled(
        "scatter-v5e-1",
        write_rows,
        array((131072, 4096), jnp.bfloat16),
        array((8,), jnp.int32),
        array((8, 4096), jnp.bfloat16),
        donate=(0,),
    )


def int8_matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """int32[8192,8192] of two int8 matrices."""
    return jax.lax.dot(left, right, preferred_element_type=jnp.int32)


def int8() -> None:
    side = jax.ShapeDtypeStruct((8192, 8192), jnp.int8)
    compiled("int8-v5e-1", int8_matmul, side, side, compiler=Compiler())


def pallas_matmul(left: jax.Array, right: jax.Array, estimate: Any = None) -> jax.Array:
    """f32[2048,2048] of f32[2048,1024] and f32[1024,2048] in blocks of 512, by default without a cost estimate."""
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    def product(left: Any, right: Any, out: Any, total: Any) -> None:
        turn = pallas.program_id(2)

        @pallas.when(turn == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

        @pallas.when(turn == pallas.num_programs(2) - 1)
        def _() -> None:
            out[...] = total[...]

    block = 512
    return pallas.pallas_call(
        product,
        grid=(4, 4, 2),
        in_specs=[
            pallas.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pallas.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pallas.BlockSpec((block, block), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((2048, 2048), jnp.float32),
        scratch_shapes=[tpu.VMEM((block, block), jnp.float32)],
        cost_estimate=estimate,
    )(left, right)


MATMUL_ARGUMENTS = (
    jax.ShapeDtypeStruct((2048, 1024), jnp.float32),
    jax.ShapeDtypeStruct((1024, 2048), jnp.float32),
)


def kernel() -> None:
    """The Pallas matmul, schedule only: without a cost estimate and with one that is far too low."""
    from jax.experimental.pallas import CostEstimate

    compiled("kernel-v6e-1", pallas_matmul, *MATMUL_ARGUMENTS)
    low = CostEstimate(flops=1, bytes_accessed=0, transcendentals=0)
    compiled("kernel_told-v6e-1", partial(pallas_matmul, estimate=low), *MATMUL_ARGUMENTS)


def precise() -> None:
    """A matmul of f32[4096,4096] at the highest precision, with the compiler's cycles."""
    array = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.dot(left, right, precision="highest")

    compiled("precise-v5e-1", multiply, array, array, compiler=Compiler())


def blocks() -> None:
    """Plain attention of 8,192 tokens, blocks of 512 queries by lax.map, and of 4 layers with 16 heads of 2,048; schedule only.

    The compiler makes softmax and the product with the values a kernel of its own, inside a fusion that
    writes the block. Its code stays beside the schedule, as the compiler wrote it.
    """

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        def block(rows: jax.Array) -> jax.Array:
            return jax.nn.softmax(rows @ key.T) @ value

        return jax.lax.map(block, query.reshape(-1, 512, 1024)).reshape(8192, 1024) + 1

    for dtype, name in ((jnp.bfloat16, "blocks-v5e-1"), (jnp.float32, "blocks_f32-v6e-1")):
        array = jax.ShapeDtypeStruct((8192, 1024), dtype)
        path = compiled(name, attention, array, array, array)
        found = re.search(r'"body":"([^"]+)"', gzip.decompress(path.read_bytes()).decode())
        assert found is not None
        code = HERE / f"{name.replace('blocks', 'online_softmax')}.mlir.gz"
        code.write_bytes(gzip.compress(base64.b64decode(found[1]), 9, mtime=0))

    def heads(weights: jax.Array, x: jax.Array) -> jax.Array:
        def head(of: tuple[jax.Array, ...]) -> jax.Array:
            return jax.nn.softmax(of[0] @ of[1].T) @ of[2]

        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            each = jnp.moveaxis((x @ weight).reshape(2048, 3, 16, 128), (1, 2), (0, 1))
            made = jax.lax.map(head, tuple(each)).swapaxes(0, 1)
            return x + made.reshape(2048, 2048), None

        return jax.lax.scan(layer, x, weights)[0]

    weights = jax.ShapeDtypeStruct((4, 2048, 3 * 2048), jnp.bfloat16)
    compiled("heads-v5e-1", heads, weights, jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16))


def passes() -> None:
    """A matmul of f32[2048,2048] and its gradient at three precisions; schedule only."""
    array = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)

    def updated(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 1e-3 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)

    for name in ("default", "bf16_3x", "highest"):
        with jax.default_matmul_precision({"bf16_3x": "BF16_BF16_F32_X3"}.get(name, name)):
            compiled(f"f32_{name}-v5e-1", updated, array, array)


def splash() -> None:
    """Splash attention and its dQ, 8 heads of 8,192 positions, blocks of 512: full, causal and in a window of 1,024."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    size = (8192, 8192)
    sizes = kernels.BlockSizes(
        block_q=512,
        block_kv=512,
        block_kv_compute=512,
        block_q_dkv=512,
        block_kv_dkv=512,
        block_kv_dkv_compute=512,
        block_q_dq=512,
        block_kv_dq=512,
    )
    array = jax.ShapeDtypeStruct((8, 8192, 128), jnp.bfloat16)
    for kind, mask in (
        ("full", masks.FullMask(size)),
        ("causal", masks.CausalMask(size)),
        ("local", masks.LocalMask(size, (1024, 0), 0)),
    ):

        def loss(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = mask) -> jax.Array:
            heads = masks.MultiHeadMask([mask] * 8)
            attend = kernels.make_splash_mha(
                mask=heads, head_shards=1, q_seq_shards=1, block_sizes=sizes
            )
            return attend(query, key, value).astype(jnp.float32).sum()

        # The name's first dash ends what comes before the slice.
        compiled(f"splash_{kind}-v5e-1", jax.grad(loss, (0, 1, 2)), array, array, array)


def layer() -> None:
    """Causal attention of one layer of an 8B decoder and its gradient as MaxText ran it on v6e-8: 3 rows of 8,192 a
    chip, 32 heads over 8, blocks of 2,048, segments, one kernel backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    forward = ("block_q", "block_kv", "block_kv_compute")
    names = (*forward, *(f"{name}_dkv" for name in forward[:2]), "block_kv_dkv_compute")
    sizes = kernels.BlockSizes(**dict.fromkeys(names, 2048), use_fused_bwd_kernel=True)
    attend = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((8192, 8192))] * 32),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
    )

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, rows: jax.Array) -> jax.Array:
        made = jax.vmap(lambda q, k, v, row: attend(q, k, v, kernels.SegmentIds(row, row)))(
            query, key, value, rows
        )
        return made.astype(jnp.float32).sum()

    query, key = (jax.ShapeDtypeStruct((3, n, 8192, 128), jnp.bfloat16) for n in (32, 8))
    rows = jax.ShapeDtypeStruct((3, 8192), jnp.int32)
    compiled("splash_layer-v6e-1", jax.grad(loss, (0, 1, 2)), query, key, key, rows)


def grouped() -> None:
    """Two tiles' rows of eight groups in a buffer of twice as many, times [8, 1024, 2048], and both gradients."""
    from systolic.models.grouped import pallas_product

    def loss(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        with jax.named_scope("rows_4096_of_8192"):
            made = pallas_product(x, matrices, sizes, 4096)
        return made.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    matrices = jax.ShapeDtypeStruct((8, 1024, 2048), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled("grouped-v5e-1", jax.grad(loss, (0, 1)), x, matrices, sizes)


def decode() -> None:
    """A token for each of 32 sequences of 8,192 by a dense decoder of 8 billion parameters, schedule only."""
    options = {
        "model.layers": "32",
        "model.d_model": "4096",
        "model.d_ff": "14336",
        "model.heads": "32",
        "model.kv_heads": "8",
        "model.head_dim": "128",
        "model.vocab": "128256",
        "sequence": "8192",
        "batch_per_device": "8",
        "layout.tensor": "4",
    }
    job_step("lm-decode-v5e-4", options, StepKind.decode)


LAYERS, SEQUENCE, WIDE, DEEP, HEADS = 4, 2048, 1024, 4096, 8
"""Sizes of the step for GPUs."""


def gpu_block(x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
    """Attention by cuDNN, and an MLP."""
    heads = [(x @ w[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv"]
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    x = x + attend(*heads).reshape(x.shape)
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def gpu_step(w: Mapping[str, jax.Array], x: jax.Array) -> Any:
    """A step of gradient descent with recomputed layers, in bf16 from f32 weights."""

    def loss(w: Mapping[str, jax.Array]) -> jax.Array:
        narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
        y, _ = jax.lax.scan(jax.checkpoint(gpu_block), x, narrow)
        return (y.astype(jnp.float32) ** 2).mean()

    gradients = jax.grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 1e-3 * g.astype(a.dtype), w, gradients)


def gpu_arguments() -> tuple[tuple[Any, jax.ShapeDtypeStruct], Spread]:
    """Weights and a sequence for each of eight GPUs, and how both are spread over them."""
    sizes = dict.fromkeys("qkv", (WIDE, WIDE)) | {"up": (WIDE, DEEP), "down": (DEEP, WIDE)}
    w = {name: jax.ShapeDtypeStruct((LAYERS, *size), jnp.float32) for name, size in sizes.items()}
    specs = dict.fromkeys(w, PartitionSpec(None, "devices"))
    spread = Spread(
        in_specs=(specs, PartitionSpec("devices")), out_specs=specs, donate_argnums=(0,)
    )
    return (w, jax.ShapeDtypeStruct((8, SEQUENCE, WIDE), jnp.bfloat16)), spread


def gpu() -> None:
    """The step for GPUs, by the compiler of the extra ``gpu-forecast``."""
    args, spread = gpu_arguments()
    compiled("step-8xh100", gpu_step, *args, spread=spread)


def balanced() -> None:
    """Train step of a dense decoder, 2 layers, 8,192 tokens split over 2 devices in balanced order; schedule only."""
    options = {
        "model.layers": "2",
        "model.d_model": "1024",
        "model.d_ff": "2048",
        "model.heads": "8",
        "model.kv_heads": "4",
        "model.head_dim": "128",
        "model.vocab": "1024",
        "sequence": "8192",
        "batch_per_device": "1",
        "layout.context": "2",
    }
    job_step("lm-context-v5e-4", options, StepKind.train)


def job_step(name: str, options: Mapping[str, str], verb: StepKind) -> None:
    """Records a step of the ``lm`` recipe on v5e-4, schedule only."""
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    job = parse(recipes.find("lm").function, words, "lm")
    compiler = Compiler().quick()
    outcome = compile_program(JobProgram(job=job, verb=verb), slice("v5e-4"), compiler)
    assert isinstance(outcome, Compiled), outcome
    record(Store("programs", compiler.root).path(outcome.digest), name)


PROGRAMS: Mapping[str, Callable[[], None]] = {
    "scatter": scatter,
    "precise": precise,
    "blocks": blocks,
    "passes": passes,
    "int8": int8,
    "kernel": kernel,
    "splash": splash,
    "layer": layer,
    "grouped": grouped,
    "decode": decode,
    "balanced": balanced,
    "gpu": gpu,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        PROGRAMS[name]()
