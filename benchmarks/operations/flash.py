"""Attention by tokamax's Pallas kernel, with the blocks that its autotuning chose.

Needs ``tokamax`` (0.0.12 was used), which asks for an old typeguard: unpack it beside the environment with ``pip install
--no-deps --target DIR tokamax==0.0.12 typeguard==2.13.3 immutabledict pydantic einshape frozendict`` and add DIR to PYTHONPATH.
The library refuses its kernel where no TPU is; the kernel under it does not ask.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from arrays import array, like

_LIBRARY = "tokamax._src.ops.experimental.tpu.splash_attention"


def available() -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec("tokamax") is not None


def _kernel(config: Mapping[str, Any], shapes: Mapping[str, Any], residuals: bool) -> Any:
    """The kernel of one row of a batch: ``[heads, sequence, head dim]``."""
    library = importlib.import_module(f"{_LIBRARY}.splash_attention_kernel")
    masks = importlib.import_module(f"{_LIBRARY}.splash_attention_mask")
    queries, keys = array(shapes["q"]).shape[1], array(shapes["k"]).shape[1]
    fields = {
        name: library.QKVLayout(value) if name.endswith("layout") else value
        for name, value in config.items()
    }
    mask = (
        masks.CausalMask((queries, keys), shard_count=1)
        if shapes["causal"]
        else masks.FullMask((queries, keys))
    )
    return library.make_splash_mha(
        mask=mask,
        config=dataclasses.replace(library.SplashConfig.get_default(), **fields),
        save_residuals=residuals,
        mask_value=float(jnp.finfo(jnp.float32).min),
        q_seq_shards=1,
        downcast_smem_data=False,
    )


def _swapped(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


def forward(q: jax.Array, k: jax.Array, v: jax.Array, *, kernel: Any) -> Any:
    """``[batch, sequence, heads, head dim]``; the kernel wants heads before the sequence."""
    made = jax.vmap(kernel)(*(_swapped(x) for x in (q * q.shape[-1] ** -0.5, k, v)))
    if not isinstance(made, tuple):
        return _swapped(made)
    out, kept = made
    return _swapped(out), kept["max_logits"], kept["logsumexp"]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    logsumexp: jax.Array,
    *,
    kernel: Any,
) -> tuple[jax.Array, ...]:
    """Gradients; ``logsumexp`` is ``[batch, heads, sequence]``."""
    library = importlib.import_module(f"{_LIBRARY}.splash_attention_kernel")
    scale = q.shape[-1] ** -0.5
    fixed = kernel.kwargs
    names = ("mask_value", "is_mqa", "config", "mask_function")
    pulled = partial(
        library._splash_attention_bwd,
        True,
        *(fixed[name] for name in names),
        fixed["fwd_mask_sparsity"],
        fixed["dkv_mask_sparsity"],
    )

    def one(q: jax.Array, k: jax.Array, v: jax.Array, out: Any, dout: Any, kept: Any) -> Any:
        saved = (q, k, v, None, None, out, kept, kernel.dkv_mask_info)
        made = pulled(saved, (dout, {"logsumexp": None, "max_logits": None}))
        return made[2], made[3], made[4]

    arrays = (_swapped(x) for x in (q * scale, k, v, out, dout))
    dq, dk, dv = jax.vmap(one)(*arrays, logsumexp * library.LOG2E)
    return _swapped(dq) * scale, _swapped(dk), _swapped(dv)


def program(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """Function and abstract arguments of an attention row; None where it is not expressed."""
    shapes, config = row["shapes"], row["config"]
    if any(shapes.get(name) for name in ("bias", "bool_mask", "soft_cap")) or not available():
        return None
    q, k, v = (array(shapes[name]) for name in ("q", "k", "v"))
    if row["what"] == "attention":
        kernel = _kernel(config, shapes, row["notes"] == "residuals returned")
        return partial(forward, kernel=kernel), (q, k, v)
    kernel = _kernel(config, shapes, True)
    rest = (*q.shape[:-1], v.shape[-1])
    edge = (q.shape[0], q.shape[2], q.shape[1])
    arguments = (q, k, v, like(rest, q.dtype), like(rest, q.dtype), like(edge, jnp.float32))
    return partial(backward, kernel=kernel), arguments
