"""Checkpoints across processes: other device counts, kills at any moment, a full disk."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from systolic.runs import CheckpointStore, backend

CHILD = Path(__file__).with_name("checkpoint_child.py")


def environment(num_devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }


def child(mode: str, folder: Path, num_devices: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHILD), mode, str(folder)],
        env=environment(num_devices),
        capture_output=True,
        text=True,
    )


def answer(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "the terminal is for the run, not for the checkpoint library"
    return json.loads(result.stdout)


def abstract() -> dict:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return {
        "params": {"w": array("float32", 64, 16), "b": array("int32", 16)},
        "opt": {"mu": array("float32", 64, 16), "count": array("int32")},
        "step": array("int32"),
    } | {"rng": jax.eval_shape(lambda: jax.random.key(0))}


def check(folder: Path) -> int:
    """The newest checkpoint is whole and all of one step; returns that step."""
    with CheckpointStore(folder) as store:
        restored = store.restore(abstract())
        assert not restored.skipped
        assert restored.step == store.latest_step()
        step = restored.step
        np.testing.assert_array_equal(restored.state["params"]["b"], np.full(16, step))
        np.testing.assert_array_equal(restored.state["opt"]["mu"], np.full((64, 16), -step))
        assert int(restored.state["step"]) == int(restored.state["opt"]["count"]) == step
        assert all(path.name.isdigit() for path in folder.iterdir()), "scratch is swept at open"
    return step


@pytest.mark.slow
def test_restores_onto_other_numbers_of_devices(tmp_path: Path):
    assert answer(child("topology", tmp_path, 2)) == {"devices": 2, "found": 0, "steps": [1]}
    assert answer(child("topology", tmp_path, 8)) == {"devices": 8, "found": 1, "steps": [1, 2]}
    assert check(tmp_path) == 2, "and on this process's first device"


def test_killed_between_the_last_byte_and_the_commit(tmp_path: Path):
    assert child("before_commit", tmp_path).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if not path.name.isdigit()]
    assert CheckpointStore(tmp_path).steps() == [1]
    assert check(tmp_path) == 1


def kill_at_random(folder: Path, rounds: int) -> None:
    moments = random.Random(rounds)
    for _ in range(rounds):
        process = subprocess.Popen(
            [sys.executable, str(CHILD), "forever", str(folder)],
            env=environment(1),
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            committed = int(process.stdout.readline())
            time.sleep(moments.random() * 0.5)
            process.kill()
        assert check(folder) >= committed


def test_killed_at_random_moments(tmp_path: Path):
    kill_at_random(tmp_path, 1)


@pytest.mark.slow
def test_killed_at_many_random_moments(tmp_path: Path):
    kill_at_random(tmp_path, 25)


def test_a_full_disk_names_what_is_intact_and_training_can_go_on(tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    seen = answer(child("full", folder))
    run = folder.parent
    intact = "the checkpoint of step 2 is intact"
    assert seen["told"] == [
        f"checkpoint of step {step} failed: File too large; {kept}; free space and continue with --resume {run}"
        for step, kept in [
            (1, "there is no earlier checkpoint"),
            (3, intact),
            (4, intact),
            (6, intact),
            (7, intact),
            (8, intact),
        ]
    ]
    assert seen["left"] == ["2"], "a failed save gives its space back"
    assert seen["steps"] == [2, 9]


def test_a_full_disk_leaves_the_checkpoint_that_would_be_replaced(tmp_path: Path):
    assert answer(child("replacing_full", tmp_path)) == {
        "told": f"checkpoint of step 1 failed: File too large; the checkpoint of step 1 is intact; free space and continue with --resume {tmp_path}",
        "left": ["1"],
        "sum": 0.0,
    }


def test_killed_between_the_renames_of_a_replacement(tmp_path: Path):
    assert child("replacing_killed", tmp_path).returncode == -signal.SIGKILL
    assert not (tmp_path / "1").exists(), "the moment at which there is none under its name"
    assert check(tmp_path) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root mounts a file system")
    if subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=20k", "tmpfs", disk], check=False
    ).returncode:
        pytest.skip("this root may not mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_line_however_many_arrays_fail(small_disk: Path):
    assert answer(child("full_of_many", small_disk)) == (
        f"checkpoint of step 1 failed: No space left on device; there is no earlier checkpoint; free space and continue with --resume {small_disk}"
    )


def test_a_failed_write_without_a_trace_is_not_told_twice():
    def record(text: str) -> logging.LogRecord:
        info = (ValueError, ValueError(text), None)
        return logging.LogRecord("asyncio", logging.ERROR, "events.py", 1, "never", (), info)

    # As TensorStore raises it, from recorded output.
    full = 'RESOURCE_EXHAUSTED: Error writing local file "1.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp/manifest.ocdbt"'
    assert not backend._failures(record(full))
    assert backend._failures(record("of somebody else"))


UNSTARTED = """
import gc, sys
from systolic.runs.backend import hush
from orbax.checkpoint._src.serialization.serialization import async_serialize_from_host
hush()
async def mine():
    pass
for one in (async_serialize_from_host(None, {}), mine()):
    del one
gc.collect()
"""


@pytest.mark.parametrize(
    "words",
    [[], pytest.param(["-W", "error"], marks=pytest.mark.slow)],
    ids=["told", "errors"],
)
def test_a_write_that_never_began_is_not_told(words: list[str]):
    """The first failure closes the loop before the other arrays' writes begin."""
    done = subprocess.run(
        [sys.executable, *words, "-c", UNSTARTED], text=True, capture_output=True, timeout=120
    )
    assert "coroutine 'async_serialize" not in done.stderr
    assert done.stderr.count("'mine' was never awaited") == 1
