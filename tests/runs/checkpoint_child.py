"""What the checkpoint tests run in a process of its own: ``checkpoint_child.py MODE FOLDER``."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from systolic.core.errors import RunError
from systolic.runs import CheckpointStore, manifest


def numbers(step: int) -> dict:
    """A state that says which step it is of in every element."""
    return {
        "params": {
            "w": np.arange(64 * 16, dtype=np.float32).reshape(64, 16) + step,
            "b": np.full((16,), step, np.int32),
        },
        "opt": {"mu": np.full((64, 16), -step, np.float32), "count": np.int32(step)},
        "step": np.int32(step),
    }


def mesh(num_devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:num_devices]).reshape(num_devices), ("data",))


def shardings(num_devices: int) -> dict:
    """Every second device count splits the other dim, so that restores must cut anew."""
    rows = PartitionSpec("data") if num_devices in (1, 8) else PartitionSpec(None, "data")
    cut, whole = (NamedSharding(mesh(num_devices), spec) for spec in (rows, PartitionSpec()))
    return {
        "params": {"w": cut, "b": whole},
        "opt": {"mu": cut, "count": whole},
        "step": whole,
    }


def place(step: int, num_devices: int) -> dict:
    state = jax.tree.map(jax.device_put, numbers(step), shardings(num_devices))
    return {**state, "rng": jax.device_put(jax.random.key(step), shardings(num_devices)["step"])}


def abstract(num_devices: int) -> dict:
    cuts = {**shardings(num_devices), "rng": shardings(num_devices)["step"]}
    return jax.tree.map(
        lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), place(0, 1), cuts
    )


def check(state: dict, step: int, num_devices: int) -> None:
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path({k: v for k, v in state.items() if k != "rng"}),
        jax.tree.leaves(numbers(step)),
        strict=True,
    ):
        assert got.dtype == want.dtype, path
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=str(path))
    wanted = shardings(num_devices)
    assert state["params"]["w"].sharding == wanted["params"]["w"]
    assert len(state["params"]["w"].sharding.device_set) == num_devices
    np.testing.assert_array_equal(
        jax.random.key_data(state["rng"]), jax.random.key_data(jax.random.key(step))
    )


def topology(folder: Path) -> None:
    """Restores what is there onto one, two and all devices, saves from all, and restores that."""
    here = len(jax.devices())
    with CheckpointStore(folder, keep_last=10) as store:
        found = store.latest_step() or 0
        store.save(found + 1, place(found + 1, here))
        store.wait()
        for step in store.steps():
            for num_devices in sorted({1, 2, here}):
                restored = store.restore(abstract(num_devices), step=step)
                check(restored.state, step, num_devices)
        print(json.dumps({"devices": here, "found": found, "steps": store.steps()}))


def forever(folder: Path) -> None:
    """Saves until it is killed; says the first step that is committed."""
    with CheckpointStore(folder, keep_last=2) as store:
        first = (store.latest_step() or 0) + 1
        step = first
        while True:
            store.save(step, place(step, 1), extra={"position": str(step).encode()})
            if step == first:
                store.wait()
                print(step, flush=True)
            step += 1


def before_commit(folder: Path) -> None:
    """Dies with everything of step 2 on disk but the commit."""
    seal = manifest.seal

    def sealed(*args: object, **options: object) -> None:
        seal(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    with CheckpointStore(folder) as store:
        store.save(1, place(1, 1))
        store.wait()
        manifest.seal = sealed
        store.save(2, place(2, 1))
        store.wait()


def full(folder: Path) -> None:
    """Meets a limit on file sizes, as a full disk; continues when there is room again."""
    small = {"params": {"w": jnp.zeros(8)}}
    large = {"params": {"w": jax.random.normal(jax.random.key(0), (1 << 20,))}}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    told = []

    def limited(limit: int, *calls: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            for call in calls:
                call()
            told.append("no error")
        except RunError as error:
            told.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    def poll() -> None:
        while store.poll() is None:
            pass

    with CheckpointStore(folder) as store:
        limited(1 << 20, lambda: store.save(1, large), store.wait)
        store.save(2, small)
        store.wait()
        limited(1 << 20, lambda: store.save(3, large), store.wait)
        limited(1 << 20, lambda: store.save(4, large), lambda: store.save(5, small))
        limited(1 << 20, lambda: store.save(6, large), poll)
        limited(0, lambda: store.save(7, small), store.wait)
        limited(300, lambda: store.save(8, small), store.wait)
        left = sorted(path.name for path in folder.iterdir())
        store.save(9, large)
    print(json.dumps({"told": told, "left": left, "steps": store.steps()}))


def full_of_many(folder: Path) -> None:
    """A disk that has no room for the first of many arrays."""
    state = {"params": {f"w{n}": jnp.full(60_000, n) for n in range(40)}}
    try:
        with CheckpointStore(folder) as store:
            store.save(1, state)
        raise AssertionError("there is room")
    except RunError as error:
        told = str(error)
    print(json.dumps(told))


def replacing_full(folder: Path) -> None:
    """A disk that fills up while an earlier process's checkpoint is replaced by a larger one."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with CheckpointStore(folder) as store:
        store.save(1, {"w": jnp.zeros(8)})
    with CheckpointStore(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            store.save(1, {"w": jax.random.normal(jax.random.key(0), (1 << 20,))})
            store.wait()
            raise AssertionError("there is room")
        except RunError as error:
            told = str(error)
        left = sorted(path.name for path in folder.iterdir())
    with CheckpointStore(folder) as store:
        found = store.restore({"w": jax.ShapeDtypeStruct((8,), jnp.float32)})
        print(json.dumps({"told": told, "left": left, "sum": float(found.state["w"].sum())}))


def replacing_killed(folder: Path) -> None:
    """Dies between the two renames of a swap."""

    def save() -> None:
        with CheckpointStore(folder) as store:
            store.save(1, place(1, 1))

    save()
    rename, done = Path.rename, []

    def renamed(path: Path, target: Path) -> Path:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)
        if path == folder / "1":
            done.append(path)
        return rename(path, target)

    Path.rename = renamed
    save()


if __name__ == "__main__":
    modes = {
        f.__name__: f
        for f in (
            topology,
            forever,
            before_commit,
            full,
            full_of_many,
            replacing_full,
            replacing_killed,
        )
    }
    modes[sys.argv[1]](Path(sys.argv[2]))
