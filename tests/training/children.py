"""``systolic train`` in processes of their own: killed, on other numbers of devices, several at once."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.devices import flags

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 900
"""After which processes that do not end fail a test."""
RECIPE = "tests/training/tiny.py:job"


def environment(cache: Path, num_devices: int = 1) -> dict[str, str]:
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(num_devices), "XDG_CACHE_HOME": str(cache)}
    return os.environ | own


def start(args: Sequence[str], environ: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "systolic", "train", *args],
        cwd=ROOT,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """Its stdout, after it has ended with ``code``."""
    out, err = process.communicate()
    assert process.returncode == code, err
    return out


def start_together(
    module: Sequence[str], environs: Sequence[dict[str, str]]
) -> "list[subprocess.Popen[str]]":
    """A process of one job for each environment; ``module`` is as in :func:`together`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(len(environs)),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", *(part.replace("{}", str(number)) for part in module)],
            cwd=ROOT,
            env=environ | job | {"JAX_PROCESS_ID": str(number)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, environ in enumerate(environs)
    ]


def together(
    module: Sequence[str], environ: dict[str, str], count: int, code: int = 0
) -> list[str]:
    """What each of ``count`` processes of one job prints; all end with ``code``.

    ``module`` is what follows ``python -m``, with ``{}`` for the number of the process.
    """
    return finish_together(start_together(module, [environ] * count), code)


def finish_together(processes: "Sequence[subprocess.Popen[str]]", code: int = 0) -> list[str]:
    """What each of the processes of one job prints; all end with ``code``."""
    try:
        told = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    finally:
        # Processes that wait for each other would wait for ever.
        for process in processes:
            process.kill()
    # One that fails leaves the others waiting: what all say is needed to see why.
    assert [process.returncode for process in processes] == [code] * len(processes), told
    return [out for out, _ in told]
