"""``systolic train`` in processes of their own: killed, on other numbers of devices, several at once."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = "tests/train/tiny.py:job"


def environment(cache: Path, num_devices: int = 1) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "XDG_CACHE_HOME": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


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
