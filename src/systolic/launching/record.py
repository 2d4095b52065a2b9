"""Record of a launch in its folder, and the list of launches submitted from this account."""

import contextlib
import datetime
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from systolic.core.errors import DataError, NotFoundError, RunError, nearest
from systolic.core.files import write_json
from systolic.launching.launch import BillRecord, CommandsRecord, Launch, LaunchBill, Prepared
from systolic.launching.supervisor import CURE, ProcessIdentity, elsewhere, lives, read_typed

RECORD, PROCESS, OUTPUT = "launch.json", "process.json", "submit.log"
TIMES = "times.log"
"""File written by a script on this machine: ``up SECONDS`` when the machines are active, with the number of slices if some
may be dropped, and ``down SECONDS`` when they are deleted."""
ENDED = "ended"
"""File with the exit code of a script that ran as long as the training."""
FOLDERS = "launches"
"""Folder of the launches' folders, unless ``--out`` names another."""
LOCAL = "local"
PARTS = ("bill", "commands", "earlier")
"""Fields of a record that are JSON objects, written again as they were read."""
POLL_SECONDS = 0.2


class SubmissionRecord(Struct, frozen=True, kw_only=True):
    """Earlier submission of a launch, with the fields that its cost is computed from; those of another version may lack some."""

    slice: str | None = None
    bill: BillRecord | None = None
    submitted: str | None = None
    stopped: str | None = None
    untouched: bool | None = None
    until: str | None = None
    """Time of the next submission."""


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
    bill: BillRecord
    commands: CommandsRecord
    id: str = ""
    """Label of the objects that the launch created."""
    where: str = ""
    """Zone, project and namespace as they were given; the launch's objects are found only there."""
    place: str = ""
    """Options added to all commands at submit: Google Cloud's project, or Kubernetes' context and namespace."""
    stopped: str | None = None
    """Time in UTC at which ``systolic stop`` released the machines."""
    earlier: Sequence[SubmissionRecord] = ()
    failed: str = ""
    """Why submitting failed; empty if it did not."""
    untouched: bool = False
    """Whether submitting failed before the command that creates objects, so that there is nothing to stop or to pay."""
    trouble: str = ""
    """Problem with the files in the folder; if it is with the record, these fields come from the list of launches."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """JSON object that it was read from, whose parts may have other fields than those of this version."""

    @property
    def path(self) -> Path:
        """Folder of the files."""
        return Path(self.folder)

    @property
    def detached(self) -> bool:
        """Whether a process on this machine runs as long as the training."""
        return self.commands.detached

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        plain = msgspec.to_builtins(self)
        record = plain.pop("record")
        return plain | {name: record[name] for name in PARTS if name in record}

    @property
    def process(self) -> ProcessIdentity | None:
        """That process; None before it is started.

        Raises:
            DataError: its file is damaged.
        """
        return read_typed(self.path / PROCESS, ProcessIdentity, CURE)

    def alive(self) -> bool:
        """Whether that process is alive on this host."""
        process = self.process
        return process is not None and lives(process)

    @property
    def host(self) -> str:
        """Name of the host of that process if it is not visible from this one; empty otherwise."""
        process = self.process if self.detached else None
        return "" if process is None else elsewhere(process)


def as_before(launch: Launch, folder: Path) -> Launch:
    """Gives a launch the label of an earlier launch in the same folder, so that it finds the objects of that one."""
    before = last_record(folder, launch.name)
    return replace(launch, id=before.id) if before is not None and before.id else launch


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
        bill=bill.record(),
        commands=prepared.record(),
        id=launch.id,
        where=where_of(launch),
    )
    before = last_record(folder, launch.name)
    if before is not None and prepared.asked and before.place and not before.stopped:
        launched = at_place(launched, before.place)
    if before is None or not before.submitted:
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
    more, commands = tuple(shlex.split(place)), launched.commands
    placed = msgspec.structs.replace(
        commands,
        checks=tuple((*words, *more) for words in commands.checks),
        submit=tuple((*words, *more) for words in commands.submit),
        stop=tuple((*words, *more) for words in commands.stop),
        status=(*commands.status, *more),
        logs=(*commands.logs, *more),
        follow=(*commands.follow, *more),
    )
    return replace(launched, place=place, commands=placed)


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
        entry = _entry(place)
        if place.is_file() and not (entry.folder and (entry.path / RECORD).is_file()):
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
    entry = _entry(path)
    if not entry.folder:
        return replace(entry, trouble=f"its entry {path} is damaged")
    try:
        if (entry.path / RECORD).is_file():
            return launch_in(entry.path)
        trouble = f"its folder {entry.folder} is missing; if it was moved, run systolic status NEW_FOLDER, otherwise rm {path}"
    except DataError as error:
        trouble = str(error)
    return replace(entry, trouble=trouble)


def _entry(path: Path) -> Launched:
    """Entry of the list, which may lack fields, as one of another version does; without a folder if it is damaged."""
    unknown: dict[str, Any] = {
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
    with contextlib.suppress(DataError, msgspec.ValidationError):
        fields = {**unknown, **(read_typed(path, dict[str, Any], "") or {})}
        return msgspec.convert({**fields, "record": fields}, Launched)
    return msgspec.convert({**unknown, "record": unknown}, Launched)


def utc_now() -> str:
    """Time now, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def launch_in(folder: Path) -> Launched:
    """Reads the record in a folder.

    Raises:
        DataError: it is empty, cut short or damaged.
    """
    launched = read_typed(folder / RECORD, Launched, "launch it again")
    if launched is None:
        raise DataError(f"{folder / RECORD} is missing; launch it again")
    for time in _times(launched):
        try:
            datetime.datetime.fromisoformat(time)
        except ValueError as error:
            raise DataError(f"{folder / RECORD} is damaged ({error}); launch it again") from error
    return replace(launched, folder=str(folder.absolute()))


def _times(launched: Launched) -> list[str]:
    """All times of a record."""
    before = [
        time for each in launched.earlier for time in (each.submitted, each.stopped, each.until)
    ]
    return [time for time in (launched.submitted, launched.stopped, *before) if time is not None]


def last_record(folder: Path, name: str) -> Launched | None:
    """Record of a launch in its folder; if it is damaged, the copy of it in the list; None without either."""
    if not (folder / RECORD).is_file():
        return None
    with contextlib.suppress(DataError):
        return launch_in(folder)
    entry = _entry(index() / f"{name}.json")
    return entry if entry.folder == str(folder.absolute()) else None


def index() -> Path:
    """Folder with the list of launches: ``systolic/launches`` in ``$XDG_STATE_HOME``, by default ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "systolic" / "launches"
