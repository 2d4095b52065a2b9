"""Processes of modules of this package, in this or another environment's Python, on the CPU."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from systolic.core.errors import OptionError

_ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "-1",
}
"""Conversion runs on the CPU, beside whatever uses the machine's accelerator."""

REASONS = {
    signal.SIGKILL: ", as the system does where memory is full",
    signal.SIGSEGV: ", a fault of a library",
    signal.SIGABRT: ", as a library does that refuses its input",
}
"""What a signal tells of its cause."""
PROGRESS = r"\d+%\|"
"""Part of a line that draws how far something is."""


def run_module(
    python: str, module: str, args: Sequence[str], log: Path, path: Sequence[Path] = ()
) -> int:
    """Exit code of a module's process; negative for a signal. What it prints goes into ``log``, and it
    imports from the folders of ``path`` before the environment's own.

    Raises:
        OptionError: there is no such interpreter.
    """
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | _ENVIRONMENT
    # Of this environment only the package itself: another interpreter has its own libraries.
    folders = [str(root), *map(str, path), os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    try:
        with log.open("wb") as out:
            return subprocess.run(
                [python, "-m", module, *args], env=env, stdout=out, stderr=out, check=False
            ).returncode
    except OSError as error:
        raise OptionError(
            f"{python} can't be started ({error.strerror}); give the path of a Python interpreter"
        ) from error


def ended(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        found = signal.Signals(-code)
        return f"was ended by {found.name}{REASONS.get(found, '')}"
    return f"ended with exit code {code}"


def last_line(log: Path) -> str:
    """What a process printed last, in words; bars of progress are none."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", log.read_text(errors="replace"))]
    lines = [line for line in lines if line and not re.search(PROGRESS, line)]
    return (
        f"its last line: {lines[-1][:300]}"
        if lines
        else "it printed nothing; try it with less in memory"
    )
