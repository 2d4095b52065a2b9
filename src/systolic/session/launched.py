"""Submitted launches: list, state, logs and stop, through the platform's own client."""

import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, NotFoundError, RunError, TakenError, nearest
from systolic.core.files import write_atomically, write_json
from systolic.launching import GONE, Launch, LaunchBill, Prepared
from systolic.launching.supervisor import SAVE_SECONDS, STATE, identity, lives
from systolic.session.clients import NEEDS, PYTHON, check_client

RECORD, PROCESS, OUTPUT = "launch.json", "process.json", "submit.log"
TIMES = "times.log"
"""File written by a script on this machine: ``up SECONDS`` when the machines are active, with the number of slices if some
may be dropped, and ``down SECONDS`` when they are deleted."""
ENDED = "ended"
"""File with the exit code of a script that ran as long as the training."""
SUBMISSION = ("slice", "bill", "submitted", "stopped")
"""Fields of a submission that its cost is computed from."""
LOCAL = "local"
POLL_SECONDS = 0.2
NOTHING = (
    "Error from server (NotFound): ",
    "No resources found",
    "error: the server doesn't have a resource type",
)
"""Messages of kubectl when there is nothing to delete."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Launch whose files are written: the content of ``launch.json`` in its folder."""

    name: str
    via: str
    slice: str
    run: str
    folder: str
    made_by: Sequence[str]
    submitted: str | None
    """Time of the submission in UTC; None before it."""
    bill: Mapping[str, Any]
    commands: Mapping[str, Any]
    """Commands of the platform's client: ``checks``, ``submit``, ``status``, ``logs``, ``follow``, ``stop``."""
    id: str = ""
    """Label of the objects that the launch created."""
    where: str = ""
    """Zone, project and namespace as they were given; the launch's objects are found only there."""
    place: str = ""
    """Options added to all commands at submit: Google Cloud's project, or Kubernetes' context and namespace."""
    stopped: str | None = None
    """Time in UTC at which ``systolic stop`` released the machines."""
    earlier: Sequence[Mapping[str, Any]] = ()
    """Earlier submissions, each with ``slice``, ``bill``, ``submitted``, ``stopped`` and ``until``, the time of the next one."""
    trouble: str = ""
    """Problem with the record in the folder, in which case these fields come from the list of launches."""

    @property
    def path(self) -> Path:
        """Folder of the files."""
        return Path(self.folder)

    @property
    def detached(self) -> bool:
        """Whether a process on this machine runs as long as the training."""
        return bool(self.commands["detached"])

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether that process is alive."""
        return lives(_json(self.path / PROCESS))


def as_before(launch: Launch, folder: Path) -> Launch:
    """Gives a launch the label of an earlier launch in the same folder, so that it finds the objects of that one."""
    before = _json(folder / RECORD).get("id")
    return replace(launch, id=before) if before else launch


def record(
    via: str, launch: Launch, prepared: Prepared, bill: LaunchBill, folder: Path
) -> Launched:
    """Record of a launch, written into its folder; a submitted record stays there until the new launch is submitted."""
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
        id=launch.id,
        where=_where(launch),
    )
    before = _json(folder / RECORD)
    if prepared.asked and before.get("place") and not before.get("stopped"):
        made = _at(made, before["place"])
    if not before.get("submitted"):
        write_json(folder / RECORD, made.to_json())
    return made


def _where(launch: Launch) -> str:
    site = launch.site
    given = {"zone": site.zone, "project": site.project, "namespace": site.namespace}
    return " ".join(f"--{name} {value}" for name, value in given.items() if value)


def check_free(launch: Launch, folder: Path, via: str) -> None:
    """Checks that no launch of the same name is running, and that the folder is free or from the same launch.

    Raises:
        RunError: a launch of that name is running, was submitted to another place, or has another folder.
        TakenError: the folder has files that are not from a launch of that name and platform.
    """
    name = launch.name
    if folder.is_dir() and any(folder.iterdir()):
        before = _json(folder / RECORD)
        if not before:
            raise TakenError(
                f"{folder} has files that are not from a launch; choose a new folder with --out"
            )
        if (before.get("name"), before.get("via")) != (name, via):
            raise TakenError(
                f"{folder} holds the launch {before.get('name')} via {before.get('via')}; choose another --name or --out, or remove the folder if that launch is not running"
            )
        there = before.get("submitted") and not before.get("stopped") and not _given_back(folder)
        if there and before.get("where", "") != _where(launch):
            raise RunError(
                f"{name} was submitted with {before.get('where') or 'no zone, project or namespace'}; run systolic stop {name} first, or choose another --name"
            )
    found = {one.name: one for one in launches()}.get(name)
    if found is None:
        return
    if found.detached and found.alive():
        raise RunError(f"{name} is running; run systolic stop {name}, or choose another --name")
    if found.path != folder.absolute() and found.path.is_dir():
        raise RunError(
            f"the launch {name} is in {found.folder}; choose another --name, or launch it again with --out {found.folder}"
        )


def _given_back(folder: Path) -> bool:
    """Whether a script on this machine has ended and released the machines."""
    times = folder / TIMES
    return (
        (folder / ENDED).exists()
        and times.exists()
        and times.read_text().rstrip().rpartition("\n")[2].startswith("down")
    )


def submit(launched: Launched) -> Launched:
    """Runs the platform's commands; the training does not depend on this process afterwards.

    Raises:
        RunError: a client is missing or fails.
    """
    first = (*launched.commands["submit"], *launched.commands["checks"])
    for client in (*(each[0] for each in first), *NEEDS.get(launched.via, ())):
        check_client(client)
    made = _placed(launched)
    words = made.commands["submit"]
    for each in made.commands["checks"]:
        call(made, each)
    before = _json(made.path / RECORD)
    runs = made.commands["in_place"] and not before.get("stopped")
    now = _now()
    earlier = list(before.get("earlier", ()))
    if before.get("submitted") and not runs:
        earlier.append({**{name: before.get(name) for name in SUBMISSION}, "until": now})
    made = replace(
        made, submitted=(before.get("submitted") if runs else None) or now, earlier=earlier
    )
    # Recorded before it starts: a launch that started only in part must be listed so that it can be stopped.
    _keep(made)
    for each in words[:-1] if made.detached else words:
        call(made, each)
    if made.detached:
        _start(made, words[-1])
    return made


def _keep(launched: Launched) -> None:
    """Writes the record into the launch's folder and into the list of launches."""
    for path in (launched.path / RECORD, _index() / f"{launched.name}.json"):
        write_json(path, launched.to_json())


def _placed(launched: Launched) -> Launched:
    """Adds the client's current defaults, such as the context, to all commands of a launch.

    Raises:
        RunError: the client has no default, or another one than at submit.
    """
    found: list[str] = []
    for asked in launched.commands["asked"]:
        found.append(f"--{asked['what']}={_answer(asked, found)}")
    place = shlex.join(found)
    if launched.place not in ("", place):
        raise RunError(
            f"{launched.name} was submitted with {launched.place}, but the defaults are now {place}; run systolic stop {launched.name} first"
        )
    return launched if launched.place or not place else _at(launched, place)


def _answer(asked: Mapping[str, Any], found: Sequence[str]) -> str:
    """Asks a client for a default, given the options that are fixed already.

    Raises:
        RunError: the client fails, or prints nothing where it must.
    """
    words = [*asked["words"], *found]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    answer = done.stdout.strip() or ("" if done.returncode else asked["empty"])
    if done.returncode or not answer:
        why = (done.stderr.strip() or "no answer").splitlines()[-1]
        then = f"; {asked['otherwise']}" if asked["otherwise"] else ""
        raise RunError(f"{shlex.join(words)} returned no {asked['what']} ({why}){then}")
    return answer


def _at(launched: Launched, place: str) -> Launched:
    """Adds options to all commands of a launch."""
    more = shlex.split(place)
    lists = {
        name: [[*each, *more] for each in launched.commands[name]]
        for name in ("checks", "submit", "stop")
    }
    single = {name: [*launched.commands[name], *more] for name in ("status", "logs", "follow")}
    return replace(launched, place=place, commands={**launched.commands, **lists, **single})


def call(launched: Launched, words: Sequence[str]) -> None:
    """Runs a command of the client in the launch's folder, with its output on stderr.

    Raises:
        RunError: the client is missing or fails.
    """
    check_client(words[0])
    if code := _code(launched, words):
        raise _failed(launched, words, code)


def _code(launched: Launched, words: Sequence[str]) -> int:
    return subprocess.run(
        _here(words), cwd=launched.path, stdout=sys.stderr, check=False
    ).returncode


def _failed(launched: Launched, words: Sequence[str], code: int) -> RunError:
    return RunError(
        f"{shlex.join(words)} failed with exit code {code} in {launched.folder}; its output is above"
    )


def launches() -> list[Launched]:
    """Launches submitted from this account, newest first."""
    found = [_listed(path) for path in _index().glob("*.json")]
    return sorted(found, key=lambda one: one.submitted or "", reverse=True)


def find(name: str) -> Launched:
    """Finds a launch by its name, or by its folder, which may have moved.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
        RunError: the folder is missing, or the record is damaged.
    """
    found = listed(name)
    if found.trouble:
        raise RunError(
            f"{found.name}: {found.trouble}; systolic status {found.name} shows what was launched"
        )
    return found


def listed(name: str) -> Launched:
    """Like :func:`find`, but falls back to the list's entry if the folder is missing or damaged.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
    """
    if (Path(name) / RECORD).is_file():
        moved = _read(Path(name))
        place = _index() / f"{moved.name}.json"
        if place.is_file() and not (Path(_json(place).get("folder", "")) / RECORD).is_file():
            write_json(place, moved.to_json())
        return moved
    known = {one.name: one for one in launches()}
    if name not in known:
        raise NotFoundError(
            f"there is no launch {name!r}{nearest(name, known)}; systolic runs lists them"
        )
    return known[name]


def _listed(path: Path) -> Launched:
    """Launch of an entry of the list: the folder's record, or the entry itself if the record is missing or damaged."""
    kept = _json(path)
    folder = Path(kept.get("folder", ""))
    try:
        if kept and (folder / RECORD).is_file():
            return _read(folder)
        trouble = (
            f"its folder {folder} is missing; if it was moved, run systolic status NEW_FOLDER, otherwise rm {path}"
            if kept
            else f"its entry {path} is damaged"
        )
    except DataError as error:
        trouble = str(error)
    unknown = {
        "name": path.stem,
        "via": "?",
        "slice": "?",
        "run": "?",
        "folder": "",
        "made_by": [],
        "submitted": None,
        "bill": {"usd": None, "usd_per_hour": None},
        "commands": {"detached": False},
    }
    try:
        return msgspec.convert({**unknown, **kept, "trouble": trouble}, Launched)
    except msgspec.ValidationError:
        return msgspec.convert({**unknown, "trouble": trouble}, Launched)


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
    state = _json(launched.path / STATE)
    if "phase" not in state or state["pid"] != _json(launched.path / PROCESS).get("pid"):
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


def show_logs(launched: Launched, *, follow: bool) -> None:
    """Prints the platform's logs of a launch.

    Raises:
        RunError: the client is missing or fails.
    """
    words = launched.commands["follow" if follow else "logs"]
    check_client(words[0])
    if subprocess.run(_here(words), cwd=launched.path, check=False).returncode:
        raise RunError(f"{shlex.join(words)} failed in {launched.folder}; its output is above")


def stop(launched: Launched) -> str:
    """Asks the training to save, then ends the launch; returns what happened.

    Raises:
        RunError: the client is missing or fails, or found nothing and may have looked in the wrong context.
    """
    if launched.via == LOCAL:
        return _stop_local(launched)
    if launched.detached and launched.alive():
        # Without an answer from the client nothing could be deleted, neither here nor by the script killed below.
        call(launched, launched.commands["status"])
        # The script would request the machines again.
        os.killpg(_json(launched.path / PROCESS)["pid"], signal.SIGKILL)
    found = [_end(launched, words) for words in launched.commands["stop"]]
    by_kubectl = launched.commands["stop"][0][0] == "kubectl"
    if not any(found) and by_kubectl and not launched.place:
        raise RunError(
            f"kubectl finds nothing of {launched.name} in its current context; select the launch's with kubectl config use-context CONTEXT"
        )
    _keep(replace(launched, stopped=_now()))
    where = f" ({launched.place})" if launched.place else ""
    return "stopped" if any(found) else f"already gone, nothing to stop{where}"


def _end(launched: Launched, words: Sequence[str]) -> bool:
    """Runs a command that ends a launch; False if there was nothing to end.

    Raises:
        RunError: the command fails for another reason.
    """
    check_client(words[0])
    if words[0] != "kubectl":
        code = _code(launched, words)
        if code not in (0, GONE):
            raise _failed(launched, words, code)
        return code == 0
    done = subprocess.run(words, cwd=launched.path, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout + done.stderr)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
    if done.returncode and not all(line.startswith(NOTHING) for line in errors if line):
        raise _failed(launched, words, done.returncode)
    lines = [*done.stdout.splitlines(), *errors]
    return not all(line.startswith(NOTHING) for line in lines if line)


def _stop_local(launched: Launched) -> str:
    if not launched.alive():
        return f"not running ({phase(launched)['phase']})"
    pid = _json(launched.path / PROCESS)["pid"]
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_SECONDS + 10
    while launched.alive():
        if time.monotonic() > deadline:
            raise RunError(f"{launched.name} did not end; its supervisor is process {pid}")
        time.sleep(POLL_SECONDS)
    return "stopped"


def _start(launched: Launched, words: Sequence[str]) -> None:
    (launched.path / ENDED).unlink(missing_ok=True)
    detach = [sys.executable, "-m", "systolic.launching.detach", OUTPUT, *_here(words)]
    done = subprocess.run(detach, cwd=launched.path, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError(f"{shlex.join(words)} could not be started in {launched.folder}")
    write_atomically(launched.path / PROCESS, json.dumps(identity(int(done.stdout))) + "\n")


def _here(words: Sequence[str]) -> list[str]:
    return [sys.executable, *words[1:]] if words[0] == PYTHON else list(words)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _read(folder: Path) -> Launched:
    try:
        found = msgspec.convert(_json(folder / RECORD), Launched)
        return replace(found, folder=str(folder.absolute()))
    except msgspec.ValidationError as error:
        raise DataError(f"{folder / RECORD} is damaged ({error}); launch it again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _index() -> Path:
    """Folder with the list of launches: ``systolic/launches`` in ``$XDG_STATE_HOME``, by default ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "systolic" / "launches"
