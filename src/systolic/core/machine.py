"""This machine's cores, environment and memory: workers that end with their parent, settings that XLA reads, memory that the C library keeps."""

import contextlib
import ctypes
import glob
import itertools
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from systolic.core.reporter import reporter

HUGE_PAGES = "glibc.malloc.hugetlb"
"""Tunable of glibc: 1 asks the kernel for huge pages."""
STARTED_AGAIN = "_SYSTOLIC_STARTED_AGAIN"
"""Variable with the number of the process that started itself again; of a privileged Python glibc drops its own."""
POLL_SECONDS = 0.5
_FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
_SOUND = f"{_FUSIONS}=dot,individual_dot,individual_convolution"
_UNSOUND = ((0, 11, 2), (0, 12, 0, 1))
"""First and last jaxlib seen to compute NaN on a CPU from two convolutions in bfloat16 (docs/dependencies.md)."""


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def bounded(workers: int) -> int:
    """Number of worker processes, at most one a core: more would only take memory."""
    return min(workers, num_cores())


def bounded_workers(workers: int) -> int:
    """The worker processes that ``--workers`` names, at most one a core; a bound is a warning."""
    most = bounded(workers)
    if most < workers:
        reporter().warn(
            f"--workers {workers} is more than the {most} cores of this machine; {most} work at once"
        )
    return most


def end_with(parent: int) -> None:
    """Ends this process soon after ``parent``, which started it, has ended in whatever way."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def set_up_xla() -> None:
    """Writes to the environment what XLA reads once a process, before JAX looks for devices."""
    _quiet_libtpu()
    leave_cuda_out()
    flags_before = os.environ.get("XLA_FLAGS", "")
    if (flags := sound_flags(flags_before)) != flags_before:
        os.environ["XLA_FLAGS"] = flags


def take_huge_pages() -> None:
    """Starts ``systolic train`` again, as the same process, with huge pages for its large arrays.

    XLA asks glibc for the memory of each step on a CPU anew, and the kernel hands it out in pages of 4 KiB, a sixth of a step's
    time. With its tunable ``glibc.malloc.hugetlb`` glibc asks for pages of 2 MiB, which it reads once, when a program starts.
    It goes on as it is where the variable is set, where the kernel gives such pages to all or to none, under a debugger, and
    without glibc 2.35 or newer.
    """
    own = os.environ.get("GLIBC_TUNABLES", "")
    gains = len(sys.argv) > 1 and sys.argv[1] == "train" and sys.gettrace() is None
    again = os.environ.get(STARTED_AGAIN) == str(os.getpid())
    if not gains or again or not _is_the_command(sys.argv[0]):
        return
    if HUGE_PAGES in own or not takes_advice():
        return
    tunables = ":".join(filter(None, (own, f"{HUGE_PAGES}=1")))
    words = [sys.executable, *sys.orig_argv[1:]]
    marks = {"GLIBC_TUNABLES": tunables, STARTED_AGAIN: str(os.getpid())}
    with contextlib.suppress(OSError):  # It goes on as it is.
        os.execve(sys.executable, words, {**os.environ, **marks})


def _is_the_command(program: str) -> bool:
    """Whether a program is ``systolic`` or ``python -m systolic`` and no other, which a new start would run twice, or lose where it came by standard input."""
    path, words = Path(program), sys.orig_argv
    if path.name == "__main__.py" and path.parent.name == "systolic":
        started = any(
            word == "systolic" and before.startswith("-") and before.endswith("m")
            for before, word in itertools.pairwise(words)
        )
    else:
        started = path.name == "systolic" and program in words
    return started and path.is_file()


def takes_advice(mode: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Whether the kernel gives huge pages to programs that ask for them, and glibc can ask."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        newest = tuple(int(number) for number in version.split("."))
        return name == "glibc" and newest >= (2, 35) and "[madvise]" in mode.read_text()
    except (OSError, ValueError):  # of a system without glibc, or without such pages
        return False


def _quiet_libtpu() -> None:
    """Stops an installed libtpu from searching for a TPU, for seconds and with warnings, on a machine without an accelerator.

    What a user has set stays.
    """
    if any(os.path.exists(path) for path in ("/dev/accel0", "/dev/vfio/0")):
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if os.path.exists("/dev/nvidia0") or "JAX_PLATFORMS" in os.environ:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")
    # jax reads the variable when it is imported, which a user's script may have done before.
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


def leave_cuda_out() -> None:
    """Keeps JAX from loading an installed CUDA plugin on a machine without an NVIDIA GPU, where it would only print warnings.

    The extra ``gpu-forecast`` installs it for the compiling process, which loads it.
    """
    if any(glob.glob(f"/dev/{name}*") for name in ("nvidia", "nvhost", "nvgpu", "dxg")):
        return
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        plugin = ModuleType(name)
        vars(plugin)["initialize"] = lambda: None
        sys.modules.setdefault(name, plugin)
    absent: Any = None  # an import of it fails
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        sys.modules.setdefault(name, absent)


def sound_flags(flags: str) -> str:
    """``XLA_FLAGS`` that leave products and convolutions to YNNPACK one by one, where a jaxlib fuses what is around them wrongly."""
    from importlib.metadata import version

    numbers = re.match(
        r"\d+(\.\d+)*", version("jaxlib")
    )  # what follows says which candidate or build
    installed = tuple(map(int, numbers[0].split("."))) if numbers else ()
    if _FUSIONS in flags or not _UNSOUND[0] <= installed <= _UNSOUND[1]:
        return flags
    return f"{flags} {_SOUND}".strip()


def flags_of_user(flags: str) -> str:
    """``XLA_FLAGS`` without what :func:`sound_flags` adds, for a program whose jaxlib may not know it and then aborts."""
    return flags.removesuffix(_SOUND).strip()


def trim() -> None:
    """Returns freed memory of the heap to the system; nothing where the C library has no such call (glibc has).

    A compile frees some hundred MB in pieces, which would stay in the peak of the steps that follow.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
