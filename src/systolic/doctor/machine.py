"""Record of a machine: plain values without judgement, and how they are read below a root, or measured by a child."""

import enum
import getpass
import json
import os
import platform
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from systolic.chips.host import memory_bytes, model_name, num_cpus
from systolic.core.errors import SystolicError
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
LIMIT_SECONDS = 120.0
_LONGEST_COMPLAINT = 300
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} [\d:.]+\s+\d+ [\w./-]+:\d+\] ")
_NOISE = re.compile(r"^(\s|Traceback|During handling|The above|-{5}|For simplicity|\*\*\*)")


class MachineKind(enum.Enum):
    """Kind of machine or platform."""

    cloud_tpu_vm = "Cloud TPU VM"
    colab = "Colab"
    kaggle = "Kaggle"
    gke = "GKE pod"
    pod = "Kubernetes pod"
    skypilot = "SkyPilot node"
    slurm = "Slurm job"
    gpu_host = "GPU host"
    cpu_host = "CPU host"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Process that has a TPU device or the lock file open."""

    pid: int
    command: str
    user: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LockFile:
    """libtpu's lock file. ``opens``: whether this user may open it for writing."""

    path: str
    owner: str
    opens: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvidia:
    """NVIDIA GPUs of the machine. ``driver`` is ``None`` if it does not respond."""

    num_gpus: int
    driver: str | None = None
    names: tuple[str, ...] = ()
    memory_bytes: int | None = None
    """Memory of the first GPU."""
    used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionBound:
    """Version of a package that another one requires, as a specifier (``>=0.10.2,<0.13``)."""

    package: str
    specifier: str
    by: str


class Death(enum.Enum):
    """How the measuring process ended if it had no result."""

    timed_out = "timed out"
    killed = "killed"
    failed = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Devices that JAX saw in the child process, and the rates of one device."""

    platform: str
    device_kind: str
    num_devices: int
    num_local_devices: int
    seconds: float
    """Time from the start of the process to the result, including compilation."""
    bf16_flops_per_second: float | None = None
    f32_flops_per_second: float | None = None
    copy_bytes_per_second: float | None = None
    """Bytes read plus bytes written."""
    complaint: str = ""
    """Last line that JAX printed to stderr, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmeasured:
    """Reason for a missing measurement."""

    death: Death
    seconds: float
    exit_code: int | None = None
    complaint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Record of one machine: the input of :func:`systolic.doctor.examine`."""

    place: MachineKind
    system: str
    python: str
    user: str
    packages: tuple[tuple[str, str], ...] = ()
    """(name, version) of the relevant installed packages."""
    wanted: tuple[VersionBound, ...] = ()
    tpu_chips: int = 0
    tpu_kind: str | None = None
    """Name in the catalogue, from the PCI device id; ``None`` if unknown."""
    tpu_paths: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    unseen_processes: int = 0
    """Processes of other users whose open files this user may not list."""
    lock_file: LockFile | None = None
    nvidia: Nvidia | None = None
    environment: tuple[tuple[str, str], ...] = ()
    platform: tuple[tuple[str, str], ...] = ()
    """Variables that describe the platform; none of them is secret."""
    peers: str = ""
    """Index and number of processes of its job, as text; empty for a single process."""
    peers_error: str = ""
    """Reason why the place in a multi-process job could not be determined."""
    cpu: str = ""
    num_cpus: int = 0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    disk_free_bytes: tuple[tuple[str, int], ...] = ()
    """Free bytes by folder: the working folder, the temporary folder, /dev/shm."""
    transparent_hugepages: bool | None = None
    measured: Measured | Unmeasured | None = None
    """``None`` if not requested."""

    def version(self, package: str) -> str | None:
        """Installed version of a package, or ``None``."""
        return dict(self.packages).get(package)

    def variable(self, name: str) -> str | None:
        """Value of an environment variable, or ``None``."""
        return dict(self.environment).get(name)

    def platform_variable(self, name: str) -> str:
        """Value of a variable of the platform; empty if not set."""
        return dict(self.platform).get(name, "")

    @property
    def accelerators(self) -> str:
        """Accelerators of the machine as text; empty if it has none."""
        if self.tpu_chips:
            return f"{self.tpu_chips} TPU chip{'s' if self.tpu_chips > 1 else ''}"
        if self.nvidia is not None:
            num = self.nvidia.num_gpus
            return f"{num} NVIDIA GPU{'s' if num != 1 else ''}"
        return ""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(
            self,
            dict_factory=lambda rows: {
                key: item.value if isinstance(item, enum.Enum) else item for key, item in rows
            },
        ) | {
            "packages": dict(self.packages),
            "environment": dict(self.environment),
            "platform": dict(self.platform),
        }


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


Outcome = Measured | Unmeasured


def measure(
    machine: Machine,
    limit_seconds: float = LIMIT_SECONDS,
    command: Sequence[str] = (sys.executable, "-m", "systolic.doctor.child"),
) -> Outcome:
    """Runs the measuring child on this machine and reads its result.

    The child gets the unchanged environment, so it has the same problems as training.
    Without a TPU, variables keep libtpu from querying a metadata server and from locking.
    """
    quiet = (
        {} if machine.tpu_chips else {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    )
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run(command, {**os.environ, **quiet}, out, err, limit_seconds)
        seconds = round(time.monotonic() - start, 1)
        return outcome(code, _read(out), _read(err), seconds)


def outcome(code: int | None, out: str, err: str, seconds: float) -> Outcome:
    """Interprets the child's exit code (``None`` if it was killed after the time limit) and output."""
    complaint = last_line(err)
    if code is None:
        return Unmeasured(death=Death.timed_out, seconds=seconds, complaint=complaint)
    if code != 0:
        death = Death.killed if code < 0 else Death.failed
        return Unmeasured(death=death, seconds=seconds, exit_code=code, complaint=complaint)
    try:
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return Measured(seconds=seconds, complaint=complaint, **result)
    except (IndexError, ValueError, TypeError):
        said = complaint or last_line(out)
        return Unmeasured(death=Death.failed, seconds=seconds, exit_code=code, complaint=said)


def last_line(text: str) -> str:
    """Last informative line, without the logger's prefix."""
    lines = [line for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    said = _LOG_PREFIX.sub("", lines[-1]).strip() if lines else ""
    return said if len(said) <= _LONGEST_COMPLAINT else said[: _LONGEST_COMPLAINT - 1] + "…"


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes],
    err: IO[bytes],
    limit_seconds: float,
) -> int | None:
    """Exit code of the child, or ``None`` if the time limit passed and its process group was killed."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        err.write(f"{error}\n".encode())
        return 127
    try:
        return child.wait(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
