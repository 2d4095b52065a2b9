"""State of a launch, as this machine knows it."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from systolic.core.errors import RunError
from systolic.launching.record import ENDED, LOCAL, PROCESS, Launched, read_record
from systolic.launching.supervisor import STATE

ELSEWHERE = "elsewhere"
"""Phase of a launch whose process is on another host, so that it is not visible whether it is running."""
WRITTEN = "written"
"""Phase of a launch whose files are written, and that was not submitted."""
SUBMIT_FAILED = "submit failed"
"""Phase of a launch that could not be submitted; what was created before that is still there."""


def phase(launched: Launched) -> dict[str, Any]:
    """State of a launch as this machine knows it: ``phase``, and for local ones processes and restarts."""
    if launched.stopped:
        return {"phase": "stopped"}
    if launched.trouble:
        return {"phase": "unknown"}
    if launched.submitted is None:
        return {"phase": WRITTEN}
    if launched.failed:
        return {"phase": SUBMIT_FAILED, "why": launched.failed}
    if words := launched.commands.get("state"):
        return _told(words)
    if not launched.detached:
        return {"phase": "submitted"}
    alive = launched.alive()
    lost = {"phase": ELSEWHERE, "host": launched.host} if launched.host else {"phase": "lost"}
    if launched.via != LOCAL:
        return {"phase": "running"} if alive else _ended(launched) or lost
    state = read_record(launched.path / STATE)
    if "phase" not in state or state["pid"] != read_record(launched.path / PROCESS).get("pid"):
        # This supervisor has written nothing yet; the file, if any, is from the one before.
        return {"phase": "starting"} if alive else lost
    if not alive and state["phase"] == "running":
        return {**state, **lost}
    return state


def check_here(launched: Launched) -> None:
    """Checks that the process of a launch that has not ended is not on another host.

    Raises:
        RunError: it is on another host.
    """
    if phase(launched)["phase"] == ELSEWHERE:
        raise RunError(
            f"{launched.name} runs on {launched.host} and is not visible from here; run systolic stop {launched.name} on {launched.host}, or if that host is gone: rm {shlex.quote(str(launched.path / PROCESS))}"
        )


def _ended(launched: Launched) -> dict[str, Any]:
    """State of a script that ran as long as the training and has ended; empty if it left no exit code."""
    path = launched.path / ENDED
    text = path.read_text().strip() if path.exists() else ""
    return _after(int(text)) if text.isdigit() else {}


def _after(code: int) -> dict[str, Any]:
    return {"phase": "failed", "code": code} if code else {"phase": "done"}


def _told(words: Sequence[str]) -> dict[str, Any]:
    """State of a container by the client on this machine; submitted if the client does not answer."""
    if shutil.which(words[0]) is None:
        return {"phase": "submitted"}
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"phase": "submitted"}
    state, _, text = done.stdout.strip().partition(" ")
    if not state:
        return {"phase": "lost"}
    if state == "created":
        return {"phase": "failed", "why": "its container was created but could not be started"}
    code = re.search(r"\((\d+)\)", text)
    if state in ("exited", "dead"):
        return {"phase": "failed"} if code is None else _after(int(code[1]))
    return {"phase": "running"}
