"""Schedules of single functions that libtpu wrote, for the rules of ops without the compiler's cycles.

``python -m tests.recorded.rules.record NAME...`` compiles functions of :data:`PROGRAMS` and writes them to ``schedules.json.xz``; without
names all of them. Metadata and layouts of arguments are left out.
"""

import json
import lzma
from functools import cache
from pathlib import Path

from systolic.hlo import Module, parse

SCHEDULES = Path(__file__).parent / "schedules.json.xz"
N = 131_072

PROGRAMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "topk1": ("v5e-1", "lambda x: lax.top_k(x, 1)", (f"f32[128,{N}]",)),
    "topk10": ("v5e-1", "lambda x: lax.top_k(x, 10)", (f"f32[128,{N}]",)),
    "topk100": ("v5e-1", "lambda x: lax.top_k(x, 100)", (f"f32[128,{N}]",)),
    "topk10_bf16": ("v5e-1", "lambda x: lax.top_k(x, 10)", (f"bf16[128,{N}]",)),
    "topk10_s32": ("v5e-1", "lambda x: lax.top_k(x, 10)", (f"s32[128,{N}]",)),
    "topk64_measured": ("v5e-1", "lambda x: lax.top_k(x, 64)", ("bf16[32,201088]",)),
    "topk64_measured_v6e": ("v6e-1", "lambda x: lax.top_k(x, 64)", ("bf16[32,201088]",)),
    "topk5_measured": ("v5e-1", "lambda x: lax.top_k(x, 5)", ("bf16[16,32768]",)),
    "topk5_negated": ("v5e-1", "lambda x: lax.top_k(-x, 5)", ("bf16[64,32768]",)),
    "topk5_columns": ("v5e-1", "lambda x: lax.top_k(x, 5, axis=0)", ("f32[32768,64]",)),
    "approx10": ("v5e-1", "lambda x: lax.approx_max_k(x, 10)", (f"f32[128,{N}]",)),
    "sort": ("v5e-1", "lambda x: jnp.sort(x, -1)", (f"f32[128,{N}]",)),
    "sort_bf16": ("v5e-1", "lambda x: jnp.sort(x, -1)", (f"bf16[128,{N}]",)),
    "sort_first_axis": ("v5e-1", "lambda x: jnp.sort(x, 0)", (f"f32[{N},128]",)),
    "sort_unstable": ("v5e-1", "lambda x: lax.sort(x, is_stable=False)", (f"s32[{N}]",)),
    "sort_flat": ("v5e-1", "lambda x: jnp.sort(x)", ("f32[1048576]",)),
    "sort_four": ("v5e-1", "lambda *x: lax.sort(x, num_keys=2)", ("f32[1048576]",) * 4),
    "argsort": ("v5e-1", "lambda x: jnp.argsort(x, -1)", (f"f32[128,{N}]",)),
    "sort_unstable_tpu7x": ("tpu7x-2", "lambda x: lax.sort(x, is_stable=False)", ("s32[81920]",)),
    "argsort_tpu7x": ("tpu7x-2", "lambda x: jnp.argsort(x)", ("s32[81920]",)),
    "sort_measured_tpu7x": (
        "tpu7x-2",
        "lambda x: lax.approx_max_k(x, 512, recall_target=1.0)",
        ("f32[2048,262144]",),
    ),
    "sort_lanes_measured_tpu7x": (
        "tpu7x-2",
        "lambda x: lax.approx_max_k(x, 512, recall_target=1.0)",
        ("f32[64,262144]",),
    ),
    "topk512_measured_tpu7x": ("tpu7x-2", "lambda x: lax.top_k(x, 512)", ("f32[64,262144]",)),
    "gather": ("v5e-1", "lambda t, i: t[i]", ("f32[100000000]", "s32[1000000]")),
    "gather_small": ("v5e-1", "lambda t, i: t[i]", ("f32[1000]", "s32[1000000]")),
    "gather_measured_v6e": ("v6e-1", "lambda t, i: t[i]", ("s32[65536]", "s32[65536]")),
    "gather_rows_32": ("v5e-1", "lambda t, i: t[i]", ("f32[1000000,32]", "s32[100000]")),
    "gather_rows_128": ("v5e-1", "lambda t, i: t[i]", ("f32[1000000,128]", "s32[100000]")),
    "gather_rows_4096": ("v5e-1", "lambda t, i: t[i]", ("bf16[50000,4096]", "s32[8192]")),
    "scatter_add": (
        "v5e-1",
        "lambda t, i, v: t.at[i].add(v)",
        ("f32[100000000]", "s32[1000000]", "f32[1000000]"),
    ),
    "scatter_rows": (
        "v5e-1",
        "lambda t, i, v: t.at[i].add(v)",
        ("f32[1000000,128]", "s32[100000]", "f32[100000,128]"),
    ),
    "segment_sum": (
        "v5e-1",
        "lambda v, i: jax.ops.segment_sum(v, i, num_segments=1000)",
        ("f32[1000000]", "s32[1000000]"),
    ),
    "embedding_gradient": (
        "v5e-1",
        "jax.grad(lambda t, i: (t[i] ** 2).sum())",
        ("f32[50000,4096]", "s32[8192]"),
    ),
    "fft": ("v5e-1", "jnp.fft.fft", ("c64[1024,1024]",)),
    "fft2_measured_tpu7x": ("tpu7x-2", "jnp.fft.fft2", ("c64[100,1024,1024]",)),
    "random_bits": (
        "v5e-1",
        "lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl='rbg'), (4096, 4096))",
        ("u32[4]",),
    ),
    "pool": (
        "v5e-1",
        "lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), 'SAME')",
        ("f32[32,112,112,64]",),
    ),
}
"""Name to slice, function and arguments."""


@cache
def texts() -> dict[str, str]:
    """Scheduled HLO by name."""
    return json.loads(lzma.decompress(SCHEDULES.read_bytes()))


def module(name: str) -> Module:
    """A program's schedule."""
    return parse(texts()[name])
