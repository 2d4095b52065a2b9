"""The compiler's dump, which has the schedule before code generation.

Passes, scheduling and buffer assignment take libtpu seconds; code for each fusion, where the cycle
estimates come from, takes minutes. The dump has the whole schedule and its exact memory at the end
of the first part.
"""

import contextlib
import gzip
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from systolic.chips import slice

SCHEDULED = ".after_optimizations.txt"
"""Written once buffers are assigned. XLA writes the same text again, ``…_after_buffer_assignment.txt``, when it
has compiled what runs on SparseCores: minutes later for a large model on TPU7x."""
LAST = "after_optimizations-memory-usage-report.pb"
"""The last file that XLA writes with the schedule, after :data:`PROTO` and :data:`USAGE`."""
FOR_CPU = "cpu_after_optimizations.txt"
FOR_GPU = "gpu_after_optimizations.txt"
"""The same file for a GPU, with the compute capability before it; code for all kernels takes seven times as long as this."""
REFUSED = "oom_intermediate_module.txt"
PROTO = "after_optimizations.hlo.pb"
"""The schedule and its buffers as HloProto."""
USAGE = "after_optimizations-memory-usage-report.txt"
"""Ending on any platform, as with :data:`PROTO`; a CPU's names have ``cpu_`` before it."""
SCHEDULE_ONLY = "schedule_only"
"""Systolic's own compile option: stop at the schedule."""
POLL_SECONDS = 0.05
LEAST_PRIORITY = 19
"""Lowest priority of a thread on Linux."""
_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")


def dump_options(folder: Path) -> dict[str, Any]:
    """Compile options that make XLA write its modules into ``folder``, as text and as messages."""
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_hlo_as_proto": True,
    }


def shorter_search(on: str) -> tuple[str, ...]:
    """Flags for a faster schedule on a slice whose compiler otherwise searches for minutes.

    On TPU7x XLA searches the windows of each matmul for every remaining size of VMEM, for code that a schedule alone
    does not have: 50 of 58 CPU seconds for 405B. Without it that step is 5e-6 shorter and its memory 2e-6 smaller;
    a small model has fewer arrays in VMEM (step +0.13 %).
    """
    if slice(on).chip.name != "tpu7x":
        return ()
    return ("--xla_tpu_override_scavenge_vmem_for_fusions=false",)


def schedule(
    lowered: Any,
    options: Mapping[str, Any],
    folder: Path,
    limit_bytes: float,
    ending: str = SCHEDULED,
) -> str:
    """The scheduled module of ``lowered``, without cycle estimates; the compile continues in its thread.

    The caller must end the process, since a compile can't be stopped otherwise. XLA writes the schedule before it
    compares its memory with the device's: above ``limit_bytes`` this waits for the compiler's own verdict. ``ending`` is that of the
    schedule's file.

    Raises:
        Exception: an error of the compiler before it has a schedule, such as out of memory.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            lowered.compile(compiler_options={**options, **dump_options(folder)})
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    size = -1
    while True:
        ended = not worker.is_alive()
        path = _written(folder, ending) if ended or _written(folder, LAST) else None
        if path is not None:
            now = path.stat().st_size
            settled = now == size or (ended and not failed)
            if settled and now and is_whole(text := path.read_text()):
                if not _is_above(folder, limit_bytes):
                    step_back()
                    return text
                worker.join()
                if failed:
                    raise failed[0]
                return text
            size = now
        if ended and failed:
            raise failed[0]
        if ended:
            # XLA continues when it can't write (a full disk, a limit on file sizes).
            what = "no schedule" if path is None else "only a part of the schedule"
            raise RuntimeError(f"the compiler ended and wrote {what} into {folder}")
        time.sleep(POLL_SECONDS)


def is_whole(text: str) -> bool:
    """Whether a module's text was written to its end: the computation of the entry is its last, and ends in a line of its own.

    A text that is cut off may end in a brace, too: after attributes, or after another computation.
    """
    return "\nENTRY " in text and text.rstrip().rpartition("\n")[2].startswith("}")


def _is_above(folder: Path, limit_bytes: float) -> bool:
    """Whether the schedule needs more memory than a program may use; XLA refuses it next."""
    used = peak_bytes(folder)
    return used is not None and used > limit_bytes


def step_back() -> None:
    """Gives the compile's threads the lowest priority, so that they run only on idle cores.

    Otherwise they take all cores while the schedule is read. Threads that they start inherit the priority.
    """
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # no such folder off Linux
        for task in os.listdir("/proc/self/task"):
            if int(task) != own:
                with contextlib.suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, int(task), LEAST_PRIORITY)


def peak_bytes(folder: Path) -> int | None:
    """Device memory of the schedule from the compiler's report; None without one."""
    path = _written(folder, USAGE)
    return None if path is None else used_bytes(path.read_text())


def used_bytes(report: str) -> int | None:
    """Device memory that the compiler compares with the chip's, by the text of its report; None of another text."""
    match = _TOTAL.search(report)
    return int(match[1]) if match else None


def scheduled_for_cpu(folder: Path) -> str | None:
    """The scheduled module from XLA's CPU compiler; None while there is none."""
    path = _written(folder, FOR_CPU)
    return path.read_text() if path is not None else None


def refused_schedule(folder: Path) -> str | None:
    """The scheduled module that did not fit; None if the compiler gave up before it had one."""
    path = _written(folder, REFUSED)
    return path.read_text() if path is not None else None


def proto(folder: Path) -> bytes | None:
    """The schedule with its buffers as a serialized HloProto; None if the compiler wrote none."""
    path = _written(folder, PROTO)
    return path.read_bytes() if path is not None else None


def keep(text: str) -> bytes:
    """Compressed text of a module, as in the store."""
    return gzip.compress(text.encode(), 3)


def _written(folder: Path, ending: str) -> Path | None:
    """The largest dump with an ending, which is the program's; the runtime's modules are small."""
    dumps = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    return dumps[-1] if dumps else None
