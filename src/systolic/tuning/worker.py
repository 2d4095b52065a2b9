"""Names of processes that run trials, by which others see whether one has ended."""

import os
import socket

import psutil


def this_worker() -> str:
    """A name for this process that no other has, on any machine."""
    return _name(os.getpid())


def is_gone(worker: str) -> bool:
    """Whether a worker was a process of this machine that has ended."""
    host, _, rest = worker.rpartition("/")[0].rpartition("/")
    if host != socket.gethostname() or not rest.isdigit():
        return False
    try:
        return (
            psutil.Process(int(rest)).status() == psutil.STATUS_ZOMBIE or _name(int(rest)) != worker
        )
    except psutil.NoSuchProcess:
        return True


def _name(pid: int) -> str:
    """Machine, process and its start, which tells it from a later one of the same number."""
    return f"{socket.gethostname()}/{pid}/{psutil.Process(pid).create_time():.2f}"
