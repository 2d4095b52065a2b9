"""Record of a machine: plain values without judgement."""

import enum
from dataclasses import asdict, dataclass
from typing import Any


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
