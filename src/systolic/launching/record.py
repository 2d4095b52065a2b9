"""Record of a launch in its folder, and the list of launches submitted from this account."""

import datetime
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, NotFoundError, RunError, nearest
from systolic.core.files import write_json
from systolic.launching.launch import Launch, LaunchBill, Prepared
from systolic.launching.supervisor import elsewhere, lives

RECORD, PROCESS, OUTPUT = "launch.json", "process.json", "submit.log"
TIMES = "times.log"
"""File written by a script on this machine: ``up SECONDS`` when the machines are active, with the number of slices if some
may be dropped, and ``down SECONDS`` when they are deleted."""
ENDED = "ended"
"""File with the exit code of a script that ran as long as the training."""
FOLDERS = "launches"
"""Folder of the launches' folders, unless ``--out`` names another."""
LOCAL = "local"
POLL_SECONDS = 0.2


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
    failed: str = ""
    """Why submitting failed; empty if it did not."""
    untouched: bool = False
    """Whether submitting failed before the command that creates objects, so that there is nothing to stop or to pay."""
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
        """Whether that process is alive on this host."""
        return lives(read_record(self.path / PROCESS))

    @property
    def host(self) -> str:
        """Name of the host of that process if it is not visible from this one; empty otherwise."""
        return elsewhere(read_record(self.path / PROCESS)) if self.detached else ""


def as_before(launch: Launch, folder: Path) -> Launch:
    """Gives a launch the label of an earlier launch in the same folder, so that it finds the objects of that one."""
    before = last_record(folder, launch.name).get("id")
    return replace(launch, id=before) if before else launch


def record(
    via: str, launch: Launch, prepared: Prepared, bill: LaunchBill, folder: Path
) -> Launched:
    """Record of a launch, written into its folder; a submitted record stays there until the new launch is submitted."""
    launched = Launched(
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
        where=where_of(launch),
    )
    before = last_record(folder, launch.name)
    if prepared.asked and before.get("place") and not before.get("stopped"):
        launched = at_place(launched, before["place"])
    if not before.get("submitted"):
        write_json(folder / RECORD, launched.to_json())
    return launched


@dataclass(frozen=True, kw_only=True)
class WrittenLaunch:
    """A launch whose files are written, and which may be submitted."""

    launch: Launch
    prepared: Prepared
    bill: LaunchBill
    """Estimated cost before the launch."""
    folder: Path
    files: Sequence[Path]
    command: Sequence[str]
    """Command of every host or pod."""
    record: Launched

    @property
    def name(self) -> str:
        """Name of the launch, by which it is found again."""
        return self.record.name

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        files = [str(path) for path in self.files]
        return {**self.record.to_json(), "notes": list(self.prepared.notes), "files": files}


def where_of(launch: Launch) -> str:
    """Zone, project and namespace of a launch, as options."""
    site = launch.site
    places = {"zone": site.zone, "project": site.project, "namespace": site.namespace}
    return " ".join(f"--{name} {value}" for name, value in places.items() if value)


def keep(launched: Launched) -> None:
    """Writes the record into the launch's folder and into the list of launches."""
    for path in (launched.path / RECORD, index() / f"{launched.name}.json"):
        write_json(path, launched.to_json())


def at_place(launched: Launched, place: str) -> Launched:
    """Adds options to all commands of a launch."""
    more = shlex.split(place)
    lists = {
        name: [[*each, *more] for each in launched.commands[name]]
        for name in ("checks", "submit", "stop")
    }
    single = {name: [*launched.commands[name], *more] for name in ("status", "logs", "follow")}
    return replace(launched, place=place, commands={**launched.commands, **lists, **single})


def launches() -> list[Launched]:
    """Launches submitted from this account, newest first."""
    launched = [_listed(path) for path in index().glob("*.json")]
    return sorted(launched, key=lambda submission: submission.submitted or "", reverse=True)


def find(name: str) -> Launched:
    """Finds a launch by its name, or by its folder, which may have moved.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
        RunError: the folder is missing, or the record is damaged.
    """
    launched = listed(name)
    if launched.trouble:
        raise RunError(
            f"{launched.name}: {launched.trouble}; systolic status {launched.name} shows what was launched"
        )
    return launched


def listed(name: str) -> Launched:
    """Like :func:`find`, but falls back to the list's entry if the folder is missing or damaged.

    A launch that was only written is found by its name in the folder ``launches``.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
    """
    known = {launched.name: launched for launched in launches()}
    written = Path(FOLDERS) / name
    if (Path(name) / RECORD).is_file():
        moved = launch_in(Path(name))
        place = index() / f"{moved.name}.json"
        if place.is_file() and not (Path(read_record(place).get("folder", "")) / RECORD).is_file():
            write_json(place, moved.to_json())
        return moved
    if name not in known and (written / RECORD).is_file():
        return launch_in(written)
    if name not in known:
        raise NotFoundError(
            f"there is no launch {name!r}{nearest(name, known)}; systolic runs lists them"
        )
    return known[name]


def _listed(path: Path) -> Launched:
    """Launch of an entry of the list: the folder's record, or the entry itself if the record is missing or damaged."""
    kept = read_record(path)
    folder = Path(kept.get("folder", ""))
    try:
        if kept and (folder / RECORD).is_file():
            return launch_in(folder)
        trouble = (
            f"its folder {folder} is missing; if it was moved, run systolic status NEW_FOLDER, otherwise rm {path}"
            if kept
            else f"its entry {path} is damaged"
        )
    except DataError as error:
        trouble = str(error)
    return from_record(kept, path.stem, trouble)


def from_record(kept: Mapping[str, Any], name: str, trouble: str = "") -> Launched:
    """Launch of a record that may lack fields, as one of another version does."""
    unknown = {
        "name": name,
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


def utc_now() -> str:
    """Time now, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def launch_in(folder: Path) -> Launched:
    """Reads the record in a folder.

    Raises:
        DataError: it is empty, cut short or damaged.
    """
    path = folder / RECORD
    try:
        launched = msgspec.convert(json.loads(path.read_text()), Launched)
        return replace(launched, folder=str(folder.absolute()))
    except msgspec.ValidationError as error:
        why = f"damaged ({error})"
    except ValueError:
        why = "empty" if not path.read_text().strip() else "cut short"
    raise DataError(f"{path} is {why}; launch it again")


def last_record(folder: Path, name: str) -> dict[str, Any]:
    """Record of a launch in its folder; if it is damaged, the copy of it in the list; empty without either."""
    fields = read_record(folder / RECORD)
    if fields or not (folder / RECORD).is_file():
        return fields
    kept = read_record(index() / f"{name}.json")
    return kept if kept.get("folder") == str(folder.absolute()) else {}


def read_record(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing or damaged."""
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def index() -> Path:
    """Folder with the list of launches: ``systolic/launches`` in ``$XDG_STATE_HOME``, by default ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "systolic" / "launches"
