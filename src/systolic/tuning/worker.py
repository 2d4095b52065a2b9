"""Names of processes that run trials, by which others see whether one has ended."""

import os
import socket
import uuid
from functools import cache
from pathlib import Path

import psutil


def this_worker() -> str:
    """A name for this process that no other has, on any machine."""
    return _name(os.getpid())


def is_gone(worker: str) -> bool:
    """Whether a worker was a process that this one could see, and has ended."""
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
    """Machine, process and its start, which tells it from a later one of the same number."""
    return f"{_here()}/{pid}/{psutil.Process(pid).create_time():.2f}"


@cache
def _here() -> str:
    """Machine since its start, and numbers of processes: containers have one name and one kernel and other numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux, where nothing hides processes
        boot, numbers = f"{uuid.getnode():x}", "all"
    return f"{socket.gethostname()}/{boot}/{numbers}"
