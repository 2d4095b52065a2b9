"""Stops a launch through the platform's own client."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from systolic.core.errors import RunError
from systolic.launching import GONE
from systolic.launching.supervisor import SAVE_SECONDS
from systolic.session.clients import call, check_client, code_of, failed
from systolic.session.launch_phase import check_here, phase
from systolic.session.launched import (
    LOCAL,
    POLL_SECONDS,
    PROCESS,
    Launched,
    keep,
    read_record,
    utc_now,
)

NOTHING = (
    "Error from server (NotFound): ",
    "No resources found",
    "error: the server doesn't have a resource type",
)
"""Messages of kubectl when there is nothing to delete."""
NOT_SUBMITTED = "written, not submitted; nothing to stop"


def stop(launched: Launched) -> str:
    """Asks the training to save, then ends the launch; returns what happened.

    Raises:
        RunError: the client is missing or fails, or found nothing and may have looked in the wrong context, or the
            launch runs on another host.
    """
    check_here(launched)
    if launched.submitted is None and not _has_client(launched):
        return NOT_SUBMITTED
    if launched.untouched:
        keep(replace(launched, stopped=utc_now()))
        return "submitting had failed before anything was created; nothing to stop"
    if launched.via == LOCAL:
        return _stop_local(launched)
    if launched.detached and launched.alive():
        # Without an answer from the client nothing could be deleted, neither here nor by the script killed below.
        call(launched.path, launched.commands["status"])
        # The script would request the machines again.
        os.killpg(read_record(launched.path / PROCESS)["pid"], signal.SIGKILL)
    found = [_end(launched, words) for words in launched.commands["stop"]]
    if launched.submitted is None and not any(found):
        return NOT_SUBMITTED
    by_kubectl = launched.commands["stop"][0][0] == "kubectl"
    if not any(found) and by_kubectl and not launched.place:
        raise RunError(
            f"kubectl finds nothing of {launched.name} in its current context; select the launch's with kubectl config use-context CONTEXT"
        )
    keep(replace(launched, stopped=utc_now()))
    where = f" ({launched.place})" if launched.place else ""
    return "stopped" if any(found) else f"already gone, nothing to stop{where}"


def _has_client(launched: Launched) -> bool:
    """Whether the client is here by which the user may have submitted a launch by hand."""
    return launched.via != LOCAL and shutil.which(launched.commands["stop"][0][0]) is not None


def _end(launched: Launched, words: Sequence[str]) -> bool:
    """Runs a command that ends a launch; False if there was nothing to end.

    Raises:
        RunError: the command fails for another reason.
    """
    check_client(words[0])
    if words[0] != "kubectl":
        code = code_of(launched.path, words)
        if code not in (0, GONE):
            raise failed(launched.path, words, code)
        return code == 0
    done = subprocess.run(words, cwd=launched.path, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout + done.stderr)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
    if done.returncode and not all(line.startswith(NOTHING) for line in errors if line):
        raise failed(launched.path, words, done.returncode)
    lines = [*done.stdout.splitlines(), *errors]
    return not all(line.startswith(NOTHING) for line in lines if line)


def _stop_local(launched: Launched) -> str:
    if not launched.alive():
        return f"not running ({phase(launched)['phase']})"
    pid = read_record(launched.path / PROCESS)["pid"]
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_SECONDS + 10
    while launched.alive():
        if time.monotonic() > deadline:
            raise RunError(f"{launched.name} did not end; its supervisor is process {pid}")
        time.sleep(POLL_SECONDS)
    return "stopped"
