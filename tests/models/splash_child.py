"""Splash attention over 8 virtual devices, in Pallas's interpreter, against plain attention on one: prints the largest differences."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from systolic.job import ContextOrder, Layout
from systolic.models.attention import Logits, Masking, attention, balanced
from systolic.models.splash import splash_attention
from systolic.steps.target import MeshTarget, make_mesh

LAYOUTS = {
    "context": Layout(fsdp=2, context=4),
    "context-tensor": Layout(fsdp=2, context=2, tensor=2),
    "fsdp-tensor": Layout(fsdp=4, tensor=2),
}
SEQUENCE = 1024


def target(layout: Layout, platform: str) -> MeshTarget:
    mesh = make_mesh(layout, jax.devices()[: layout.num_devices])
    return MeshTarget(platform=platform, layout=layout, dtype="float32", mesh=mesh)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    query, weight = (jax.random.normal(k, (4, SEQUENCE, 4, 64)) for k in keys[:2])
    key, value = (jax.random.normal(k, (4, SEQUENCE, 2, 64)) for k in keys[2:])
    segments = jnp.tile(jnp.repeat(jnp.array([1, 2], jnp.int32), SEQUENCE // 2), (4, 1))
    alone = target(Layout(fsdp=1), "cpu")

    def plain(query, key, value):
        out = attention(alone, query, key, value, Masking(segments=segments, causal=True))
        return (out * weight).sum(), out

    (_, want), wanted = jax.value_and_grad(plain, (0, 1, 2), has_aux=True)(query, key, value)
    for name, spread in LAYOUTS.items():
        # Rows as short as these stay in natural order by themselves.
        layout = replace(spread, context_order=ContextOrder.balanced)
        where = target(layout, "tpu")
        order = balanced(where, SEQUENCE)
        assert (order is None) == (layout.context == 1)

        def split(query, key, value, where=where, order=order):
            def place(array):
                return array if order is None else order.arrange(array)

            masking = Masking(segments=place(segments), causal=True, order=order)
            arrays = (
                where.constrain(place(array), "batch", "sequence", "heads", None)
                for array in (query, key, value)
            )
            out = splash_attention(where, *arrays, masking, Logits(scale=64**-0.5), interpret=True)
            out = out if order is None else order.restore(out)
            return (out * weight).sum(), out

        sharding = NamedSharding(where.mesh, where.spec("batch"))
        inputs = (jax.device_put(array, sharding) for array in (query, key, value))
        (_, have), had = jax.jit(jax.value_and_grad(split, (0, 1, 2), has_aux=True))(*inputs)
        pairs = zip((have, *had), (want, *wanted), strict=True)
        worst = [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs]
        print(json.dumps({"name": name, "worst": worst}), flush=True)


if __name__ == "__main__":
    main()
