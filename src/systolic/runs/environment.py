"""Machine, versions and flags of a run, to explain later why two runs differ."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

_VARIABLES = ("XLA_", "JAX_", "LIBTPU", "TPU_", "CUDA_VISIBLE_DEVICES", "NCCL_")
_GIT_SECONDS = 10


def environment(devices: Sequence[str], flags: Sequence[str] = ()) -> dict[str, Any]:
    """This process's environment as JSON.

    Args:
        devices: the devices as the caller names them, e.g. ``["TPU v5 lite", ...]``.
        flags: of the compiler, given to each program.
    """
    import psutil

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": list(devices),
        "flags": list(flags),
        "packages": packages(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "git": git(),
        "argv": list(sys.argv),
        "pid": os.getpid(),
    }


@cache
def packages() -> dict[str, str]:
    """Versions of all installed packages by name; read once in a process, which may train several runs."""
    import importlib.metadata

    # Each access to an attribute parses the package's whole description again.
    known = [package.metadata for package in importlib.metadata.distributions()]
    versions = {
        str(metadata["Name"]): str(metadata["Version"]) for metadata in known if metadata["Name"]
    }
    return dict(sorted(versions.items(), key=lambda pair: pair[0].lower()))


def git() -> dict[str, Any] | None:
    """The commit of the current folder and whether files differ from it; ``None`` outside a repository."""
    if shutil.which("git") is None:
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
    )
    return result.stdout.strip()
