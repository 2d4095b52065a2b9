"""One of two processes that save to one folder, or restore from a folder of their own: ``save|restore FOLDER``.

:func:`answer` to ``flip`` is both, and the second process finds the newest step of its copy damaged.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from systolic.core.errors import SystolicError
from systolic.runs import CheckpointStore, manifest
from systolic.runs.access import Access
from systolic.training import distributed

STEPS = (10, 20, 30)


def flip(step: Path) -> None:
    """A bit of every file that the manifest does not describe itself."""
    for file in step.rglob("*"):
        if file.is_file() and file.name != manifest.NAME and file.stat().st_size:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)


def save(folder: Path, abstract: Any) -> None:
    with CheckpointStore(folder, keep_last=3, peers=distributed.peers()) as store:
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


def answer(what: str, folder: Path) -> dict[str, Any]:
    """What this process restores; {} where it saves."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    abstract = {
        "params": {
            name: jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding) for name in "abc"
        }
    }
    if what == "save":
        save(folder, abstract)
        return {}
    if what == "flip":
        save(folder / "saved", abstract)
        sync_global_devices("saved")
        folder = shutil.copytree(folder / "saved", folder / str(jax.process_index()))
        if jax.process_index() == 1:
            flip(folder / str(STEPS[-1]))
    with CheckpointStore(folder, access=Access.read, peers=distributed.peers()) as store:
        try:
            restored = store.restore(abstract)
        except SystolicError as error:
            return {"error": str(error).replace(str(folder), "FOLDER")}
    held = restored.state["params"]["a"].addressable_shards[0]
    want = np.random.default_rng(restored.step).normal(size=(64, 64)).astype(np.float32)
    return {
        "step": restored.step,
        "skipped": [list(one) for one in restored.skipped],
        "same": bool(np.array_equal(held.data, want[held.index])),
        "processes": [extra["process"] for extra in restored.extras],
    }


if __name__ == "__main__":
    distributed.join()
    print(json.dumps(answer(sys.argv[1], Path(sys.argv[2]))))
