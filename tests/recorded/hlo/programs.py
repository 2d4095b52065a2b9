"""Small programs whose compiler output is recorded: ``python -m tests.recorded.hlo.programs [NAME …]``.

Compiles each for its slice with the libtpu that is installed, and leaves NAME.hlo.gz and NAME.json here.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from systolic import recipes
from systolic.aot import Compiled, Compiler, JobProgram, Verb
from systolic.aot import compile as compile_program
from systolic.chips import slice
from systolic.cli.parse import arguments
from systolic.core.store import Store
from systolic.forecasting.function import Spread, function_program
from tests.recorded.hlo.record import record


def compiled(
    name: str, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> None:
    """Records one function; the name ends with the slice."""
    on = slice(name.split("-", 1)[1])
    program = function_program(function, args, {}, on, Spread(donate_argnums=donate))
    compiler = Compiler().quick()
    outcome = compile_program(program, on, compiler)
    assert isinstance(outcome, Compiled), outcome
    record(Store("programs", compiler.root).path(outcome.digest), name)


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
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    recipe = recipes.find("lm")
    job = recipe(arguments(recipe.function, words, "lm"))
    compiler = Compiler().quick()
    outcome = compile_program(JobProgram(job=job, verb=Verb.decode), slice("v5e-4"), compiler)
    assert isinstance(outcome, Compiled), outcome
    record(Store("programs", compiler.root).path(outcome.digest), "lm-decode-v5e-4")


PROGRAMS: Mapping[str, Callable[[], None]] = {
    "scatter": scatter,
    "splash": splash,
    "decode": decode,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        PROGRAMS[name]()
