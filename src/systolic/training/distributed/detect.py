"""Detection of the processes of a job: an explicit coordinator, a multi-host TPU slice, SkyPilot, Slurm or MPI.

Each detector reads what its platform sets. JAX detects most of them too, but in another order, without reporting the
result, and without support for Open MPI 5 and MPICH.
"""

import re
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from systolic.core.errors import OptionError, RunError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
PORT = 8476
"""Default port of the coordinator, where the platform doesn't define one."""
PORTS = 65535
_EPHEMERAL, _PORTS = 61440, 4096
_METADATA_SECONDS = 5.0
_METADATA_TRIES = 3
_ABSENT = 404
_ROOT = Path("/")
_COUNTS = {
    "MEGASCALE_NUM_SLICES": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    "SKYPILOT_NUM_NODES": ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"),
    "SLURM_STEP_NUM_TASKS": ("SLURM_STEP_NODELIST", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK",),
    "PMI_SIZE": ("PMI_RANK",),
}
"""Variables with a number of processes or slices, each with the variables that identify this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Place of this process in its job."""

    by: str
    """Source of the description: ``Slurm``, ``Cloud TPU`` …"""
    count: int
    index: int
    coordinator: str
    """``HOST:PORT`` of process 0; empty if the platform doesn't provide it."""
    hosts: tuple[str, ...] = ()
    """Host of each process; empty if the platform doesn't list them."""
    local: int | None = None
    """Index among the processes of this host, where each process uses one GPU."""

    def name(self, index: int) -> str:
        """Name of a process for messages, with its host if known."""
        if len(self.hosts) == self.count:
            return f"process {index} on {self.hosts[index]}"
        return f"process {index}"


def find(environ: Mapping[str, str], root: Path = _ROOT) -> Member | None:
    """Place of this process in its job; None for a single process.

    Args:
        environ: Environment of the process.
        root: Root folder of the device files.

    Raises:
        OptionError: an explicit description is incomplete or invalid, or the platform describes a multi-process job
            without the coordinator or this process's index.
        RunError: the metadata server of a Cloud TPU VM doesn't answer.
    """
    if COUNT in environ or INDEX in environ:
        return _explicit(environ)
    looks = (_gke, _cloud_tpu, _skypilot, _slurm, _open_mpi, _mpich)
    member = next((place for look in looks if (place := look(environ, root)) is not None), None)
    if ADDRESS in environ:
        if member is None:
            raise OptionError(_missing(COUNT))
        member = replace(member, coordinator=_address(environ[ADDRESS]))
    if member is None:
        _check_whole(environ)
    if member is not None and not member.coordinator:
        raise OptionError(
            f"{member.by} describes process {member.index} of {member.count} but no coordinator; give --coordinator HOST:PORT of process 0 in every process"
        )
    return member


def belongs(environ: Mapping[str, str], root: Path = _ROOT) -> bool:
    """Whether this process belongs to a multi-process job, even if its description is incomplete."""
    return (
        ADDRESS in environ
        or _number(environ, COUNT) > 1
        or _number(environ, INDEX) > 0
        or len(_pod_hosts(environ)) > 1
        or any(_number(environ, name) > 1 for name in _COUNTS)
        or _cloud_tpu(environ, root) is not None
    )


def _check_whole(environ: Mapping[str, str]) -> None:
    """Checks that a process that no detector placed is not one of several, each of which would train alone."""
    many = {name: environ[name] for name in _COUNTS if _number(environ, name) > 1}
    parts = {name: _COUNTS[name] for name in many}
    if len(hosts := _pod_hosts(environ)) > 1:
        many["TPU_WORKER_HOSTNAMES"] = f"a list of {len(hosts)} hosts"
        parts["TPU_WORKER_HOSTNAMES"] = ("TPU_WORKER_ID",)
    for name, value in many.items():
        missing = next((part for part in parts[name] if not environ.get(part, "").strip()), None)
        if missing is not None:
            raise OptionError(
                f"{name} is {value}, and {missing} is not set, so this process's index in the job is unknown; set it, give --coordinator HOST:PORT --processes N --process I in every process, or unset {name} to train alone"
            )


def _explicit(environ: Mapping[str, str]) -> Member:
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in environ]
    if missing:
        raise OptionError(_missing(missing[0]))
    wrong = next((name for name in (COUNT, INDEX) if not environ[name].isdigit()), None)
    if wrong is not None:
        raise OptionError(f"{wrong} is {environ[wrong]!r}; give a non-negative integer")
    count, index = int(environ[COUNT]), int(environ[INDEX])
    if index >= count:
        raise OptionError(
            f"process is {index} of {count}, but indices start at 0; give {count - 1} or less"
        )
    return Member(
        by="an explicit coordinator",
        count=count,
        index=index,
        coordinator=_address(environ[ADDRESS]),
    )


def _missing(name: str) -> str:
    return f"{name} is not set, but a job of several processes needs {ADDRESS}, {COUNT} and {INDEX}; set all three in every process, or give --coordinator HOST:PORT --processes N --process I"


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= PORTS:
        raise OptionError(
            f"coordinator is {text!r}; give HOST:PORT of process 0 with a port from 1 to {PORTS}, such as 10.0.0.2:{PORT}"
        )
    return text


def _gke(environ: Mapping[str, str], root: Path) -> Member | None:
    """Pod of a TPU slice, from the variables of GKE (and of images that set the same ones)."""
    del root
    hosts = _pod_hosts(environ)
    slices = max(_number(environ, "MEGASCALE_NUM_SLICES"), 1)
    worker = environ.get("TPU_WORKER_ID", "")
    if len(hosts) * slices < 2 or not worker.isdigit():
        return None
    place = _in_slices(environ, hosts, int(worker))
    return replace(place, by="GKE" if "KUBERNETES_SERVICE_HOST" in environ else "TPU")


def _pod_hosts(environ: Mapping[str, str]) -> list[str]:
    """Hosts of this slice, without ports."""
    addresses = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    return [_host(part.strip()) for part in addresses.split(",") if part.strip()]


def _host(text: str) -> str:
    """``HOST`` of ``HOST[:PORT]``; IPv6 addresses are returned in brackets."""
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return f"[{text}]" if text.count(":") > 1 else text.partition(":")[0]


def _cloud_tpu(environ: Mapping[str, str], root: Path) -> Member | None:
    """Cloud TPU VM, from its metadata server."""
    chips = any((root / path).exists() for path in ("dev/accel0", "dev/vfio/0"))
    if not chips or "TPU_SKIP_MDS_QUERY" in environ or _pod_hosts(environ):
        return None
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    worker = _attribute(server, "agent-worker-number")
    endpoints = _attribute(server, "worker-network-endpoints")
    if not worker.isdigit() or not endpoints:
        return None
    lines = (line.partition(":") for line in _attribute(server, "tpu-env").splitlines())
    env = {name.strip(): value.strip().strip("'\"") for name, _, value in lines}
    # Entries are HOST or NAME:ID:ADDRESS.
    hosts = [endpoint.rpartition(":")[2] for endpoint in endpoints.split(",")]
    place = _in_slices(env, hosts, int(worker))
    return place if place.count > 1 else None


def _in_slices(env: Mapping[str, str], hosts: list[str], worker: int) -> Member:
    """Place of a worker in a job of one or more slices."""
    slices = max(_number(env, "MEGASCALE_NUM_SLICES"), 1)
    first = env.get("MEGASCALE_COORDINATOR_ADDRESS", "") if slices > 1 else hosts[0]
    return Member(
        by="Cloud TPU",
        count=len(hosts) * slices,
        index=_number(env, "MEGASCALE_SLICE_ID") * len(hosts) + worker,
        coordinator=f"{_host(first)}:{PORT}" if first else "",
        hosts=tuple(hosts) if slices == 1 else (),
    )


@cache
def _attribute(server: str, name: str) -> str:
    """Metadata attribute of this VM; empty if it doesn't exist, or outside Google Cloud, where the server has no address.

    Raises:
        RunError: the server doesn't answer: a host that took that for "alone" would train a copy of its own.
    """
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    why = ""
    for tries in range(_METADATA_TRIES):
        time.sleep(tries)
        try:
            with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
                return answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            if error.code == _ABSENT:
                return ""
            why = str(error)
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, socket.gaierror):
                return ""
            why = str(reason)
    raise RunError(
        f"this machine has TPU chips, and its metadata server {server} does not answer ({why}), so its place among the hosts of the slice is unknown; try again, or set TPU_SKIP_MDS_QUERY=1 to train on this host alone"
    )


def _skypilot(environ: Mapping[str, str], root: Path) -> Member | None:
    """Node of a SkyPilot task; tried after the detectors of TPU platforms."""
    del root
    hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
    index = environ.get("SKYPILOT_NODE_RANK", "")
    if len(hosts) < 2 or not index.isdigit():
        return None
    return Member(
        by="SkyPilot",
        count=len(hosts),
        index=int(index),
        coordinator=f"{hosts[0]}:{PORT}",
        hosts=tuple(hosts),
    )


def _slurm(environ: Mapping[str, str], root: Path) -> Member | None:
    """Task of a Slurm job step, started by srun; the batch script itself is a single process."""
    del root
    count, index = _number(environ, "SLURM_STEP_NUM_TASKS"), environ.get("SLURM_PROCID", "")
    nodes = slurm_hosts(environ.get("SLURM_STEP_NODELIST", ""))
    if count < 2 or not index.isdigit() or not nodes:
        return None
    # The port that JAX chooses, so that other programs of the job use the same one.
    port = _EPHEMERAL + _number(environ, "SLURM_JOB_ID") % _PORTS
    return Member(
        by="Slurm",
        count=count,
        index=int(index),
        coordinator=f"{nodes[0]}:{port}",
        hosts=_task_hosts(nodes, environ.get("SLURM_STEP_TASKS_PER_NODE", "")),
        local=_number(environ, "SLURM_LOCALID"),
    )


def slurm_hosts(text: str) -> list[str]:
    """Hosts of a list such as ``node[001-003,007],login1``."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", text):
        matched = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if matched is None:
            hosts.append(part)
            continue
        before, inside, after = matched.groups()
        for run in inside.split(","):
            first, _, last = run.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names = [f"{before}{number:0{len(first)}d}" for number in numbers]
            hosts += [name + end for name in names for end in slurm_hosts(after) or [""]]
    return hosts


def _task_hosts(nodes: list[str], tasks: str) -> tuple[str, ...]:
    """Host of each task, from counts such as ``2(x3),1``."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(number)] * int(times or 1)
    if len(counts) != len(nodes):
        return ()
    return tuple(node for node, n in zip(nodes, counts, strict=True) for _ in range(n))


def _open_mpi(environ: Mapping[str, str], root: Path) -> Member | None:
    del root
    count, index = _number(environ, "OMPI_COMM_WORLD_SIZE"), environ.get("OMPI_COMM_WORLD_RANK", "")
    if count < 2 or not index.isdigit():
        return None
    # Open MPI 4 sets the launcher's address; Open MPI 5 sets prterun-HOST-PID@JOB.
    launcher = environ.get("OMPI_MCA_orte_hnp_uri", "")
    space = environ.get("PMIX_NAMESPACE", "")
    match = re.search(r"tcp6?://\[?([^,:\]]+)", launcher) or re.match(
        r"(?:prterun|prte)-(.+)-\d+@", space
    )
    host = match.group(1) if match else ""
    if _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == count:
        host = "127.0.0.1"
    port = _EPHEMERAL + zlib.crc32((space or launcher).encode()) % _PORTS
    return Member(
        by="Open MPI",
        count=count,
        index=int(index),
        coordinator=f"{host}:{port}" if host else "",
        local=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
    )


def _mpich(environ: Mapping[str, str], root: Path) -> Member | None:
    """MPICH, Intel MPI and others with the same process manager, which provides no address."""
    del root
    count, index = _number(environ, "PMI_SIZE"), environ.get("PMI_RANK", "")
    if count < 2 or not index.isdigit():
        return None
    return Member(
        by="MPI",
        count=count,
        index=int(index),
        coordinator="",
        local=_number(environ, "MPI_LOCALRANKID"),
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 0
