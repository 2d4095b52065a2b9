"""Reading a machine: from a synthetic root folder, and this machine."""

import os
from pathlib import Path

import pytest

from systolic.doctor.machine import (
    MachineKind,
    Nvidia,
    gather,
    holders,
    lock_file,
    nvidia_gpus,
    place,
    tpu_paths,
    tpus,
)


def _pci(root: Path, name: str, vendor: str, device: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / name
    folder.mkdir(parents=True)
    for file, text in (("vendor", vendor), ("device", device), ("class", kind)):
        (folder / file).write_text(f"{text}\n")


def _process(root: Path, pid: int, command: list[str], opened: list[str]) -> None:
    folder = root / "proc" / str(pid) / "fd"
    folder.mkdir(parents=True)
    (folder.parent / "cmdline").write_bytes(b"\0".join(c.encode() for c in command) + b"\0")
    for number, path in enumerate(opened):
        (folder / str(number)).symlink_to(path)


def test_tpus_are_told_from_googles_other_devices(tmp_path: Path) -> None:
    _pci(tmp_path, "0000:00:04.0", "0x1ae0", "0x0042", "0x020000")
    assert tpus(tmp_path, {}) == (0, None)
    for slot in range(4):
        _pci(tmp_path, f"0000:00:0{5 + slot}.0", "0x1ae0", "0x006f", "0x120000")
    assert tpus(tmp_path, {}) == (4, "v6e")


def test_tpus_in_a_container_that_hides_the_bus(tmp_path: Path) -> None:
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for name in ("vfio", "0", "1"):
        (tmp_path / "dev/vfio" / name).touch()
    assert tpus(tmp_path, {}) == (0, None)
    assert tpus(tmp_path, {"TPU_ACCELERATOR_TYPE": "v6e-4"}) == (2, None)
    assert tpu_paths(tmp_path) == (f"{tmp_path}/dev/vfio/0", f"{tmp_path}/dev/vfio/1")
    (tmp_path / "dev/accel0").touch()
    assert tpus(tmp_path, {}) == (1, None)
    assert tpu_paths(tmp_path) == (f"{tmp_path}/dev/accel0",)


def test_who_holds_a_device(tmp_path: Path) -> None:
    device = f"{tmp_path}/dev/accel0"
    _process(tmp_path, 7, ["python", "train.py", "--steps", "9" * 200], ["/dev/null", device])
    _process(tmp_path, 8, ["bash"], ["/dev/null"])
    _process(tmp_path, os.getpid(), ["systolic"], [device])
    (found,), unseen = holders(tmp_path, [device])
    assert (found.pid, found.path, unseen) == (7, device, 0)
    assert found.command.startswith("python train.py --steps 999")
    assert len(found.command) == 60
    assert found.user


def test_a_real_process_that_holds_a_file_is_found(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "libtpu_lockfile"
    code = f"import sys; f = open({str(path)!r}, 'w'); print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()
        found, _ = holders(Path("/"), [str(path)])
        assert [held.pid for held in found] == [child.pid]
        assert found[0].command.startswith(sys.executable[:50])
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
    assert holders(Path("/"), [str(path)])[0] == ()


def test_lock_file(tmp_path: Path) -> None:
    path = tmp_path / "libtpu_lockfile"
    assert lock_file(path) is None
    path.touch()
    found = lock_file(path)
    assert found is not None
    assert found.opens
    assert found.owner


def test_gpus_from_proc_and_from_the_bus(tmp_path: Path) -> None:
    assert nvidia_gpus(tmp_path) is None
    _pci(tmp_path, "0000:01:00.0", "0x10de", "0x2335", "0x030200")
    _pci(tmp_path, "0000:01:00.1", "0x10de", "0x10fa", "0x040300")
    assert nvidia_gpus(tmp_path) == Nvidia(num_gpus=1, driver=None)
    proc = tmp_path / "proc/driver/nvidia"
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (proc / "gpus" / name).mkdir(parents=True)
    (proc / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 2025\nGCC version:\n"
    )
    assert nvidia_gpus(tmp_path) == Nvidia(num_gpus=2, driver="580.82.07")


@pytest.mark.parametrize(
    ("environment", "chips", "nvidia", "expected"),
    [
        ({"COLAB_RELEASE_TAG": "x"}, 1, None, MachineKind.colab),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, 8, None, MachineKind.kaggle),
        ({}, 4, None, MachineKind.cloud_tpu_vm),
        ({}, 0, Nvidia(num_gpus=1), MachineKind.gpu_host),
        ({}, 0, None, MachineKind.cpu_host),
    ],
)
def test_place(environment, chips, nvidia, expected) -> None:
    assert place(environment, chips, nvidia) is expected


def test_this_machine() -> None:
    found = gather(environment={"JAX_PLATFORMS": "cpu", "HOME": "/secret"})
    assert found.environment == (("JAX_PLATFORMS", "cpu"),)
    assert found.version("jax")
    assert found.num_cpus >= 1
    assert 0 < found.memory_free_bytes <= found.memory_bytes * 1.01
    assert {need.package for need in found.wanted} >= {"jax", "jaxlib", "flax"}
    assert all(found.version(need.package) for need in found.wanted)
    assert found.to_json()["place"] == found.place.value
