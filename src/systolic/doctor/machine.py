"""What was found on a machine: plain values, no judgement."""

import enum
from dataclasses import asdict, dataclass
from typing import Any


class MachineKind(enum.Enum):
    """What kind of machine this is."""

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
    """A process that has a TPU device or the lock file open."""

    pid: int
    command: str
    user: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LockFile:
    """libtpu's lock file. ``opens``: this user may open it for writing."""

    path: str
    owner: str
    opens: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvidia:
    """NVIDIA GPUs as the system sees them. ``driver`` is ``None`` when it does not answer."""

    num_gpus: int
    driver: str | None = None
    names: tuple[str, ...] = ()
    memory_bytes: int | None = None
    """Of the first GPU."""
    used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionBound:
    """A version that an installed package asks of another, as a specifier (``>=0.10.2,<0.13``)."""

    package: str
    specifier: str
    by: str


class Death(enum.Enum):
    """How the measuring process ended without a result."""

    timed_out = "timed out"
    killed = "killed"
    failed = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What JAX saw and did in a child process. Rates are those of one device."""

    platform: str
    device_kind: str
    num_devices: int
    num_local_devices: int
    seconds: float
    """From the start of the process to the result, compiling included."""
    bf16_flops_per_second: float | None = None
    f32_flops_per_second: float | None = None
    copy_bytes_per_second: float | None = None
    """Bytes read plus bytes written."""
    complaint: str = ""
    """The last line of what JAX said on stderr, if anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmeasured:
    """Why there is no measurement."""

    death: Death
    seconds: float
    exit_code: int | None = None
    complaint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine. Everything :func:`systolic.doctor.examine` judges by."""

    place: MachineKind
    system: str
    python: str
    user: str
    packages: tuple[tuple[str, str], ...] = ()
    """(name, version) of the installed packages that matter here."""
    wanted: tuple[VersionBound, ...] = ()
    tpu_chips: int = 0
    tpu_kind: str | None = None
    """Name in the catalogue, from the PCI device id; ``None`` when unknown."""
    tpu_paths: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    unseen_processes: int = 0
    """Processes of other users whose open files this user may not list."""
    lock_file: LockFile | None = None
    nvidia: Nvidia | None = None
    environment: tuple[tuple[str, str], ...] = ()
    platform: tuple[tuple[str, str], ...] = ()
    """Variables by which the platform describes this place; none of them is secret."""
    peers: str = ""
    """This process among those of its job, in words; empty for one on its own."""
    peers_error: str = ""
    """Why the peers are not known although there are some."""
    cpu: str = ""
    num_cpus: int = 0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    disk_free_bytes: tuple[tuple[str, int], ...] = ()
    """Free bytes by folder: the working folder, the temporary folder, /dev/shm."""
    transparent_hugepages: bool | None = None
    measured: Measured | Unmeasured | None = None
    """``None``: not asked for."""

    def version(self, package: str) -> str | None:
        """The installed version of a package, or ``None``."""
        return dict(self.packages).get(package)

    def variable(self, name: str) -> str | None:
        """An environment variable, or ``None``."""
        return dict(self.environment).get(name)

    def told(self, name: str) -> str:
        """A variable of the platform; empty where it is not set."""
        return dict(self.platform).get(name, "")

    @property
    def accelerators(self) -> str:
        """What accelerators the hardware has, in words; empty for none."""
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
