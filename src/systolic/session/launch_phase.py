"""State of a launch, as this machine knows it."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from systolic.launching.supervisor import STATE
from systolic.session.launched import ENDED, LOCAL, PROCESS, Launched, read_record


def phase(launched: Launched) -> dict[str, Any]:
    """State of a launch as this machine knows it: ``phase``, and for local ones processes and restarts."""
    if launched.stopped:
        return {"phase": "stopped"}
    if launched.trouble:
        return {"phase": "unknown"}
    if words := launched.commands.get("state"):
        return _told(words)
    if not launched.detached:
        return {"phase": "submitted"}
    alive = launched.alive()
    if launched.via != LOCAL:
        return {"phase": "running"} if alive else _ended(launched)
    state = read_record(launched.path / STATE)
    if "phase" not in state or state["pid"] != read_record(launched.path / PROCESS).get("pid"):
        # This supervisor has written nothing yet; the file, if any, is from the one before.
        return {"phase": "starting" if alive else "lost"}
    if not alive and state["phase"] == "running":
        return {**state, "phase": "lost"}
    return state


def _ended(launched: Launched) -> dict[str, Any]:
    """State of a script that ran as long as the training and has ended; lost if it left no exit code."""
    path = launched.path / ENDED
    text = path.read_text().strip() if path.exists() else ""
    return _after(int(text)) if text.isdigit() else {"phase": "lost"}


def _after(code: int) -> dict[str, Any]:
    return {"phase": "failed", "code": code} if code else {"phase": "done"}


def _told(words: Sequence[str]) -> dict[str, Any]:
    """State of a container by the client on this machine; submitted if the client does not answer."""
    if shutil.which(words[0]) is None:
        return {"phase": "submitted"}
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"phase": "lost" if "no such" in done.stderr.lower() else "submitted"}
    state, _, code = done.stdout.strip().partition(" ")
    return _after(int(code)) if state in ("exited", "dead") else {"phase": "running"}
