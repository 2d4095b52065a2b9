"""Launches that were submitted: their list, and what goes on, is printed or is stopped, by the platform's own client."""

import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, NotFoundError, RunError, nearest
from systolic.core.files import write_atomically, write_json
from systolic.launching import Launch, LaunchBill, Prepared
from systolic.launching.supervisor import LOGS, SAVE_SECONDS, STATE, identity, lives

RECORD, PROCESS, OUTPUT = "launch.json", "process.json", "submit.log"
LOCAL = "local"
POLL_SECONDS = 0.2
PYTHON = "python"
CLIENTS: Mapping[str, str] = {
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
    "gcloud": "https://cloud.google.com/sdk/docs/install",
    "docker": "https://docs.docker.com/engine/install",
    "sky": "pip install 'skypilot[gcp]' in an environment of its own",
    "sbatch": "run this where Slurm's commands are",
}
"""Client to where it is from."""
NEEDS: Mapping[str, Sequence[str]] = {"tpu-vm": ("bash", "gcloud")}
"""Platform to clients that its scripts call."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch whose files are written: the record ``launch.json`` in its folder."""

    name: str
    via: str
    slice: str
    run: str
    folder: str
    made_by: Sequence[str]
    submitted: str | None
    """Time in UTC; None until it is submitted."""
    bill: Mapping[str, Any]
    commands: Mapping[str, Any]
    """Of the platform's client: ``submit``, ``status``, ``logs``, ``follow``, ``stop``."""
    stopped: str | None = None
    """Time in UTC at which ``systolic stop`` gave the machines back."""

    @property
    def path(self) -> Path:
        """The folder of its files."""
        return Path(self.folder)

    @property
    def detached(self) -> bool:
        """Whether a process on this machine lasts as long as the training."""
        return bool(self.commands["detached"])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether that process is there."""
        return lives(_json(self.path / PROCESS))


def record(
    via: str, launch: Launch, prepared: Prepared, bill: LaunchBill, folder: Path
) -> Launched:
    """Writes the record of a launch into its folder."""
    made = Launched(
        name=launch.name,
        via=via,
        slice=launch.on.name,
        run=launch.run,
        folder=str(folder.absolute()),
        made_by=list(launch.made_by),
        submitted=None,
        bill=bill.to_json(),
        commands=prepared.to_json(),
    )
    write_json(folder / RECORD, made.to_json())
    return made


def check_free(name: str, folder: Path) -> None:
    """Checks that no launch of that name is running, and that its files would not mix with another's.

    Raises:
        RunError: one is, or one of that name has another folder.
    """
    found = {one.name: one for one in launches()}.get(name)
    if found is None:
        return
    if found.detached and found.alive():
        raise RunError(f"{name} is running; systolic stop {name} ends it, or choose another --name")
    if found.path != folder.absolute() and found.path.is_dir():
        raise RunError(
            f"there is a launch {name} in {found.folder}; choose another --name, or --out {found.folder} to launch it again"
        )


def submit(launched: Launched) -> Launched:
    """Runs the platform's commands; the training then goes on without this process.

    Raises:
        RunError: a client is missing or fails.
    """
    words = launched.commands["submit"]
    for client in (*(each[0] for each in words), *NEEDS.get(launched.via, ())):
        _check_client(client)
    made = replace(launched, submitted=_now())
    write_json(made.path / RECORD, made.to_json())
    # Before it starts: a launch that only half started must be found, to be stopped.
    write_json(_index() / f"{made.name}.json", {"folder": made.folder})
    for each in words[:-1] if made.detached else words:
        call(made, each)
    if made.detached:
        _start(made, words[-1])
    return made


def call(launched: Launched, words: Sequence[str]) -> None:
    """Runs a command of the client in the launch's folder; what it prints goes to stderr.

    Raises:
        RunError: the client is missing, or fails.
    """
    _check_client(words[0])
    done = subprocess.run(_here(words), cwd=launched.path, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RunError(
            f"{shlex.join(words)} ended with {done.returncode} in {launched.folder}; its message is above"
        )


def launches() -> list[Launched]:
    """All that were submitted from this account, the newest first; those whose folder is gone are left out."""
    found = []
    for path in _index().glob("*.json"):
        folder = Path(_json(path).get("folder", ""))
        if (folder / RECORD).is_file():
            found.append(_read(folder))
    return sorted(found, key=lambda one: one.submitted or "", reverse=True)


def find(name: str) -> Launched:
    """The launch of a name, or of its folder.

    Raises:
        NotFoundError: there is none; names the nearest.
    """
    if (Path(name) / RECORD).is_file():
        return _read(Path(name))
    known = {one.name: one for one in launches()}
    if name not in known:
        raise NotFoundError(
            f"there is no launch {name!r}{nearest(name, known)}; systolic runs lists them"
        )
    return known[name]


def phase(launched: Launched) -> dict[str, Any]:
    """What this machine knows of a launch: ``phase``, and of a local one its processes and restarts."""
    if not launched.detached:
        return {"phase": "stopped" if launched.stopped else "submitted"}
    alive = launched.alive()
    if launched.via != LOCAL:
        return {"phase": "running" if alive else "ended"}
    state = _json(launched.path / STATE)
    if state.get("pid") != _json(launched.path / PROCESS).get("pid"):
        # Nothing yet from this supervisor, or what the one before it has left.
        return {"phase": "starting" if alive else "lost"}
    if not alive and state["phase"] == "running":
        return {**state, "phase": "lost"}
    return state


def log_of(launched: Launched, process: int = 0) -> Path | None:
    """The file that a launch of this machine prints to; None where the platform has the logs."""
    if launched.via == LOCAL:
        return launched.path / LOGS / f"{process}.log"
    return launched.path / OUTPUT if launched.detached else None


def lines(path: Path, last: int, alive: Callable[[], bool] | None) -> Iterator[str]:
    """The last lines of a log, then new ones while ``alive`` says so.

    Args:
        path: The log, which need not be there yet.
        last: How many of those that are there.
        alive: None ends after those that are there.
    """
    while not path.exists():
        if alive is None or not alive():
            return
        time.sleep(POLL_SECONDS)
    with path.open(errors="replace") as file:
        yield from file.readlines()[-last:]
        while alive is not None:
            going = alive()
            if new := file.read():
                yield new
            elif not going:
                return
            else:
                time.sleep(POLL_SECONDS)


def show_logs(launched: Launched, *, follow: bool) -> None:
    """Prints the logs that the platform has.

    Raises:
        RunError: the client is missing or fails.
    """
    words = launched.commands["follow" if follow else "logs"]
    _check_client(words[0])
    if subprocess.run(_here(words), cwd=launched.path, check=False).returncode:
        raise RunError(f"{shlex.join(words)} failed in {launched.folder}; its message is above")


def stop(launched: Launched) -> str:
    """Ends a launch after its training was asked to save; returns what happened.

    Raises:
        RunError: the client is missing or fails.
    """
    if launched.via == LOCAL:
        return _stop_local(launched)
    if launched.detached and launched.alive():
        # It would ask for the machines again.
        os.killpg(_json(launched.path / PROCESS)["pid"], signal.SIGKILL)
    for words in launched.commands["stop"]:
        call(launched, words)
    write_json(launched.path / RECORD, replace(launched, stopped=_now()).to_json())
    return "stopped"


def _stop_local(launched: Launched) -> str:
    if not launched.alive():
        return f"not running ({phase(launched)['phase']})"
    pid = _json(launched.path / PROCESS)["pid"]
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_SECONDS + 10
    while launched.alive():
        if time.monotonic() > deadline:
            raise RunError(f"{launched.name} does not end; its supervisor is process {pid}")
        time.sleep(POLL_SECONDS)
    return "stopped"


def _start(launched: Launched, words: Sequence[str]) -> None:
    detach = [sys.executable, "-m", "systolic.launching.detach", OUTPUT, *_here(words)]
    done = subprocess.run(detach, cwd=launched.path, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError(f"{shlex.join(words)} could not be started in {launched.folder}")
    write_atomically(launched.path / PROCESS, json.dumps(identity(int(done.stdout))) + "\n")


def _here(words: Sequence[str]) -> list[str]:
    return [sys.executable, *words[1:]] if words[0] == PYTHON else list(words)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _check_client(client: str) -> None:
    if client != PYTHON and shutil.which(client) is None:
        where = CLIENTS.get(client, "install it")
        raise RunError(
            f"{client} is not installed on this machine, and submits this launch: {where}"
        )


def _read(folder: Path) -> Launched:
    try:
        return msgspec.convert(_json(folder / RECORD), Launched)
    except msgspec.ValidationError as error:
        raise DataError(f"{folder / RECORD} is damaged ({error}); launch it again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _index() -> Path:
    """The folder that lists launches: ``systolic/launches`` in ``$XDG_STATE_HOME``, by default ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "systolic" / "launches"
