"""Memory of the choice of tokens by all settings, from the compiled program, in arrays of the size of its logits.

    python benchmarks/serve/choice_memory.py cpu
    python benchmarks/serve/choice_memory.py v6e:2x2 [DEVICES]

Compiles for a TPU topology without a TPU, a minute or two for each size; DEVICES split the vocabulary, and the logits are gathered
first. ``peak`` is the peak beside the arguments, ``temporaries`` what the program's analysis calls so with its outputs. A CPU's peak
has no temporaries in it. The constants CHOICE_LOGITS and GATHER_LOGITS of systolic/forecasting/serving/server_steps.py are from here.
"""

import os
import sys
from typing import Any

import numpy as np

from systolic.compiling.settings import QUIET

SIZES = ((8, 128_256), (16, 49_152), (16, 128_256), (64, 128_256))
"""Texts and tokens of the vocabulary."""
POSITIONS, BIASES = 4096, 300


def main() -> None:
    where, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    os.environ.update(QUIET)
    import jax
    from jax.experimental import topologies

    if where == "cpu":
        devices = jax.devices()
    else:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=where).devices
    mesh = jax.sharding.Mesh(np.array(devices[:count]), ("tensor",))
    for texts, vocab in SIZES:
        found = compiled(mesh, texts, vocab).memory_analysis()
        peak = found.peak_memory_in_bytes - found.argument_size_in_bytes
        own = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        logits = texts * vocab * 4
        told = f"{where} x {count}: {texts} texts, vocabulary {vocab:,}"
        print(f"{told}: peak {peak / logits:.2f}, temporaries {own / logits:.2f}", flush=True)


def compiled(mesh: Any, texts: int, vocab: int) -> Any:
    """The choice on a mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from systolic.steps.logits import Cuts, Draw, choose_by_all

    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    integer, real = jnp.int32, jnp.float32

    def some(dtype: Any, *size: int, sharding: Any = whole) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    cuts = Cuts(
        some(integer, texts),
        *[some(real, texts) for _ in range(5)],
        some(integer, texts, POSITIONS),
        some(integer, texts),
        some(integer, texts, BIASES),
        some(real, texts, BIASES),
    )

    def by_all(logits: Any, latest: Any, packed: Any, cuts: Any) -> Any:
        gathered = jax.lax.with_sharding_constraint(logits, whole)
        return choose_by_all(gathered, latest, Draw.unpacked(packed), cuts)

    jitted = jax.jit(by_all, donate_argnums=1, out_shardings=(whole, whole))
    logits = some(real, texts, vocab, sharding=split)
    traced = jitted.trace(logits, some(integer, texts + 1), some(integer, 4, texts), cuts)
    return traced.lower(lowering_platforms=(mesh.devices.flat[0].platform,)).compile()


if __name__ == "__main__":
    main()
