"""Runs JAX in a child process with a time limit; its failure is a value, not an exception."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from systolic.doctor.machine import Death, Machine, Measured, Unmeasured

LIMIT_SECONDS = 120.0
_LONGEST_COMPLAINT = 300
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} [\d:.]+\s+\d+ [\w./-]+:\d+\] ")
_NOISE = re.compile(r"^(\s|Traceback|During handling|The above|-{5}|For simplicity|\*\*\*)")

Outcome = Measured | Unmeasured


def measure(
    machine: Machine,
    limit_seconds: float = LIMIT_SECONDS,
    command: Sequence[str] = (sys.executable, "-m", "systolic.doctor.child"),
) -> Outcome:
    """Runs the measuring child on this machine and reads its result.

    The child gets the unchanged environment, so it has the same problems as training.
    Without a TPU, variables keep libtpu from querying a metadata server and from locking.
    """
    quiet = (
        {} if machine.tpu_chips else {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    )
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run(command, {**os.environ, **quiet}, out, err, limit_seconds)
        seconds = round(time.monotonic() - start, 1)
        return outcome(code, _read(out), _read(err), seconds)


def outcome(code: int | None, out: str, err: str, seconds: float) -> Outcome:
    """Interprets the child's exit code (``None`` if it was killed after the time limit) and output."""
    complaint = last_line(err)
    if code is None:
        return Unmeasured(death=Death.timed_out, seconds=seconds, complaint=complaint)
    if code != 0:
        death = Death.killed if code < 0 else Death.failed
        return Unmeasured(death=death, seconds=seconds, exit_code=code, complaint=complaint)
    try:
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return Measured(seconds=seconds, complaint=complaint, **result)
    except (IndexError, ValueError, TypeError):
        said = complaint or last_line(out)
        return Unmeasured(death=Death.failed, seconds=seconds, exit_code=code, complaint=said)


def last_line(text: str) -> str:
    """Last informative line, without the logger's prefix."""
    lines = [line for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    said = _LOG_PREFIX.sub("", lines[-1]).strip() if lines else ""
    return said if len(said) <= _LONGEST_COMPLAINT else said[: _LONGEST_COMPLAINT - 1] + "…"


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes],
    err: IO[bytes],
    limit_seconds: float,
) -> int | None:
    """Exit code of the child, or ``None`` if the time limit passed and its process group was killed."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        err.write(f"{error}\n".encode())
        return 127
    try:
        return child.wait(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
