"""Checks for each platform."""

import math
import re
from collections.abc import Callable

from systolic.doctor.findings import Finding, failed, fine, noted, warned
from systolic.doctor.machine import Machine, MachineKind

_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")


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
        kind = machine.told("TPU_ACCELERATOR_TYPE") or "a TPU"
        rows.append(
            failed(
                "TPU request",
                f"the pod's environment names {kind}, but the pod has no TPU devices",
                "request google.com/tpu in the container's resources.limits, as many as each host of the slice has chips",
            )
        )
    hosts = [host for host in machine.told("TPU_WORKER_HOSTNAMES").split(",") if host]
    chips = _chips(machine.told("TPU_TOPOLOGY"))
    if machine.tpu_chips and len(hosts) <= 1 and chips > machine.tpu_chips:
        text = f"the slice has {chips} chips and this pod sees {machine.tpu_chips}, but TPU_WORKER_HOSTNAMES lists no other hosts"
        fix = "create the pods with a JobSet, or an Indexed Job with a headless service as subdomain: systolic launch --via gke writes one"
        rows.append(failed("slice's hosts", text, fix))
    some = [name for name in _SLICES if machine.told(name)]
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
    batch = machine.told("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    kept = "this saved version keeps /kaggle/working" if batch else "only a saved version keeps it"
    return [noted("Kaggle", f"train with --run /kaggle/working/runs/NAME; {kept}")]


def _skypilot(machine: Machine) -> list[Finding]:
    rows = []
    gpus = machine.told("SKYPILOT_NUM_GPUS_PER_NODE")
    seen = 0 if machine.nvidia is None else machine.nvidia.num_gpus
    if gpus.isdigit() and int(gpus) > seen and not machine.tpu_chips:
        text = f"the task requested {gpus} GPUs per node, but this node shows {seen}"
        rows.append(failed("SkyPilot", text, "run nvidia-smi; then sky down and sky launch again"))
    if machine.told("SKYPILOT_NUM_NODES") not in ("", "1"):
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
    sizes = {"tasks": machine.told("SLURM_NTASKS"), "nodes": machine.told("SLURM_JOB_NUM_NODES")}
    many = [f"{count} {what}" for what, count in sizes.items() if count not in ("", "1")]
    in_step = bool(machine.told("SLURM_STEP_NUM_TASKS"))
    if many and not in_step:
        text = f"the job has {many[0]}, but this process is no task of a step: it would train alone"
        rows.append(warned("Slurm", text, "start it with srun: srun systolic train ..."))
    gpus = machine.told("SLURM_JOB_GPUS") or machine.told("SLURM_GPUS_ON_NODE")
    if gpus and machine.nvidia is None:
        text = "the job was allocated GPUs, but none is visible here"
        rows.append(
            failed(
                "Slurm", text, "run nvidia-smi; if it fails, contact the cluster's administrators"
            )
        )
    place = "is a task of its step" if in_step else "is the job's only one"
    return rows or [fine("Slurm", f"this process {place}")]
