"""Healthy machines (TPU VM, GPU host, laptop), to which the tests add problems."""

from dataclasses import replace
from typing import Any

from systolic.doctor.machine import Machine, MachineKind, Measured, Nvidia, VersionBound

WANTED = (
    VersionBound(package="jax", specifier="<0.13,>=0.10.2", by="systolic"),
    VersionBound(package="jaxlib", specifier="<=0.10.2,>=0.10.1", by="jax"),
)
LIBTPU = VersionBound(package="libtpu", specifier="==0.0.42.*", by="jax")
COMMON: dict[str, Any] = {
    "system": "Linux x86_64",
    "python": "3.11.7",
    "user": "ada",
    "cpu": "Sample CPU",
    "num_cpus": 96,
    "memory_bytes": 192 * 2**30,
    "memory_free_bytes": 180 * 2**30,
    "disk_free_bytes": (("/home/ada", 80 * 2**30), ("/dev/shm", 90 * 2**30)),
    "transparent_hugepages": True,
}
ON_V5E = Measured(
    platform="tpu",
    device_kind="TPU v5 lite",
    num_devices=4,
    num_local_devices=4,
    seconds=21.0,
    bf16_flops_per_second=180e12,
    f32_flops_per_second=30e12,
    copy_bytes_per_second=700e9,
)
ON_CPU = Measured(
    platform="cpu",
    device_kind="cpu",
    num_devices=1,
    num_local_devices=1,
    seconds=9.0,
    bf16_flops_per_second=4e10,
    f32_flops_per_second=8e10,
    copy_bytes_per_second=9e9,
)
ON_H200 = Measured(
    platform="gpu",
    device_kind="NVIDIA H200",
    num_devices=8,
    num_local_devices=8,
    seconds=14.0,
    bf16_flops_per_second=720e12,
    f32_flops_per_second=48e12,
    copy_bytes_per_second=4100e9,
)
TPU_VM = Machine(
    place=MachineKind.cloud_tpu_vm,
    packages=(
        ("systolic", "0.1.0"),
        ("jax", "0.10.2"),
        ("jaxlib", "0.10.2"),
        ("libtpu", "0.0.42.1"),
    ),
    wanted=(*WANTED, LIBTPU),
    tpu_chips=4,
    tpu_kind="v5e",
    tpu_paths=("/dev/vfio/0", "/dev/vfio/1", "/dev/vfio/2", "/dev/vfio/3"),
    measured=ON_V5E,
    **COMMON,
)
GPU_HOST = Machine(
    place=MachineKind.gpu_host,
    packages=(
        *(("systolic", "0.1.0"), ("jax", "0.10.2"), ("jaxlib", "0.10.2")),
        ("jax-cuda12-plugin", "0.10.2"),
    ),
    wanted=WANTED,
    nvidia=Nvidia(
        num_gpus=8,
        driver="570.86.15",
        names=("NVIDIA H200",) * 8,
        memory_bytes=141 * 2**30,
        used_bytes=2**30,
    ),
    measured=ON_H200,
    **COMMON,
)
LAPTOP = Machine(
    place=MachineKind.cpu_host,
    packages=(("systolic", "0.1.0"), ("jax", "0.10.2"), ("jaxlib", "0.10.2")),
    wanted=WANTED,
    measured=ON_CPU,
    **COMMON,
)


def with_package(machine: Machine, name: str, version: str | None) -> Machine:
    """The machine with a package at a version, or without it."""
    rows = [row for row in machine.packages if row[0] != name]
    return replace(machine, packages=(*rows, *([(name, version)] if version else [])))


def with_variables(machine: Machine, **variables: str) -> Machine:
    """The machine with the given environment variables."""
    return replace(machine, environment=tuple(variables.items()))
