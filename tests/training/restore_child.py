"""One of two processes that save to one folder, or restore from a folder of their own: ``save|restore FOLDER``."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from systolic.artifact import CheckpointStore
from systolic.artifact.access import Access
from systolic.core.errors import SystolicError
from systolic.training import hosts

STEPS = (10, 20, 30)


def main(what: str, folder: Path) -> None:
    hosts.join()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    abstract = {
        "params": {
            name: jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding) for name in "abc"
        }
    }
    if what == "save":
        with CheckpointStore(folder, keep_last=3, peers=hosts.peers()) as store:
            for step in STEPS:
                state = jax.tree.map(
                    lambda leaf, step=step: jax.make_array_from_callback(
                        leaf.shape,
                        leaf.sharding,
                        lambda index: (
                            np.random.default_rng(step)
                            .normal(size=leaf.shape)
                            .astype(np.float32)[index]
                        ),
                    ),
                    abstract,
                )
                store.save(step, state, extra={"process": jax.process_index()})
                store.wait()
        return
    with CheckpointStore(folder, access=Access.read, peers=hosts.peers()) as store:
        try:
            restored = store.restore(abstract)
        except SystolicError as error:
            print(json.dumps({"error": str(error).replace(str(folder), "FOLDER")}))
            return
    held = restored.state["params"]["a"].addressable_shards[0]
    want = np.random.default_rng(restored.step).normal(size=(64, 64)).astype(np.float32)
    print(
        json.dumps(
            {
                "step": restored.step,
                "skipped": [list(one) for one in restored.skipped],
                "same": bool(np.array_equal(held.data, want[held.index])),
                "processes": [extra["process"] for extra in restored.extras],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
