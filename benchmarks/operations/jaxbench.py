"""Programs of JAXBench with the shapes and dtypes of its baselines, and its times as measured rows.

``python benchmarks/operations/jaxbench.py jaxbench.json > rows.jsonl`` makes rows of ``run.py --measured``. Operations are those
of AI-Hypercomputer/accelerator-agents, JAXBench/benchmark/*/baseline.py at c4f3b17, all in bf16 on one chip.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from arrays import array, like

WHAT = "jaxbench"
CALL_MS = 0.134
"""Milliseconds of a call by the host's clock with nothing to do, which wall times hold."""


def gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b)


def mixture(
    x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """All experts of all tokens; those that are not of a token's two have a weight of 0."""
    logits, chosen = jax.lax.top_k(x @ router, 2)
    share = jax.nn.one_hot(chosen, router.shape[-1]) * jax.nn.softmax(logits)[..., None]
    hidden = jax.nn.silu(jnp.einsum("bse,nem->bsnm", x, gate)) * jnp.einsum("bse,nem->bsnm", x, up)
    return jnp.einsum(
        "bsne,bsn->bse", jnp.einsum("bsnm,nme->bsne", hidden, down), share.sum(axis=2)
    )


def grouped(rows: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
    """A scan over experts: each takes 1,024 rows from its first on, and adds those that are its own to the result."""
    most, width = 1024, experts.shape[2]
    begins = jnp.cumsum(sizes) - sizes

    def turn(out: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
        mine = jax.lax.dynamic_slice_in_dim(rows, begins[at], most)
        product = jnp.dot(mine, experts[at], preferred_element_type=jnp.float32)
        own = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0) < sizes[at]
        before = jax.lax.dynamic_slice_in_dim(out, begins[at], most)
        after = before + jnp.where(own, product, 0.0).astype(out.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, after, begins[at], 0), None

    out = jnp.zeros((len(rows) + most, width), rows.dtype)
    return jax.lax.scan(turn, out, jnp.arange(len(experts)))[0][: len(rows)]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    rate = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    return (y * rate).astype(x.dtype) * scale


def cross_entropy(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    logits = x @ weight
    right = jax.nn.one_hot(labels, logits.shape[-1]) * jax.nn.log_softmax(logits)
    return jnp.mean(-jnp.sum(right, axis=-1))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal, ``[batch, heads, sequence, head dim]``."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:])), scores, -1e9)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of ``[batch, sequence, heads, head dim]``."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), rates)[:, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def latent_attention(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """DeepSeek V3's, with its projections: 128 heads, of which 64 of 192 columns turn with the position."""
    x = arrays["x"]
    batch, length, heads, latent, turning = *x.shape[:2], 128, 512, 64

    def by_heads(y: jax.Array) -> jax.Array:
        return y.reshape(batch, length, heads, -1)

    q = by_heads(x @ arrays["q_down"] @ arrays["q_up"])
    low = x @ arrays["kv_down"]
    k, v = (by_heads(low[..., :latent] @ arrays[name]) for name in ("k_up", "v_up"))
    along = jnp.broadcast_to(low[:, :, None, latent:], (batch, length, heads, turning))
    q = jnp.concatenate([q[..., :-turning], rotated(q[..., -turning:])], axis=-1)
    k = jnp.concatenate([k, rotated(along)], axis=-1)
    out = attention(*(y.transpose(0, 2, 1, 3) for y in (q, k, v)))
    return out.transpose(0, 2, 1, 3).reshape(batch, length, -1) @ arrays["out"]


def paged_decode(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, lengths: jax.Array, pages: jax.Array
) -> jax.Array:
    """One query of each sequence over the keys and values of its pages, gathered and repeated for each head."""
    heads, size = q.shape[1:]
    kv_heads = k_pages.shape[2]

    def one(query: jax.Array, length: jax.Array, mine: jax.Array) -> jax.Array:
        k, v = (
            jnp.repeat(all_[mine].reshape(-1, kv_heads, size), heads // kv_heads, axis=1)
            for all_ in (k_pages, v_pages)
        )
        scores = jnp.einsum("hd,khd->hk", query, k) * size**-0.5
        scores = jnp.where(jnp.arange(scores.shape[-1]) < length, scores, -1e30)
        return jnp.einsum("hk,khd->hd", jax.nn.softmax(scores), v)

    return jax.vmap(one)(q, lengths, pages)


def _latent_shapes() -> dict[str, jax.ShapeDtypeStruct]:
    sizes = {
        "x": (4, 2048, 7168),
        "q_down": (7168, 1536),
        "q_up": (1536, 128 * 192),
        "kv_down": (7168, 576),
        "k_up": (512, 128 * 128),
        "v_up": (512, 128 * 128),
        "out": (128 * 128, 7168),
    }
    return {name: like(shape, jnp.bfloat16) for name, shape in sizes.items()}


PROGRAMS: Mapping[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]] = {
    "8p_GEMM": (gemm, ("bf16[8192,8192]", "bf16[8192,28672]")),
    "10p_Sparse_MoE": (
        mixture,
        (
            "bf16[2,4096,4096]",
            "bf16[4096,8]",
            "bf16[8,4096,14336]",
            "bf16[8,4096,14336]",
            "bf16[8,14336,4096]",
        ),
    ),
    "11p_Megablox_GMM": (grouped, ("bf16[32768,4096]", "bf16[128,4096,1536]", "s32[128]")),
    "12p_RMSNorm": (rms_norm, ("bf16[8,4096,8192]", "bf16[8192]")),
    "13p_Cross_Entropy": (cross_entropy, ("bf16[8192,4096]", "bf16[4096,128256]", "s32[8192]")),
    "1p_flash": (attention, ("bf16[4,64,4096,128]",) * 3),
    "3p_MLA": (latent_attention, (_latent_shapes(),)),
    "6p_paged_decode": (
        paged_decode,
        (
            "bf16[64,64,128]",
            "bf16[16384,16,8,128]",
            "bf16[16384,16,8,128]",
            "s32[64]",
            "s32[64,256]",
        ),
    ),
}
"""Functions and the shapes of their arguments."""


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Function and abstract arguments of a row."""
    function, shapes = PROGRAMS[row["shapes"]["program"]]
    return function, tuple(array(one) if isinstance(one, str) else one for one in shapes)


def rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the times of a ``jaxbench.json``: on the device where that was measured, else less what a call takes."""
    for entry in record["rows"]:
        on_device = entry["device_ms"]
        milliseconds = entry["wall_ms"] - CALL_MS if on_device is None else on_device
        yield {
            "id": f"{WHAT}-{entry['program']}",
            "generation": entry["chip"],
            "what": WHAT,
            "implementation": "xla",
            "shapes": {"program": entry["program"]},
            "measured_seconds": round(milliseconds / 1e3, 7),
            "notes": "on the device" if on_device is not None else "by the host's clock",
        }


if __name__ == "__main__":
    for row in rows(json.loads(Path(sys.argv[1]).read_text())):
        print(json.dumps(row))
