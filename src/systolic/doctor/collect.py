"""Reads the machine: files below a root (which may be a copy of /proc and others), packages, environment."""

import getpass
import os
import platform
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from systolic.chips.host import memory_bytes, model_name, num_cpus
from systolic.core.errors import SystolicError
from systolic.doctor.machine import Holder, LockFile, Machine, MachineKind, Nvidia, VersionBound
from systolic.training.distributed.detect import find

PACKAGES = (
    *("systolic", "jax", "jaxlib", "libtpu", "libtpu-nightly", "flax", "optax", "orbax-checkpoint"),
    *("grain", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "torch"),
    *("torch-xla", "tensorflow", "tensorflow-cpu", "tensorflow-tpu"),
)
VARIABLES = (
    "JAX_",
    "XLA_",
    "LIBTPU",
    "TPU_",
    "CUDA_VISIBLE",
    "LD_LIBRARY_PATH",
    "PJRT_",
    "KERAS_BACKEND",
)
TELLING = (
    *("COLAB_RELEASE_TAG", "COLAB_TPU_1VM", "KAGGLE_KERNEL_RUN_TYPE", "KUBERNETES_SERVICE_HOST"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_GPUS"),
    *("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    *("SKYPILOT_NUM_GPUS_PER_NODE", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
    *("MEGASCALE_COORDINATOR_ADDRESS", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"),
    *("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
)
"""Variables that describe the platform, listed one by one because others are secret."""
TPU_PCI_DEVICES = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
"""PCI device ids of Google's TPUs (v2 has the id of v3). Source: jax/_src/hardware_utils.py."""

_GOOGLE, _NVIDIA = "0x1ae0", "0x10de"
_SMI_SECONDS = 15
_LONGEST_COMMAND = 60


def gather(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Machine:
    """Reads the machine without importing JAX or opening a device."""
    chips, kind = tpus(root, environment)
    nvidia = nvidia_gpus(root)
    paths = tpu_paths(root) if chips else ()
    lock = root / "tmp/libtpu_lockfile"
    open_holders, unseen = holders(root, [*paths, str(lock)])
    versions = installed(PACKAGES)
    needs = wanted(dict(versions))
    versions = installed(dict.fromkeys([*PACKAGES, *(need.package for need in needs)]))
    peers, peers_error = job(root, environment)
    return Machine(
        place=place(environment, chips, nvidia),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        user=getpass.getuser(),
        packages=versions,
        wanted=needs,
        tpu_chips=chips,
        tpu_kind=kind,
        tpu_paths=paths,
        holders=open_holders,
        unseen_processes=unseen,
        lock_file=lock_file(lock),
        nvidia=nvidia,
        environment=tuple(
            (key, value) for key, value in sorted(environment.items()) if key.startswith(VARIABLES)
        ),
        platform=tuple((key, environment[key]) for key in TELLING if key in environment),
        peers=peers,
        peers_error=peers_error,
        cpu=model_name(root / "proc/cpuinfo"),
        num_cpus=num_cpus(),
        memory_bytes=memory_bytes(),
        memory_free_bytes=psutil.virtual_memory().available,
        disk_free_bytes=free_disk((Path.cwd(), Path(tempfile.gettempdir()), root / "dev/shm")),
        transparent_hugepages=hugepages(root),
    )


def place(environment: Mapping[str, str], tpu_chips: int, nvidia: Nvidia | None) -> MachineKind:
    """Kind of machine: notebooks, clusters and SkyPilot by their variables, others by hardware."""
    if "COLAB_RELEASE_TAG" in environment or "COLAB_GPU" in environment:
        return MachineKind.colab
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return MachineKind.kaggle
    if "SKYPILOT_NODE_RANK" in environment:
        return MachineKind.skypilot
    if "KUBERNETES_SERVICE_HOST" in environment:
        tpus = tpu_chips or "TPU_WORKER_HOSTNAMES" in environment
        return MachineKind.gke if tpus else MachineKind.pod
    if "SLURM_JOB_ID" in environment:
        return MachineKind.slurm
    if tpu_chips:
        return MachineKind.cloud_tpu_vm
    return MachineKind.gpu_host if nvidia is not None else MachineKind.cpu_host


def job(root: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Place of this process in its job as text, and the reason if it could not be determined."""
    try:
        member = find(environment, root)
    except SystolicError as error:
        return "", str(error)
    if member is None:
        return "", ""
    return f"{member.name(member.index)} of {member.count} (from {member.by})", ""


def installed(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Versions of the packages that are installed."""
    rows = []
    for name in names:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(rows)


def wanted(versions: Mapping[str, str]) -> tuple[VersionBound, ...]:
    """Version bounds that systolic and jax declare for their dependencies."""
    rows = []
    extras = {"libtpu": "tpu", "jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}
    for by in ("systolic", "jax"):
        try:
            lines = metadata.requires(by) or []
        except metadata.PackageNotFoundError:
            continue
        for line in lines:
            try:
                need = Requirement(line)
            except InvalidRequirement:
                continue
            name = need.name.lower().replace("_", "-")
            extra = extras.get(name, "") if by == "jax" and name in versions else ""
            applies = need.marker is None or need.marker.evaluate({"extra": extra})
            always = need.marker is None or need.marker.evaluate({"extra": ""})
            if (always and (by == "systolic" or name == "jaxlib")) or (extra and applies):
                rows.append(VersionBound(package=name, specifier=str(need.specifier), by=by))
    return tuple(dict.fromkeys(rows))


def tpus(root: Path, environment: Mapping[str, str]) -> tuple[int, str | None]:
    """Number and kind of TPU chips, from the PCI bus, or from device files in a container that hides it.

    /dev/vfio may contain any passed-through device, so it counts only if TPU_ACCELERATOR_TYPE is set.
    """
    ids = [device for vendor, device in _pci(root) if vendor == _GOOGLE]
    kinds = [TPU_PCI_DEVICES[device] for device in ids if device in TPU_PCI_DEVICES]
    if kinds:
        return len(kinds), kinds[0]
    accel = len(list((root / "dev").glob("accel[0-9]*")))
    if not accel and "TPU_ACCELERATOR_TYPE" in environment:
        return len(list((root / "dev/vfio").glob("[0-9]*"))), None
    return accel, None


def tpu_paths(root: Path) -> tuple[str, ...]:
    """Device files that a process opens to use a TPU."""
    accel = sorted(map(str, (root / "dev").glob("accel[0-9]*")))
    return tuple(accel or sorted(map(str, (root / "dev/vfio").glob("[0-9]*"))))


def nvidia_gpus(root: Path) -> Nvidia | None:
    """NVIDIA GPUs, from nvidia-smi, else from /proc, /dev or the PCI bus."""
    answer = _smi() if root == Path("/") else []
    if answer:
        first = answer[0]
        return Nvidia(
            num_gpus=len(answer),
            driver=first[1],
            names=tuple(row[0] for row in answer),
            memory_bytes=_mebibytes(first[2]),
            used_bytes=_mebibytes(first[3]),
        )
    driver = _driver(root / "proc/driver/nvidia/version")
    listed = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    nodes = len(list((root / "dev").glob("nvidia[0-9]*")))
    on_bus = sum(vendor == _NVIDIA for vendor, _ in _pci(root, display_only=True))
    count = listed or nodes or on_bus
    return Nvidia(num_gpus=count, driver=driver) if count else None


def holders(root: Path, paths: Iterable[str]) -> tuple[tuple[Holder, ...], int]:
    """Processes with one of ``paths`` open, and the number of processes that could not be inspected."""
    sought, processes, unseen = set(paths), [], 0
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        if int(process.name) == os.getpid():
            continue
        try:
            links = list((process / "fd").iterdir())
        except PermissionError:
            unseen += 1
            continue
        except OSError:  # the process has ended
            continue
        held = sorted(sought.intersection(map(_target, links)))
        if held:
            processes.append(
                Holder(
                    pid=int(process.name),
                    command=_command(process),
                    user=_owner(process),
                    path=held[0],
                )
            )
    return tuple(processes), unseen


def lock_file(path: Path) -> LockFile | None:
    """Reads libtpu's lock file, if it exists."""
    if not path.exists():
        return None
    return LockFile(path=str(path), owner=_owner(path), opens=os.access(path, os.R_OK | os.W_OK))


def free_disk(folders: Iterable[Path]) -> tuple[tuple[str, int], ...]:
    """Free bytes of the folders that exist, one row per file system."""
    rows, seen = [], set()
    for folder in folders:
        try:
            device, free = folder.stat().st_dev, shutil.disk_usage(folder).free
        except OSError:
            continue
        if device not in seen:
            seen.add(device)
            rows.append((str(folder), free))
    return tuple(rows)


def hugepages(root: Path) -> bool | None:
    """Whether transparent huge pages are always on; ``None`` if the kernel doesn't report it."""
    try:
        return "[always]" in (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None


def _pci(root: Path, *, display_only: bool = False) -> list[tuple[str, str]]:
    rows = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            kind = (folder / "class").read_text().strip() if display_only else "0x03"
            if kind.startswith("0x03"):
                vendor, device = (folder / "vendor").read_text(), (folder / "device").read_text()
                rows.append((vendor.strip(), device.strip()))
        except OSError:
            continue
    return rows


def _smi() -> list[list[str]]:
    """One row per GPU: name, driver, total MiB, used MiB; empty if nvidia-smi is missing or fails."""
    query = "name,driver_version,memory.total,memory.used"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 4]


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def _driver(path: Path) -> str | None:
    """Version from ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  …``."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    versions = [w for w in words if w.replace(".", "").isdigit() and w.count(".") in (1, 2)]
    return versions[0] if versions else None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _command(process: Path) -> str:
    try:
        text = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "?"
    text = "".join(c if c.isprintable() else "?" for c in text.strip())
    return text if len(text) <= _LONGEST_COMMAND else text[: _LONGEST_COMMAND - 1] + "…"


def _owner(path: Path) -> str:
    try:
        number = path.stat().st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
