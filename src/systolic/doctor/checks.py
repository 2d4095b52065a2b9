"""Checks of a machine, general and by platform, as pure functions from its record to findings: a status, and the command that fixes the problem."""

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from systolic.chips import Chip, by_device_kind, chip
from systolic.core.units import GIB, si
from systolic.doctor.machine import Death, Machine, MachineKind, Measured, Unmeasured

_FORCED = "--xla_force_host_platform_device_count"
_MANY_PASSES = ("highest", "float32", "bfloat16_3x", "tensorfloat32")
_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
__all__ = ["Finding", "Status", "examine"]
OLDEST_PYTHON = "3.11"
CUDA_DRIVERS = {"jax-cuda12-plugin": "525", "jax-cuda13-plugin": "580"}
"""Minimum NVIDIA driver version of each plugin. Source: JAX's installation guide."""
LITTLE_MEMORY_BYTES, LITTLE_DISK_BYTES, NO_DISK_BYTES = 2 * GIB, 5 * GIB, GIB // 2
LITTLE_SHARED_MEMORY_BYTES = 512 * 2**20
FALLEN_BACK = "JAX HAS FALLEN BACK TO THE CPU"
POOR_SHARE = 0.5
"""Fraction of the peak below which a warning is given; a large bf16 matmul normally reaches 80 to 95 %."""


class Status(enum.Enum):
    """Status of a check, from good to bad; only ``failed`` makes the exit code 1."""

    ok = "ok"
    note = "note"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Outcome of one check. A warning or a failure has a one-line fix."""

    name: str
    status: Status
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.warning, Status.failed) and not self.fix:
            raise ValueError(f"finding {self.name} has no fix")
        if "\n" in self.text + self.fix:
            raise ValueError(f"finding {self.name} has more than one line")

    def to_json(self) -> dict[str, str]:
        """The finding as a plain object."""
        return {
            "name": self.name,
            "status": self.status.value,
            "text": self.text,
            "fix": self.fix,
            "mend": self.fix,  # Earlier name, kept for one version.
        }


def fine(name: str, text: str) -> Finding:
    """Finding of a check that passed."""
    return Finding(name=name, status=Status.ok, text=_one_line(text))


def noted(name: str, text: str) -> Finding:
    """Finding that is neither good nor bad."""
    return Finding(name=name, status=Status.note, text=_one_line(text))


def warned(name: str, text: str, fix: str) -> Finding:
    """Finding about something that works, but at a cost."""
    return Finding(name=name, status=Status.warning, text=_one_line(text), fix=fix)


def failed(name: str, text: str, fix: str) -> Finding:
    """Finding about something that does not work until it is fixed."""
    return Finding(name=name, status=Status.failed, text=_one_line(text), fix=fix)


def _one_line(text: str) -> str:
    """Replaces line breaks, which variables and messages of programs may contain."""
    return " ".join(text.split())


def environment(machine: Machine) -> list[Finding]:
    """Findings about JAX_*, XLA_*, TPU_* and LIBTPU_* variables."""
    rows = [
        *_compiler_flags(machine),
        *_jax_variables(machine),
        *_tpu_variables(machine),
        *_gpu_variables(machine),
    ]
    if not any(row.status in (Status.warning, Status.failed) for row in rows):
        rows.append(Finding(name="environment", status=Status.ok, text=_summary(machine)))
    return rows


def _summary(machine: Machine) -> str:
    names = [name for name, _ in machine.environment if name != "LD_LIBRARY_PATH"]
    return f"set: {', '.join(names)}" if names else "no JAX, XLA or TPU variables set"


def _compiler_flags(machine: Machine) -> list[Finding]:
    flags = machine.variable("XLA_FLAGS") or ""
    rows = []
    if flags.strip() and not flags.lstrip().startswith("-"):
        text = (
            f"XLA_FLAGS={flags.split()[0]!r} has no leading dashes, so XLA reads it as a file name"
        )
        rows.append(failed("XLA_FLAGS", text, "write each flag as --xla_…"))
    tpu_flags = [flag.split("=")[0] for flag in flags.split() if flag.startswith("--xla_tpu_")]
    if tpu_flags:
        text = f"{tpu_flags[0]} is in XLA_FLAGS, where JAX aborts on it as an unknown flag"
        rows.append(failed("XLA_FLAGS", text, "move the --xla_tpu_* flags to LIBTPU_INIT_ARGS"))
    if "--xla_dump_to" in flags:
        text = "XLA_FLAGS dumps every compiled program to disk, which is slow and fills the disk"
        rows.append(warned("XLA_FLAGS", text, "drop --xla_dump_to when done debugging"))
    if _FORCED in flags or machine.variable("JAX_NUM_CPU_DEVICES"):
        rows.append(noted("virtual devices", "the CPU is split into virtual devices, as requested"))
    return rows


def _jax_variables(machine: Machine) -> list[Finding]:
    rows = []
    slow = {
        "JAX_DISABLE_JIT": "nothing is compiled: training is 100 times slower",
        "JAX_DEBUG_NANS": "every operation is checked synchronously",
        "JAX_ENABLE_X64": "64-bit numbers double the memory; TPUs emulate them",
    }
    for name, effect in slow.items():
        if (machine.variable(name) or "").lower() in ("1", "true", "on", "yes"):
            rows.append(warned(name, f"{name} is on: {effect}", f"unset {name}"))
    precision = (machine.variable("JAX_DEFAULT_MATMUL_PRECISION") or "").lower()
    if precision in _MANY_PASSES and machine.accelerators:
        text = f"JAX_DEFAULT_MATMUL_PRECISION={precision} costs several passes per f32 matmul"
        fix = "unset JAX_DEFAULT_MATMUL_PRECISION"
        rows.append(warned("JAX_DEFAULT_MATMUL_PRECISION", text, fix))
    if machine.variable("JAX_PLATFORM_NAME"):
        text = "JAX_PLATFORM_NAME is deprecated and does not stop other backends from starting"
        rows.append(warned("JAX_PLATFORM_NAME", text, "use JAX_PLATFORMS instead"))
    return rows


def _tpu_variables(machine: Machine) -> list[Finding]:
    if not machine.tpu_chips:
        return []
    rows = []
    if machine.variable("TPU_SKIP_MDS_QUERY"):
        text = "TPU_SKIP_MDS_QUERY hides from libtpu which hosts belong to the slice"
        rows.append(warned("TPU_SKIP_MDS_QUERY", text, "unset TPU_SKIP_MDS_QUERY"))
    if machine.variable("TPU_LIBRARY_PATH"):
        path = machine.variable("TPU_LIBRARY_PATH")
        text = f"TPU_LIBRARY_PATH loads {path}, not the installed libtpu"
        rows.append(warned("TPU_LIBRARY_PATH", text, "unset TPU_LIBRARY_PATH"))
    names = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
    rows += [
        noted(name, f"{name}={machine.variable(name)} hides the other chips")
        for name in names
        if machine.variable(name)
    ]
    return rows


def _gpu_variables(machine: Machine) -> list[Finding]:
    if machine.nvidia is None:
        return []
    rows = []
    visible = machine.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
        rows.append(failed("CUDA_VISIBLE_DEVICES", text, "unset CUDA_VISIBLE_DEVICES"))
    if "cuda" in (machine.variable("LD_LIBRARY_PATH") or "").lower():
        text = "LD_LIBRARY_PATH contains a CUDA installation, which JAX loads instead of its own"
        rows.append(warned("LD_LIBRARY_PATH", text, "unset LD_LIBRARY_PATH"))
    allocator = (machine.variable("XLA_PYTHON_CLIENT_ALLOCATOR") or "").lower()
    if allocator == "platform":
        text = "XLA_PYTHON_CLIENT_ALLOCATOR=platform allocates every buffer from the driver: slow"
        fix = "unset XLA_PYTHON_CLIENT_ALLOCATOR"
        rows.append(warned("XLA_PYTHON_CLIENT_ALLOCATOR", text, fix))
    if (machine.variable("XLA_PYTHON_CLIENT_PREALLOCATE") or "").lower() in ("false", "0"):
        text = "XLA_PYTHON_CLIENT_PREALLOCATE=false fragments memory: large models run out sooner"
        fix = "unset XLA_PYTHON_CLIENT_PREALLOCATE"
        rows.append(warned("XLA_PYTHON_CLIENT_PREALLOCATE", text, fix))
    return rows


def forces_cpu(machine: Machine) -> str:
    """Setting that makes JAX use the CPU; empty without one."""
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        value = machine.variable(name)
        if value and value.split(",")[0].strip().lower() == "cpu":
            return f"{name}={value}"
    return ""


def platform(machine: Machine) -> list[Finding]:
    """Findings about the platform and about this process's job."""
    checks: dict[MachineKind, Callable[[Machine], list[Finding]]] = {
        MachineKind.gke: _gke,
        MachineKind.colab: _colab,
        MachineKind.kaggle: _kaggle,
        MachineKind.skypilot: _skypilot,
        MachineKind.slurm: _slurm,
    }
    return [*_peers(machine), *checks.get(machine.place, lambda _: [])(machine)]


def _peers(machine: Machine) -> list[Finding]:
    if machine.peers_error:
        text = (
            f"this process belongs to a multi-process job: {machine.peers_error.partition(';')[0]}"
        )
        fix = machine.peers_error.partition(";")[2].strip() or "see systolic train --help"
        return [failed("peers", text, fix)]
    if machine.peers:
        text = f"{machine.peers}; run systolic doctor --multi-host in all processes to check their connections"
        return [noted("peers", text)]
    return []


def _gke(machine: Machine) -> list[Finding]:
    rows = []
    if not machine.tpu_chips:
        kind = machine.platform_variable("TPU_ACCELERATOR_TYPE") or "a TPU"
        rows.append(
            failed(
                "TPU request",
                f"the pod's environment names {kind}, but the pod has no TPU devices",
                "request google.com/tpu in the container's resources.limits, as many as each host of the slice has chips",
            )
        )
    hosts = [host for host in machine.platform_variable("TPU_WORKER_HOSTNAMES").split(",") if host]
    chips = _chips(machine.platform_variable("TPU_TOPOLOGY"))
    if machine.tpu_chips and len(hosts) <= 1 and chips > machine.tpu_chips:
        text = f"the slice has {chips} chips and this pod sees {machine.tpu_chips}, but TPU_WORKER_HOSTNAMES lists no other hosts"
        fix = "create the pods with a JobSet, or an Indexed Job with a headless service as subdomain: systolic launch --via gke writes one"
        rows.append(failed("slice's hosts", text, fix))
    some = [name for name in _SLICES if machine.platform_variable(name)]
    if some and len(some) < len(_SLICES):
        missing = ", ".join(name for name in _SLICES if name not in some)
        fix = "use a multi-slice JobSet with the annotation alpha.jobset.sigs.k8s.io/exclusive-topology: systolic launch --via gke writes one"
        rows.append(failed("slices", f"{some[0]} is set, but {missing} is not", fix))
    return rows or [fine("GKE", "the pod has the devices and hosts of its slice")]


def _chips(topology: str) -> int:
    """Number of chips of a topology such as 2x4; 0 if unknown."""
    sides = topology.split("x")
    return math.prod(map(int, sides)) if re.fullmatch(r"\d+(x\d+)*", topology) else 0


def _colab(machine: Machine) -> list[Finding]:
    del machine
    return [
        noted(
            "Colab",
            "files are lost when the VM is reclaimed; mount Google Drive and train with --run /content/drive/MyDrive/runs/NAME",
        )
    ]


def _kaggle(machine: Machine) -> list[Finding]:
    batch = machine.platform_variable("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    kept = "this saved version keeps /kaggle/working" if batch else "only a saved version keeps it"
    return [noted("Kaggle", f"train with --run /kaggle/working/runs/NAME; {kept}")]


def _skypilot(machine: Machine) -> list[Finding]:
    rows = []
    gpus = machine.platform_variable("SKYPILOT_NUM_GPUS_PER_NODE")
    seen = 0 if machine.nvidia is None else machine.nvidia.num_gpus
    if gpus.isdigit() and int(gpus) > seen and not machine.tpu_chips:
        text = f"the task requested {gpus} GPUs per node, but this node shows {seen}"
        rows.append(failed("SkyPilot", text, "run nvidia-smi; then sky down and sky launch again"))
    if machine.platform_variable("SKYPILOT_NUM_NODES") not in ("", "1"):
        rows.append(
            noted(
                "SkyPilot",
                "all nodes must see the run's folder: a bucket in file_mounts with mode MOUNT",
            )
        )
    return rows


def _slurm(machine: Machine) -> list[Finding]:
    rows = []
    # sbatch --nodes without --ntasks sets the number of nodes alone.
    sizes = {
        "tasks": machine.platform_variable("SLURM_NTASKS"),
        "nodes": machine.platform_variable("SLURM_JOB_NUM_NODES"),
    }
    many = [f"{count} {what}" for what, count in sizes.items() if count not in ("", "1")]
    in_step = bool(machine.platform_variable("SLURM_STEP_NUM_TASKS"))
    if many and not in_step:
        text = f"the job has {many[0]}, but this process is no task of a step: it would train alone"
        rows.append(warned("Slurm", text, "start it with srun: srun systolic train ..."))
    gpus = machine.platform_variable("SLURM_JOB_GPUS") or machine.platform_variable(
        "SLURM_GPUS_ON_NODE"
    )
    if gpus and machine.nvidia is None:
        text = "the job was allocated GPUs, but none is visible here"
        rows.append(
            failed(
                "Slurm", text, "run nvidia-smi; if it fails, contact the cluster's administrators"
            )
        )
    place = "is a task of its step" if in_step else "is the job's only one"
    return rows or [fine("Slurm", f"this process {place}")]


def examine(machine: Machine) -> list[Finding]:
    """Findings of all checks, in the order to fix them."""
    checks: tuple[Callable[[Machine], list[Finding]], ...] = (
        python,
        packages,
        tpu_software,
        gpu_software,
        tensorflow,
        holders,
        lock_file,
        platform,
        environment,
        devices,
        rates,
        memory,
        disk,
        hugepages,
    )
    return [finding for check in checks for finding in check(machine)]


def python(machine: Machine) -> list[Finding]:
    """Checks that Python is new enough."""
    if Version(machine.python) < Version(OLDEST_PYTHON):
        text = f"Python {machine.python} is older than {OLDEST_PYTHON}"
        return [failed("python", text, f"make an environment with Python {OLDEST_PYTHON} or newer")]
    return [fine("python", f"Python {machine.python}")]


def packages(machine: Machine) -> list[Finding]:
    """Checks that jax is installed, and that package versions satisfy what systolic and jax require."""
    if machine.version("jax") is None or machine.version("jaxlib") is None:
        missing = "jax" if machine.version("jax") is None else "jaxlib"
        extra = f"[{_extra(machine)}]" if machine.accelerators else ""
        return [failed("packages", f"{missing} is not installed", f"pip install -U 'jax{extra}'")]
    rows = []
    for want in machine.wanted:
        have = machine.version(want.package)
        if have is None:
            text = f"{want.package}, required by {want.by}, is not installed"
            rows.append(failed("packages", text, f"pip install '{want.package}{want.specifier}'"))
            continue
        if _fits(have, want.specifier):
            continue
        text = f"{want.package} {have} is installed, but {want.by} requires {want.specifier}"
        fix = f"pip install -U '{want.package}{want.specifier}'"
        if want.package == "libtpu":
            fix = f"pip install -U 'jax[tpu]=={machine.version('jax')}'"
        if want.package == "libtpu" and not machine.tpu_chips:
            rows.append(warned("packages", f"{text} (used here only to compile for TPUs)", fix))
        else:
            rows.append(failed("packages", text, fix))
    if machine.version("libtpu") and machine.version("libtpu-nightly"):
        fix = "pip uninstall -y libtpu-nightly"
        rows.append(warned("packages", "libtpu and libtpu-nightly are both installed", fix))
    return rows or [fine("packages", "installed versions are compatible")]


def tpu_software(machine: Machine) -> list[Finding]:
    """Checks that a machine with a TPU has libtpu."""
    if machine.tpu_chips and machine.version("libtpu") is None:
        text = f"{machine.accelerators}, but libtpu is not installed"
        jax = f"=={machine.version('jax')}" if machine.version("jax") else ""
        return [failed("libtpu", text, f"pip install -U 'jax[tpu]{jax}'")]
    return []


def gpu_software(machine: Machine) -> list[Finding]:
    """Checks that a machine with a GPU has a working driver and a matching JAX plugin."""
    if machine.nvidia is None:
        return []
    driver = machine.nvidia.driver
    if driver is None:
        text = f"{machine.accelerators} on the PCI bus, but the driver does not respond"
        return [failed("driver", text, "install or reload NVIDIA's driver until nvidia-smi works")]
    plugins = [name for name in CUDA_DRIVERS if machine.version(name)]
    if not plugins:
        jax = f"=={machine.version('jax')}" if machine.version("jax") else ""
        text = f"{machine.accelerators}, but JAX's CUDA plugin is not installed"
        return [failed("driver", text, f"pip install -U 'jax[{_extra(machine)}]{jax}'")]
    oldest = min((CUDA_DRIVERS[name] for name in plugins), key=Version)
    if not _at_least(driver, oldest):
        text = f"NVIDIA driver {driver} is older than {oldest}, which {plugins[0]} requires"
        fix = f"update the driver to {oldest} or newer"
        if plugins == ["jax-cuda13-plugin"] and _at_least(
            driver, CUDA_DRIVERS["jax-cuda12-plugin"]
        ):
            fix = f"pip uninstall -y jax-cuda13-plugin; pip install 'jax[cuda12]=={machine.version('jax')}'"
        return [failed("driver", text, fix)]
    return [fine("driver", f"NVIDIA driver {driver}")]


def tensorflow(machine: Machine) -> list[Finding]:
    """Checks for the full TensorFlow package, which takes the TPU if it is imported first."""
    if not machine.tpu_chips:
        return []
    for name in ("tensorflow", "tensorflow-tpu"):
        if machine.version(name):
            text = f"{name} {machine.version(name)} can take the TPU before JAX does"
            fix = f"pip uninstall -y {name} && pip install tensorflow-cpu"
            return [warned("tensorflow", text, fix)]
    return []


def holders(machine: Machine) -> list[Finding]:
    """Checks that no other process has the TPU or its lock file open."""
    if not machine.tpu_chips:
        return []
    rows = [
        failed(
            "TPU in use",
            f"process {held.pid} of {held.user} holds {held.path}: {held.command}",
            f"{'' if held.user == machine.user else 'sudo '}kill {held.pid}",
        )
        for held in machine.holders
    ]
    if not rows and machine.unseen_processes and isinstance(machine.measured, Unmeasured):
        text = f"{machine.unseen_processes} processes of other users could not be inspected"
        rows.append(warned("TPU in use", text, "sudo -E systolic doctor"))
    return rows or [fine("TPU in use", "no other process holds the TPU")]


def lock_file(machine: Machine) -> list[Finding]:
    """Checks that libtpu's lock file is absent or held by a live process."""
    lock = machine.lock_file
    held = any(lock is not None and held.path == lock.path for held in machine.holders)
    if lock is None or held or not machine.tpu_chips:
        return []
    if not lock.opens:
        text = f"{lock.path} was left by {lock.owner}; {machine.user} cannot open it"
        return [failed("lock file", text, f"sudo rm {lock.path}")]
    if isinstance(machine.measured, Unmeasured) and not machine.holders:
        text = f"{lock.path} exists and no visible process holds it"
        return [warned("lock file", text, f"rm {lock.path}")]
    return []


def devices(machine: Machine) -> list[Finding]:
    """Checks that JAX starts and sees the devices of the hardware."""
    measured = machine.measured
    if measured is None or machine.version("jax") is None:
        return []
    if isinstance(measured, Unmeasured):
        return [_death(machine, measured)]
    if measured.platform == "cpu" and machine.accelerators:
        return [_fallback(machine, measured)]
    if measured.platform == "cpu":
        if machine.place in (MachineKind.colab, MachineKind.kaggle):
            text = "this notebook has no accelerator"
            return [warned("devices", text, "choose a TPU or GPU in the notebook's settings")]
        shown = f"{measured.num_devices} CPU device{'s' if measured.num_devices > 1 else ''}"
        return [noted("devices", f"JAX sees {shown}; no TPU or GPU found")]
    expected = _expected_devices(machine, measured)
    shown = f"{measured.num_local_devices} x {measured.device_kind}"
    if expected is not None and measured.num_local_devices != expected:
        hidden = [n for n, _ in machine.environment if "VISIBLE" in n or "PROCESS_BOUNDS" in n]
        text = f"JAX sees {shown}, but the machine has {expected}"
        if hidden:
            return [noted("devices", f"{text} ({hidden[0]} is set)")]
        return [
            failed(
                "devices", text, "restart the machine; if that does not help, report it as broken"
            )
        ]
    return [fine("devices", f"JAX sees {shown}")]


def rates(machine: Machine) -> list[Finding]:
    """Checks that measured rates are close enough to the peak rates in the catalogue."""
    measured = machine.measured
    if not isinstance(measured, Measured):
        return []
    known = by_device_kind(measured.device_kind)
    rows = [
        ("bf16 matmul", measured.bf16_flops_per_second, "FLOP/s", _peak(known, "bf16")),
        ("f32 matmul", measured.f32_flops_per_second, "FLOP/s", None),
        ("memory copy", measured.copy_bytes_per_second, "B/s", _peak(known, "memory")),
    ]
    findings = []
    for name, rate, unit, peak in rows:
        if rate is None:
            continue
        text = si(rate, unit)
        if peak is None:
            findings.append(noted(name, text))
            continue
        text += f", {rate / peak:.0%} of the peak of {si(peak, unit, digits=4)}"
        if rate / peak < POOR_SHARE:
            fix = "check which processes use the device (nvidia-smi, tpu-info), then rerun"
            findings.append(warned(name, text, fix))
        else:
            findings.append(fine(name, text))
    return findings


def memory(machine: Machine) -> list[Finding]:
    """Checks free memory on the host and on the first GPU."""
    rows = []
    text = f"{machine.memory_free_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB free"
    if machine.memory_free_bytes < LITTLE_MEMORY_BYTES:
        rows.append(warned("memory", text, "stop other programs: ps aux --sort=-rss | head"))
    else:
        rows.append(fine("memory", text))
    gpu = machine.nvidia
    if gpu is not None and gpu.memory_bytes and gpu.used_bytes is not None:
        share = gpu.used_bytes / gpu.memory_bytes
        text = f"{share:.0%} of the first GPU's {gpu.memory_bytes / GIB:.0f} GiB are in use"
        if share > 0.1:
            rows.append(warned("GPU memory", text, "find the process with nvidia-smi and stop it"))
    return rows


def disk(machine: Machine) -> list[Finding]:
    """Checks disk space for checkpoints and for the data loader's shared memory."""
    rows = []
    for folder, free in machine.disk_free_bytes:
        text = f"{free / GIB:.1f} GiB free in {folder}"
        if folder.endswith("/dev/shm"):
            if free < LITTLE_SHARED_MEMORY_BYTES:
                fix = "start the container with --shm-size=8g"
                rows.append(warned("shared memory", f"{text}: data workers need more", fix))
        elif free < NO_DISK_BYTES:
            rows.append(failed("disk", text, f"free some space: du -xh {folder} | sort -h | tail"))
        elif free < LITTLE_DISK_BYTES:
            rows.append(warned("disk", text, f"free some space: du -xh {folder} | sort -h | tail"))
        else:
            rows.append(fine("disk", text))
    return rows


def hugepages(machine: Machine) -> list[Finding]:
    """Checks that transparent huge pages are on, which speeds up start and transfers on TPU hosts."""
    if not machine.tpu_chips or machine.transparent_hugepages in (None, True):
        return []
    fix = 'sudo sh -c "echo always > /sys/kernel/mm/transparent_hugepage/enabled"'
    return [warned("huge pages", "transparent huge pages are off: slow start, slow transfers", fix)]


def _fallback(machine: Machine, measured: Measured) -> Finding:
    text = f"{FALLEN_BACK}: the machine has {machine.accelerators}, but JAX uses none"
    if forced := forces_cpu(machine):
        return failed("devices", f"{text} ({forced} is set)", f"unset {forced.split('=')[0]}")
    if measured.complaint:
        text += f" ({measured.complaint})"
    if machine.holders:
        return failed("devices", text, f"stop process {machine.holders[0].pid}, then try again")
    fix = f"pip install -U 'jax[{_extra(machine)}]=={machine.version('jax')}'"
    return failed("devices", text, fix)


def _death(machine: Machine, unmeasured: Unmeasured) -> Finding:
    said = f": {unmeasured.complaint}" if unmeasured.complaint else ""
    if unmeasured.death is Death.timed_out:
        text = f"JAX did not start and measure within {unmeasured.seconds:.0f} s{said}"
        if machine.holders:
            return failed("devices", text, f"stop process {machine.holders[0].pid}, then try again")
        if machine.tpu_chips:
            fix = "on a multi-host slice, run this on all hosts at once; on a single host: --limit-seconds 600"
            return failed("devices", text, fix)
        return failed("devices", text, "systolic doctor --limit-seconds 600")
    how = f"was killed by signal {-(unmeasured.exit_code or 0)}"
    if unmeasured.death is Death.failed:
        how = f"exited with code {unmeasured.exit_code}"
    fix = "fix the error above, then run: python -c 'import jax; print(jax.devices())'"
    return failed("devices", f"JAX {how}{said}", fix)


def _expected_devices(machine: Machine, measured: Measured) -> int | None:
    """Number of devices expected on this host; ``None`` if unknown."""
    if measured.platform == "tpu" and machine.tpu_chips:
        known = by_device_kind(measured.device_kind)
        if known is None and machine.tpu_kind is not None:
            known = chip(machine.tpu_kind)
        per_chip = known.devices_per_chip if known is not None else None
        return None if per_chip is None else machine.tpu_chips * per_chip
    if measured.platform in ("gpu", "cuda") and machine.nvidia is not None:
        return machine.nvidia.num_gpus
    return None


def _peak(known: Chip | None, what: str) -> float | None:
    """Peak rate of one device: its share of the chip's."""
    if known is None or known.devices_per_chip is None:
        return None
    peak = known.peak_bf16_flops_per_second if what == "bf16" else known.hbm_bytes_per_second
    return None if peak is None else peak / known.devices_per_chip


def _extra(machine: Machine) -> str:
    """Extra of the jax package for this machine's accelerator."""
    if machine.tpu_chips:
        return "tpu"
    driver = machine.nvidia.driver if machine.nvidia is not None else None
    new = driver is not None and _at_least(driver, CUDA_DRIVERS["jax-cuda13-plugin"])
    return "cuda13" if new else "cuda12"


def _fits(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return True


def _at_least(version: str, oldest: str) -> bool:
    try:
        return Version(version) >= Version(oldest)
    except InvalidVersion:
        return True
