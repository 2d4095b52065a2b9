"""Stops a launch through the platform's own client."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from systolic.artifact import manifest
from systolic.core.errors import RunError
from systolic.launching import GONE
from systolic.launching.clients import call, check_client, code_of, failed
from systolic.launching.docker import KILLED
from systolic.launching.record import (
    LOCAL,
    POLL_SECONDS,
    PROCESS,
    Launched,
    keep,
    read_record,
    utc_now,
)
from systolic.launching.state import check_here, phase
from systolic.launching.supervisor import SAVE_SECONDS, unsaved

NOTHING = (
    "Error from server (NotFound): ",
    "No resources found",
    "error: the server doesn't have a resource type",
)
"""Messages of kubectl when there is nothing to delete."""
NOT_SUBMITTED = "written, not submitted; nothing to stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """What a stop has done."""

    text: str
    """One line for the user."""
    saved: bool = True
    """Whether the training had saved, as far as this machine knows."""


def stop(launched: Launched) -> Stopped:
    """Asks the training to save, then ends the launch; returns what happened.

    Raises:
        RunError: the client is missing or fails, or found nothing and may have looked in the wrong context, or the
            launch runs on another host.
    """
    check_here(launched)
    if launched.submitted is None and not _has_client(launched):
        return Stopped(text=NOT_SUBMITTED)
    if launched.untouched:
        keep(replace(launched, stopped=utc_now()))
        return Stopped(text="submitting had failed before anything was created; nothing to stop")
    if launched.via == LOCAL:
        return _stop_local(launched)
    if launched.detached and launched.alive():
        # Without an answer from the client nothing could be deleted, neither here nor by the script killed below.
        call(launched.path, launched.commands["status"])
        # The script would request the machines again.
        os.killpg(read_record(launched.path / PROCESS)["pid"], signal.SIGKILL)
    left = _has_left_queue(launched)
    codes = [GONE if left else _end(launched, words) for words in launched.commands["stop"]]
    found = any(code != GONE for code in codes)
    if launched.submitted is None and not found:
        return Stopped(text=NOT_SUBMITTED)
    by_kubectl = launched.commands["stop"][0][0] == "kubectl"
    if not found and by_kubectl and not launched.place:
        raise RunError(
            f"kubectl finds nothing of {launched.name} in its current context; select the launch's with kubectl config use-context CONTEXT"
        )
    keep(replace(launched, stopped=utc_now()))
    if KILLED in codes:
        return _unsaved(launched, "the container was killed before the training had saved")
    where = f" ({launched.place})" if launched.place else ""
    return Stopped(text="stopped" if found else f"already gone, nothing to stop{where}")


def _unsaved(launched: Launched, why: str) -> Stopped:
    """Result of a stop after which the run lacks the last steps."""
    checkpoints = Path(launched.run) / "checkpoints"
    steps = [int(p.name) for p in checkpoints.glob("*") if p.name.isdigit() and manifest.is_at(p)]
    kept = f"its newest checkpoint is of step {max(steps)}" if steps else "it has no checkpoint"
    return Stopped(text=f"stopped; {why}; run {launched.run}: {kept}", saved=False)


def _has_left_queue(launched: Launched) -> bool:
    """Whether Slurm has no job of a launch, which scancel does not report.

    Raises:
        RunError: squeue fails.
    """
    words = [*launched.commands["status"], "--noheader"]
    if words[0] != "squeue":
        return False
    check_client(words[0])
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise failed(launched.path, words, done.returncode)
    return not done.stdout.strip()


def _has_client(launched: Launched) -> bool:
    """Whether the client is here by which the user may have submitted a launch by hand."""
    return launched.via != LOCAL and shutil.which(launched.commands["stop"][0][0]) is not None


def _end(launched: Launched, words: Sequence[str]) -> int:
    """Runs a command that ends a launch; returns 0, GONE if there was nothing to end, or KILLED.

    Raises:
        RunError: the command fails for another reason.
    """
    check_client(words[0])
    if words[0] != "kubectl":
        code = code_of(launched.path, words)
        if code not in (0, GONE, KILLED):
            raise failed(launched.path, words, code)
        return code
    done = subprocess.run(words, cwd=launched.path, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout + done.stderr)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
    if done.returncode and not all(line.startswith(NOTHING) for line in errors if line):
        raise failed(launched.path, words, done.returncode)
    lines = [*done.stdout.splitlines(), *errors]
    return GONE if all(line.startswith(NOTHING) for line in lines if line) else 0


def _stop_local(launched: Launched) -> Stopped:
    if not launched.alive():
        return Stopped(text=f"not running ({phase(launched)['phase']})")
    pid = read_record(launched.path / PROCESS)["pid"]
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_SECONDS + 10
    while launched.alive():
        if time.monotonic() > deadline:
            raise RunError(f"{launched.name} did not end; its supervisor is process {pid}")
        time.sleep(POLL_SECONDS)
    why = unsaved(phase(launched).get("codes", ()))
    return _unsaved(launched, why) if why else Stopped(text="stopped")
