"""Processes of converters, and packages for them whose requirements do not fit those of this environment.

``python -m systolic.formats.packages`` installs all of them ahead of time, as for an image without a network.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from systolic.core.errors import OptionError, RunError
from systolic.core.files import cache_home, digest, fault_of

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
"""Likely causes of signals."""

PROGRESS = r"\d+%\|"
"""Part of a line that draws how far something is."""
FOLDER = "packages"
"""Name of the folder of all sets in the cache."""
TOLD = 300
"""Most characters of pip's message."""
SETS: Mapping[str, tuple[str, ...]] = {
    "litert": (
        "litert-converter==0.5.0",
        "ai-edge-litert==2.3.0",
        "ai-edge-quantizer==0.10.0",
        "immutabledict==4.3.1",
        "tqdm==4.70.1",
    ),
    "onnx": (
        "jax2onnx==0.17.1",
        "onnx==1.23.2",
        "onnx-ir==1.1.0",
        "onnxruntime==1.32.0",
        "sympy==1.14.0",
        "mpmath==1.3.0",
    ),
}
"""Purpose to packages. litert-converter asks, through xdsl, for an older typing-extensions than tyro does, and jax2onnx for an
older orbax-checkpoint than this package; neither imports what it asks for there."""


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
        ending = signal.Signals(-code)
        return f"was ended by {ending.name}{REASONS.get(ending, '')}"
    return f"ended with exit code {code}"


def last_line(log: Path) -> str:
    """The last line that a process printed, in words, without progress bars."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", log.read_text(errors="replace"))]
    lines = [line for line in lines if line and not re.search(PROGRESS, line)]
    return (
        f"its last line: {lines[-1][:300]}"
        if lines
        else "it printed nothing; try it with less in memory"
    )


def installed(purpose: str) -> Path | None:
    """The folder of a set of packages, if they were installed before."""
    folder = _folder(purpose)
    return folder if folder.is_dir() else None


def _folder(purpose: str) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_home() / FOLDER / f"{purpose}-{digest([version, *SETS[purpose]])}"


def package_folder(purpose: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder with the packages of a purpose, installed by pip when it is first asked for.

    Their own requirements are not installed: what they import and this environment lacks is in the list.

    Args:
        purpose: One of :data:`SETS`.
        say: Told that pip runs.

    Raises:
        RunError: pip is missing or fails, or the disk is full; nothing is left.
    """
    if (folder := installed(purpose)) is not None:
        return folder
    final, packages = _folder(purpose), SETS[purpose]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _alone(final.parent / f".{final.name}.lock"):
            if not final.is_dir():  # another process was faster
                say(f"installing {', '.join(packages)} into {final}, once")
                _install(packages, final)
    except OSError as error:
        raise RunError(
            f"packages for {purpose} could not be written to {final.parent} ({fault_of(error)}); free some space, or set SYSTOLIC_CACHE to another folder"
        ) from error
    return final


def _install(packages: Sequence[str], final: Path) -> None:
    """Installs into a folder beside the final one, which it becomes when it is whole.

    Raises:
        RunError: pip is missing or fails.
    """
    scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--target", str(scratch / "made"), *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line]
            lines = lines or [line for line in done.stderr.splitlines() if line.strip()]
            reason = (lines or [f"exit code {done.returncode}"])[-1].removeprefix("ERROR: ")[:TOLD]
            raise RunError(
                f"pip could not install {' '.join(packages)}: {reason}; connect to a package index (PIP_INDEX_URL), or run: {sys.executable} -m pip install --no-deps --target {final} {' '.join(packages)}"
            )
        os.replace(scratch / "made", final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Generator[None]:
    """Waits for other processes that install the same."""
    with lock.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for name in SETS:
        print(package_folder(name, print))
