"""Each problem of a machine is found and named, with a one-line fix."""

import dataclasses

import pytest

from systolic.doctor import Status, examine
from systolic.doctor.checks import Finding
from systolic.doctor.machine import (
    Death,
    Holder,
    LockFile,
    Machine,
    MachineKind,
    Nvidia,
    Unmeasured,
)
from tests.doctor.machines import (
    GPU_HOST,
    LAPTOP,
    ON_CPU,
    ON_H200,
    ON_V5E,
    TPU_VM,
    with_package,
    with_variables,
)

replace = dataclasses.replace
HOLDER = Holder(pid=4242, command="python train.py", user="eve", path="/dev/vfio/0")
LOCK = LockFile(path="/tmp/libtpu_lockfile", owner="root", opens=False)
HUNG = Unmeasured(death=Death.timed_out, seconds=120.0)
NO_DRIVER = Nvidia(num_gpus=8, driver=None)
OLD_DRIVER = Nvidia(num_gpus=8, driver="470.57.02")
FULL_GPU = replace(GPU_HOST.nvidia or NO_DRIVER, used_bytes=130 * 2**30)
ABORTED = Unmeasured(death=Death.killed, seconds=3.0, exit_code=-6, complaint="Check failed")
RAISED = Unmeasured(death=Death.failed, seconds=3.0, exit_code=1, complaint="TPU is in use")
SLOW = replace(ON_V5E, bf16_flops_per_second=60e12)


def loud(machine: Machine) -> list[Finding]:
    return [f for f in examine(machine) if f.status in (Status.failed, Status.warning)]


@pytest.mark.parametrize("machine", [TPU_VM, GPU_HOST, LAPTOP], ids=lambda m: m.place.name)
def test_a_healthy_machine_has_nothing_to_fix(machine: Machine) -> None:
    assert loud(machine) == []
    assert examine(replace(machine, measured=None))


FAILURES = [
    ("stale lock", replace(TPU_VM, lock_file=LOCK), "lock file", "sudo rm /tmp/libtpu_lockfile"),
    ("holder", replace(TPU_VM, holders=(HOLDER,)), "TPU in use", "sudo kill 4242"),
    (
        "own holder",
        replace(TPU_VM, holders=(replace(HOLDER, user="ada"),)),
        "TPU in use",
        "kill 4242",
    ),
    (
        "TPU VM on the CPU",
        replace(TPU_VM, measured=ON_CPU),
        "devices",
        "pip install -U 'jax[tpu]==0.10.2'",
    ),
    (
        "TPU VM told to use the CPU",
        with_variables(replace(TPU_VM, measured=ON_CPU), JAX_PLATFORMS="cpu"),
        "devices",
        "unset JAX_PLATFORMS",
    ),
    (
        "TPU VM on the CPU because of a holder",
        replace(TPU_VM, measured=ON_CPU, holders=(HOLDER,)),
        "devices",
        "stop process 4242, then try again",
    ),
    (
        "GPU host on the CPU",
        replace(GPU_HOST, measured=ON_CPU),
        "devices",
        "pip install -U 'jax[cuda12]==0.10.2'",
    ),
    (
        "GPU host without the plugin",
        with_package(GPU_HOST, "jax-cuda12-plugin", None),
        "driver",
        "pip install -U 'jax[cuda12]==0.10.2'",
    ),
    (
        "jaxlib of another version",
        with_package(LAPTOP, "jaxlib", "0.9.2"),
        "packages",
        "pip install -U 'jaxlib<=0.10.2,>=0.10.1'",
    ),
    (
        "jax that systolic does not know",
        with_package(LAPTOP, "jax", "0.14.0"),
        "packages",
        "pip install -U 'jax<0.13,>=0.10.2'",
    ),
    ("no jax", with_package(TPU_VM, "jax", None), "packages", "pip install -U 'jax[tpu]'"),
    ("no jaxlib", with_package(LAPTOP, "jaxlib", None), "packages", "pip install -U 'jax'"),
    (
        "libtpu of another version",
        with_package(TPU_VM, "libtpu", "0.0.11"),
        "packages",
        "pip install -U 'jax[tpu]==0.10.2'",
    ),
    (
        "no libtpu",
        replace(with_package(TPU_VM, "libtpu", None), wanted=()),
        "libtpu",
        "pip install -U 'jax[tpu]==0.10.2'",
    ),
    ("old python", replace(LAPTOP, python="3.9.2"), "python", "Python 3.11"),
    ("no driver", replace(GPU_HOST, nvidia=NO_DRIVER), "driver", "nvidia-smi works"),
    ("old driver", replace(GPU_HOST, nvidia=OLD_DRIVER), "driver", "update the driver to 525"),
    (
        "driver too old for CUDA 13",
        with_package(
            with_package(GPU_HOST, "jax-cuda12-plugin", None), "jax-cuda13-plugin", "0.10.2"
        ),
        "driver",
        "pip install 'jax[cuda12]==0.10.2'",
    ),
    (
        "missing chips",
        replace(TPU_VM, measured=replace(ON_V5E, num_devices=3, num_local_devices=3)),
        "devices",
        "restart the machine",
    ),
    ("hangs", replace(TPU_VM, measured=HUNG), "devices", "on a multi-host slice"),
    ("hangs on a laptop", replace(LAPTOP, measured=HUNG), "devices", "--limit-seconds"),
    ("aborts", replace(TPU_VM, measured=ABORTED), "devices", "import jax"),
    ("raises", replace(TPU_VM, measured=RAISED), "devices", "import jax"),
    (
        "TPU flags in XLA_FLAGS",
        with_variables(TPU_VM, XLA_FLAGS="--xla_tpu_spmd_rng_bit_generator_unsafe=true"),
        "XLA_FLAGS",
        "LIBTPU_INIT_ARGS",
    ),
    (
        "XLA_FLAGS without dashes",
        with_variables(LAPTOP, XLA_FLAGS="xla_cpu_enable_fast_math=true"),
        "XLA_FLAGS",
        "write each flag as --xla_",
    ),
    (
        "hidden GPUs",
        with_variables(GPU_HOST, CUDA_VISIBLE_DEVICES=""),
        "CUDA_VISIBLE_DEVICES",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "full disk",
        replace(LAPTOP, disk_free_bytes=(("/home/ada", 10**8),)),
        "disk",
        "free some space",
    ),
]


@pytest.mark.parametrize(
    ("machine", "name", "fix"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES]
)
def test_a_failure_is_named_and_fixed(machine: Machine, name: str, fix: str) -> None:
    found = [f for f in loud(machine) if f.name == name]
    assert [f.status for f in found] == [Status.failed]
    assert fix in found[0].fix


WARNINGS = [
    ("tensorflow", with_package(TPU_VM, "tensorflow", "2.21.0"), "tensorflow", "tensorflow-cpu"),
    ("two libtpus", with_package(TPU_VM, "libtpu-nightly", "0.1"), "packages", "uninstall"),
    (
        "libtpu for compiling only",
        with_package(replace(LAPTOP, wanted=TPU_VM.wanted), "libtpu", "0.0.11"),
        "packages",
        "jax[tpu]==0.10.2",
    ),
    ("huge pages", replace(TPU_VM, transparent_hugepages=False), "huge pages", "echo always"),
    ("slow matmul", replace(TPU_VM, measured=SLOW), "bf16 matmul", "which processes use"),
    ("little memory", replace(LAPTOP, memory_free_bytes=10**9), "memory", "stop other programs"),
    ("taken GPU", replace(GPU_HOST, nvidia=FULL_GPU), "GPU memory", "nvidia-smi"),
    ("little disk", replace(LAPTOP, disk_free_bytes=(("/", 2 * 2**30),)), "disk", "free some"),
    (
        "docker's shared memory",
        replace(LAPTOP, disk_free_bytes=(("/dev/shm", 64 * 2**20),)),
        "shared memory",
        "--shm-size",
    ),
    ("notebook", replace(LAPTOP, place=MachineKind.colab), "devices", "notebook's settings"),
    (
        "own lock while JAX does not start",
        replace(TPU_VM, lock_file=replace(LOCK, opens=True, owner="ada"), measured=RAISED),
        "lock file",
        "rm /tmp/libtpu_lockfile",
    ),
    (
        "unseen processes",
        replace(TPU_VM, unseen_processes=7, measured=HUNG),
        "TPU in use",
        "sudo -E systolic doctor",
    ),
    ("no jit", with_variables(LAPTOP, JAX_DISABLE_JIT="1"), "JAX_DISABLE_JIT", "unset"),
    ("x64", with_variables(TPU_VM, JAX_ENABLE_X64="True"), "JAX_ENABLE_X64", "unset"),
    ("dump", with_variables(LAPTOP, XLA_FLAGS="--xla_dump_to=/tmp/d"), "XLA_FLAGS", "drop"),
    (
        "metadata",
        with_variables(TPU_VM, TPU_SKIP_MDS_QUERY="1"),
        "TPU_SKIP_MDS_QUERY",
        "unset TPU_SKIP_MDS_QUERY",
    ),
    (
        "precision",
        with_variables(TPU_VM, JAX_DEFAULT_MATMUL_PRECISION="highest"),
        "JAX_DEFAULT_MATMUL_PRECISION",
        "unset",
    ),
    (
        "CUDA in the library path",
        with_variables(GPU_HOST, LD_LIBRARY_PATH="/usr/local/cuda/lib64"),
        "LD_LIBRARY_PATH",
        "unset LD_LIBRARY_PATH",
    ),
    (
        "allocator",
        with_variables(GPU_HOST, XLA_PYTHON_CLIENT_ALLOCATOR="platform"),
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        "unset",
    ),
    (
        "preallocation",
        with_variables(GPU_HOST, XLA_PYTHON_CLIENT_PREALLOCATE="false"),
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "unset",
    ),
]


@pytest.mark.parametrize(
    ("machine", "name", "fix"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS]
)
def test_a_warning_is_named_and_fixed(machine: Machine, name: str, fix: str) -> None:
    found = [f for f in loud(machine) if f.name == name]
    assert [f.status for f in found] == [Status.warning]
    assert fix in found[0].fix


def test_the_fallback_is_loud_and_says_what_jax_said() -> None:
    said = replace(ON_CPU, complaint="An NVIDIA GPU may be present, but no CUDA jaxlib")
    (found,) = [f for f in loud(replace(GPU_HOST, measured=said)) if f.name == "devices"]
    assert "JAX HAS FALLEN BACK TO THE CPU" in found.text
    assert "8 NVIDIA GPUs" in found.text
    assert "no CUDA jaxlib" in found.text


def test_a_lock_that_its_holder_holds_is_not_stale() -> None:
    held = replace(HOLDER, path=LOCK.path)
    names = [f.name for f in loud(replace(TPU_VM, lock_file=LOCK, holders=(held,)))]
    assert names == ["TPU in use"]


def test_shares_of_the_peak_are_per_device() -> None:
    texts = {f.name: f.text for f in examine(TPU_VM)}
    assert texts["bf16 matmul"] == "180 TFLOP/s, 91% of the peak of 197 TFLOP/s"
    assert texts["memory copy"].startswith("700 GB/s, 85%")
    ironwood = replace(ON_V5E, device_kind="TPU7x", num_local_devices=8, bf16_flops_per_second=9e14)
    texts = {f.name: f.text for f in examine(replace(TPU_VM, measured=ironwood))}
    assert "78% of the peak of 1.15" in texts["bf16 matmul"]
    assert texts["devices"] == "JAX sees 8 x TPU7x"
    unknown = replace(ON_H200, device_kind="NVIDIA Sample")
    assert "peak" not in {f.name: f.text for f in examine(replace(GPU_HOST, measured=unknown))}


def test_hidden_chips_on_request_are_no_failure() -> None:
    one = replace(ON_V5E, num_devices=1, num_local_devices=1)
    machine = with_variables(replace(TPU_VM, measured=one), TPU_VISIBLE_CHIPS="0")
    assert loud(machine) == []


def test_a_finding_without_a_mend_is_refused() -> None:
    with pytest.raises(ValueError, match="has no fix"):
        Finding(name="x", status=Status.failed, text="broken")
    with pytest.raises(ValueError, match="more than one line"):
        Finding(name="x", status=Status.ok, text="a\nb")
