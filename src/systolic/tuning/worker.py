"""Names of worker processes, from which others tell whether a worker has ended."""

import os
import socket
import uuid
from functools import cache
from pathlib import Path

import psutil


def this_worker() -> str:
    """Name of this process, unique across machines."""
    return _name(os.getpid())


def is_gone(worker: str) -> bool:
    """Whether a worker has ended; False for a worker of another machine or container."""
    there, _, rest = worker.rpartition("/")[0].rpartition("/")
    if there != _here() or not rest.isdigit():
        return False
    try:
        return (
            psutil.Process(int(rest)).status() == psutil.STATUS_ZOMBIE or _name(int(rest)) != worker
        )
    except psutil.NoSuchProcess:
        return True


def _name(pid: int) -> str:
    """Machine, process id and start time, which tells apart processes that reuse an id."""
    return f"{_here()}/{pid}/{psutil.Process(pid).create_time():.2f}"


@cache
def _here() -> str:
    """Host name, boot id and PID namespace; containers can share the first two, and have their own process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: no PID namespaces
        boot, numbers = f"{uuid.getnode():x}", "all"
    return f"{socket.gethostname()}/{boot}/{numbers}"
