"""Uploads of a run's local copy to its bucket, including files that a killed writer left behind, and of checkpoints that several hosts write without a shared folder.

Each host has a copy of the run with its part of every checkpoint, and a manifest of that part (``part.json``). It
uploads the part's files, then a note of them. When all hosts have, process 0 merges the parts into one checkpoint in
the bucket and writes its manifest. So a checkpoint in the bucket is complete or absent, whenever a host dies.
"""

import hashlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from systolic.core.errors import RunError
from systolic.core.files import write_atomically, write_json
from systolic.runs import manifest
from systolic.runs import manifest as manifests
from systolic.runs.remote import store
from systolic.runs.remote.store import Objects

CHECKPOINTS = "checkpoints"
_SAID = "parts"
"""Folder in a checkpoint of the bucket where hosts note the files they have uploaded."""
_OF_PROCESS = re.compile(r"(^|[/.])process_\d+(\.json)?(/|$)")
"""Pattern of names that only one process writes."""
_DATABASE = re.compile(r"([^/]+)/(ocdbt\.process_\d+)/")
"""Item of a checkpoint, and the database in it that one process has written."""

Files = Mapping[str, tuple[int, int]]
"""Size in bytes and CRC-32 by name in a checkpoint."""
WRITER = "writer.json"
"""File that names the session that writes a run; another session replaces it when it opens the run."""
RECORDS = "metrics.jsonl"
"""File that every session of a run appends to."""
SEND_SECONDS = 10.0
"""Interval between uploads of a run's files."""
LOOK_SECONDS = 1.0
"""Interval between checks for a new checkpoint, which is uploaded at once."""
PATIENCE_SECONDS = 600.0
"""Timeout at the end for parts of checkpoints from other hosts, since the last that arrived."""
_TRANSFERS = 8
Stamp = tuple[int, int]
"""Size in bytes and modification time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part that a process holds of a run with several copies."""

    index: int
    """Index of this process."""
    leaders: tuple[int, ...]
    """For each process, the first process with the same copy."""
    session: str
    """Identifier of this session, the same in all processes; distinguishes its parts from those of earlier ones."""
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Held while a manifest of the copy is modified."""

    @property
    def leader(self) -> int:
        """First process with this copy, which manages it."""
        return self.leaders[self.index]

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.leader == self.index

    @property
    def members(self) -> list[int]:
        """Processes with this copy."""
        return [index for index, leader in enumerate(self.leaders) if leader == self.leader]

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this is the i-th of n processes with this copy."""
        return self.members.index(self.index), len(self.members)


def rate(folder: Path, metrics: Mapping[str, float], part: Part | None) -> None:
    """Replaces the metrics in the manifest of a checkpoint, or of a host's part."""
    with nullcontext() if part is None else part.lock:
        name = manifests.NAME if manifests.is_at(folder) else manifests.PART
        held = manifests.read(folder, (name,))
        manifests.write(folder, replace(held, metrics=dict(metrics)), name)


class HostParts:
    """Parts of checkpoints in the copy of one host; in process 0 also those that the other hosts have uploaded.

    Args:
        objects: Objects of the run.
        part: Part of this host.
        send: Uploads files of the copy by name; raises FileNotFoundError if one was deleted meanwhile.
        there: Names in the bucket; updated with files that are not from this copy.
    """

    def __init__(
        self,
        objects: Objects,
        part: Part,
        send: Callable[[list[str]], None],
        there: set[str],
    ) -> None:
        self._objects, self._part, self._send, self._there = objects, part, send, there
        self._folder = objects.folder.copy / CHECKPOINTS
        self._sent: set[int] = set()
        self._said: dict[int, dict[int, Files]] = {}
        self._seen: set[str] = set()

    @property
    def news(self) -> int:
        """Counter that grows when files of other hosts arrive."""
        return len(self._seen)

    def open_steps(self) -> list[int]:
        """Steps whose part is not uploaded or, in process 0, whose checkpoint is not complete in the bucket."""
        folders = self._folder.glob(f"[0-9]*/{manifests.PART}")
        steps = sorted(int(file.parent.name) for file in folders if file.parent.name.isdigit())
        return steps if self._part.index == 0 else [n for n in steps if n not in self._sent]

    def advance(self) -> None:
        """Uploads new parts; in process 0 also completes checkpoints whose parts have all arrived.

        Raises:
            RunError: the bucket does not answer or refuses access.
        """
        for step in self.open_steps():
            # Retention may delete the checkpoint meanwhile, in this copy and in the others.
            with suppress(FileNotFoundError, manifests.DamagedError):
                mine = manifests.read(self._folder / str(step), (manifests.PART,)).files
                if self._part.index == 0:
                    self._send([f"{CHECKPOINTS}/{step}/{name}" for name in mine])
                    self._complete(step, mine)
                else:
                    self._say(step, mine)

    def _say(self, step: int, mine: Files) -> None:
        """Uploads the files that only this host has, then a note of them."""
        mine = {name: file for name, file in mine.items() if _OF_PROCESS.search(name)}
        self._send([f"{CHECKPOINTS}/{step}/{name}" for name in mine])
        said = {"session": self._part.session, "files": mine}
        self._objects.write(_said(step, self._part.leader), json.dumps(said).encode())
        self._sent.add(step)

    def _complete(self, step: int, mine: Files) -> None:
        """Merges the parts of all hosts into one checkpoint once all have been noted."""
        folder, below = self._folder / str(step), f"{CHECKPOINTS}/{step}/"
        there = set(self._objects.names(below))
        said = self._said.setdefault(step, {})
        self._seen |= there - {below + name for name in mine}
        for leader in {*self._part.leaders} - {0, *said}:
            if _said(step, leader) in there:
                self._hear(step, leader)
        files = dict(mine)
        for part in said.values():
            files |= part
        if len(said) < len({*self._part.leaders}) - 1 or not {below + n for n in files} <= there:
            return
        files |= self._merge(below, files)
        self._there |= {below + name for name in files}
        with self._part.lock:
            whole = manifests.read(folder, (manifests.PART,))
            whole = replace(whole, files=dict(sorted(files.items())))
            manifests.write(folder, whole, manifests.PART)
            (folder / manifests.PART).rename(folder / manifests.NAME)
        for leader in said:
            self._objects.delete(_said(step, leader))

    def _hear(self, step: int, leader: int) -> None:
        message = self._objects.read(_said(step, leader))
        said = {} if message is None else json.loads(message[0])
        if said.get("session") == self._part.session:
            files = {name: (size, crc) for name, (size, crc) in said["files"].items()}
            self._said[step][leader] = files

    def _merge(self, below: str, files: Files) -> Files:
        """Merges the databases of all processes into one that refers to them; returns the files of the merged one."""
        databases: dict[str, list[str]] = {}
        for item, database in sorted({m.groups() for n in files if (m := _DATABASE.match(n))}):
            databases.setdefault(item, []).append(f"{below}{item}/{database}")
        merged: dict[str, tuple[int, int]] = {}
        for item, parts in databases.items():
            own = (f"{below}{item}/d/", f"{below}{item}/manifest.ocdbt")
            for left in self._objects.names(f"{below}{item}/"):
                if left.startswith(own):  # Left by a failed merge.
                    self._objects.delete(left)
            self._objects.merge(f"{below}{item}", parts)
            for name in self._objects.names(f"{below}{item}/"):
                if name.startswith(own) and (content := self._objects.read(name)) is not None:
                    merged[name.removeprefix(below)] = manifests.crc32_of(content[0])
        return merged


def _said(step: int, leader: int) -> str:
    return f"{CHECKPOINTS}/{step}/{_SAID}/{leader}.json"


def _say(text: str) -> None:
    print(f"systolic: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRecord:
    """Record of the files that a writer has uploaded, kept next to its copy until all are uploaded."""

    files: Mapping[str, Stamp]
    records: str
    """SHA-256 of the bucket's ``metrics.jsonl``; empty if it has none."""
    writer: bytes = b""
    """Content of :data:`WRITER` of the session; empty if it was of a version without."""

    def write(self, copy: Path) -> None:
        """Writes the record next to the copy."""
        value = {"files": {n: list(stamp) for n, stamp in self.files.items()}}
        write_json(_record(copy), value | {"records": self.records, "writer": self.writer.decode()})

    @classmethod
    def read(cls, copy: Path) -> "SentRecord | None":
        """Reads the record of a copy whose last writer was killed or failed; None without one."""
        try:
            value = json.loads(_record(copy).read_text())
            files = {name: (size, changed) for name, (size, changed) in value["files"].items()}
            writer = value.get("writer", "").encode()
            return cls(files=files, records=value["records"], writer=writer)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _record(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.sent.json")


def _records(objects: Objects) -> tuple[str, bytes]:
    records = objects.read(RECORDS)
    return ("", b"") if records is None else (hashlib.sha256(records[0]).hexdigest(), records[0])


def claim(copy: Path, objects: Objects | None = None) -> None:
    """Names this session as the writer of a run, in its copy and, given its objects, at once in the bucket.

    Other machines then do not send what they have left, also before this session has sent a record.
    """
    content = json.dumps({"session": secrets.token_hex(8), "host": socket.gethostname()}).encode()
    if objects is not None:
        objects.write(WRITER, content)
    write_atomically(copy / WRITER, content)


def _writer(objects: Objects) -> bytes:
    writer = objects.read(WRITER)
    return b"" if writer is None else writer[0]


def _is_ours(objects: Objects, sent: SentRecord) -> bool:
    """Whether no other writer has opened or changed the run since.

    A kill between uploading the records and noting it leaves a bucket whose records are a prefix of the copy's.
    """
    if _writer(objects) != sent.writer:
        return False
    digest, content = _records(objects)
    records = objects.folder.copy / RECORDS
    goes_on = bool(content) and records.exists() and records.read_bytes().startswith(content)
    return digest == sent.records or goes_on


def send_rest(objects: Objects, tell: store.Tell, *, sends: bool = True) -> None:
    """Uploads files that a writer left in a copy because it was killed or its bucket was unreachable.

    Moves them to another folder instead if the run has since continued elsewhere, or if ``sends`` is false. Parts of
    checkpoints whose other parts are on other hosts are neither uploaded nor moved.

    Raises:
        RunError: the upload failed; the copy is unchanged.
    """
    copy = objects.folder.copy
    sent = SentRecord.read(copy)
    if sent is None:
        return
    local = files_of(copy)
    whole = _whole(local)
    unsent = [name for name in local if sent.files.get(name) != stamp_of(copy / name)]
    unsent = [name for name in unsent if not is_array(name) or name.split("/")[1] in whole]
    taken = bool(unsent) and not (sends and _is_ours(objects, sent))
    if unsent and not taken:
        try:
            Sender(objects, sent.files).send(
                deletes=False, ours=lambda: _writer(objects) == sent.writer
            )
        except _TakenOverError:
            taken = True
        except RunError as error:
            raise RunError(
                f"{copy} has {len(unsent)} files that were never uploaded to {objects.folder.url}, and uploading them failed ({error}); try again, or give the local folder instead"
            ) from error
    if taken:
        aside = _aside(copy)
        tell(
            f"{len(unsent)} files written on this machine were never uploaded to {objects.folder.url}, and the run has since continued elsewhere; they are kept in {aside}"
        )
    elif unsent:
        steps = sorted(int(name.split("/")[1]) for name in unsent if is_manifest(name))
        which = f" (checkpoints of steps {steps})" if steps else ""
        tell(f"uploaded {len(unsent)} files{which} that were missing from {objects.folder.url}")
    _record(copy).unlink(missing_ok=True)


def _aside(copy: Path) -> Path:
    """Moves the contents of a copy, except its lock, to a sibling folder."""
    numbers = iter(range(1, sys.maxsize))
    aside = next(
        p for n in numbers if not (p := copy.with_name(f"{copy.name}.unsent-{n}")).exists()
    )
    aside.mkdir()
    for entry in copy.iterdir():
        if not entry.name.startswith("."):
            entry.rename(aside / entry.name)
    return aside


class _TakenOverError(RunError):
    """Another session opened the run while the files of this copy were uploaded."""


class Sender:
    """Uploads a run's local copy to its bucket in the background.

    Args:
        objects: Objects of the run.
        sent: Files already uploaded, with their stamps; by default every file of the copy that the bucket has by name.
        tell: Called when uploads start to fail, and when they succeed again.
        part: Part of this process, if other hosts write parts of the checkpoints; then only process 0 uploads the
            other files.

    Raises:
        RunError: the bucket refuses access.
    """

    def __init__(
        self,
        objects: Objects,
        sent: Mapping[str, Stamp] | None = None,
        tell: store.Tell = _say,
        part: Part | None = None,
    ) -> None:
        self._objects, self._copy, self._tell = objects, objects.folder.copy, tell
        self._there = set(objects.names())
        if sent is None:
            local = ((name, stamp_of(self._copy / name)) for name in files_of(self._copy))
            sent = {name: stamp for name, stamp in local if stamp is not None}
        self._sent = {name: stamp for name, stamp in sent.items() if name in self._there}
        self._records, _ = _records(objects)
        self._parts = (
            None if part is None else HostParts(objects, part, self._upload_all, self._there)
        )
        self._writes = part is None or part.index == 0
        self._kept: SentRecord | None = None
        self._keep()
        self._sending = threading.Lock()
        self._waiting: set[str] | None = set()
        """Steps whose checkpoint is not uploaded yet; None once a checkpoint deleted before its upload was reported."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="systolic-sender", daemon=True)

    def start(self) -> None:
        """Uploads the existing files, then starts the background thread."""
        self.send()
        self._thread.start()

    def close(self, *, waits: bool = True) -> None:
        """Uploads the remaining files; with ``waits`` also waits for the parts of other hosts.

        Raises:
            RunError: the upload failed, or parts of other hosts are missing; the copy is complete.
        """
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.send()
        except RunError as error:
            raise RunError(
                f"the last changes to {self._copy} were not uploaded to {self._objects.folder.url} ({error}); the copy is complete, and the next command on this machine that reads or continues the run uploads them"
            ) from error
        if self._writes:
            if waits:
                self._await_parts()
            _record(self._copy).unlink(missing_ok=True)

    def _await_parts(self) -> None:
        news, since = -1, time.monotonic()
        while self._parts is not None and (left := self._parts.open_steps()):
            if self._parts.news != news:
                news, since = self._parts.news, time.monotonic()
            if time.monotonic() - since > PATIENCE_SECONDS:
                raise RunError(
                    f"{self._objects.folder.url} lacks parts of the checkpoint of step {left[-1]}: other hosts uploaded nothing for {PATIENCE_SECONDS:.0f} s; rerun to continue from the previous checkpoint"
                )
            time.sleep(LOOK_SECONDS)
            self.send()

    def send(self, *, deletes: bool = True, ours: Callable[[], bool] = lambda: True) -> None:
        """Uploads changed files and, unless ``deletes`` is false, deletes objects whose file is gone.

        Args:
            deletes: Whether to delete objects.
            ours: Asked before the records and before the manifests, which make arrays a checkpoint.

        Raises:
            RunError: the upload failed, or ``ours`` was false; the arrays sent are then deleted.
        """
        with self._sending:
            self._note_dropped()
            self._send_new(deletes, ours)

    def _note_dropped(self) -> None:
        """Reports once that a checkpoint was deleted before its upload; if all are, the bucket never gets a new one."""
        if self._waiting is None or not self._writes:
            return
        sent = {name.split("/")[1] for name in self._sent if is_manifest(name)}
        here = {file.parent.name for file in (self._copy / CHECKPOINTS).glob("[0-9]*/*.json")}
        dropped = sorted(map(int, self._waiting - here - sent))
        self._waiting = {step for step in here if step.isdigit()} - sent
        if dropped:
            self._waiting = None
            self._tell(
                f"the checkpoint of step {dropped[0]} was deleted for newer ones before it was uploaded to {self._objects.folder.url}; save less often (--checkpoints.every) or keep more (--checkpoints.keep-last)"
            )

    def _send_new(self, deletes: bool, ours: Callable[[], bool]) -> None:
        if self._parts is not None:
            self._parts.advance()
        if not self._writes:
            return
        # A step's records are written before its checkpoint: list files first, upload logs after arrays.
        local = files_of(self._copy)
        whole = _whole(local)
        changed = [name for name in local if self._sent.get(name) != stamp_of(self._copy / name)]
        arrays = [name for name in changed if is_array(name) and name.split("/")[1] in whole]
        manifests = [name for name in changed if is_manifest(name)]
        others = [n for n in changed if not is_array(n) and not is_manifest(n)]
        absent = self._there - set(local)
        # Arrays of a step that were never downloaded here stay in the bucket as long as its manifest.
        gone = [n for n in absent if not (is_array(n) and n.split("/")[1] in whole)]
        try:
            self._upload(arrays)
            for names in (others, manifests):
                if names and not ours():
                    self._take_back(arrays)
                    raise _TakenOverError(f"{self._objects.folder.url} has another writer")
                self._upload(names)
            for name in sorted(gone, key=lambda name: not is_manifest(name)) if deletes else ():
                self._objects.delete(name)
                self._there.discard(name)
                self._sent.pop(name, None)
        finally:
            self._keep()

    def _keep(self) -> None:
        if not self._writes:
            return
        writer = self._copy / WRITER
        named = writer.read_bytes() if writer.exists() else b""
        record = SentRecord(files=dict(self._sent), records=self._records, writer=named)
        if record != self._kept:
            record.write(self._copy)
            self._kept = record

    def _take_back(self, arrays: Sequence[str]) -> None:
        """Deletes uploaded arrays that no manifest will name."""
        for name in arrays:
            self._objects.delete(name)
            self._there.discard(name)
            self._sent.pop(name, None)

    def _upload(self, names: Sequence[str]) -> None:
        def send(name: str) -> None:
            # A checkpoint may be deleted meanwhile, together with its manifest.
            with suppress(FileNotFoundError):
                self._send_one(name)

        in_parallel(send, names)

    def _upload_all(self, names: Sequence[str]) -> None:
        """Uploads files that are not up to date in the bucket; raises FileNotFoundError if one is gone."""
        stamps = {name: stamp_of(self._copy / name) for name in names}
        new = [n for n, stamp in stamps.items() if stamp is None or self._sent.get(n) != stamp]
        in_parallel(self._send_one, new)

    def _send_one(self, name: str) -> None:
        stamp, content = stamp_of(self._copy / name), (self._copy / name).read_bytes()
        assert stamp is not None
        self._objects.write(name, content)
        self._sent[name] = stamp
        self._there.add(name)
        if name == RECORDS:
            self._records = hashlib.sha256(content).hexdigest()

    def _watch(self) -> None:
        sent, failed = time.monotonic(), False
        while not self._ended.wait(LOOK_SECONDS):
            if time.monotonic() - sent > SEND_SECONDS or self._has_new_checkpoint():
                try:
                    self.send()
                except RunError as error:  # Retried in the next round.
                    if not failed:
                        self._tell(
                            f"{error}; until uploads succeed, new files are only in {self._copy}"
                        )
                    failed = True
                else:
                    if failed:
                        self._tell(f"{self._objects.folder.url} is up to date again")
                    failed = False
                sent = time.monotonic()

    def _has_new_checkpoint(self) -> bool:
        if self._parts is not None and self._parts.open_steps():
            return True
        if not self._writes:
            return False
        files = (self._copy / CHECKPOINTS).glob(f"[0-9]*/{manifest.NAME}")
        return any(file.relative_to(self._copy).as_posix() not in self._sent for file in files)


def _whole(local: Sequence[str]) -> set[str]:
    """Steps whose manifest is in the copy."""
    return {name.split("/")[1] for name in local if is_manifest(name)}


def in_parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Runs transfers concurrently."""
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        for _ in pool.map(work, names):
            pass


def files_of(copy: Path) -> list[str]:
    """Names of the files in a copy to upload: no lock, no unfinished files."""
    names = []
    for folder, folders, files in os.walk(copy):
        unfinished = (".orbax-checkpoint-tmp", *manifest.FOLDERS)
        folders[:] = [n for n in folders if not n.startswith(".") and not n.endswith(unfinished)]
        inside = Path(folder).relative_to(copy)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names)


def stamp_of(file: Path) -> tuple[int, int] | None:
    """Size in bytes and modification time of a file; None if it doesn't exist."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


def is_array(name: str) -> bool:
    """Whether a file of a run belongs to a checkpoint and is not its manifest."""
    return re.match(rf"{CHECKPOINTS}/\d+/", name) is not None and not is_manifest(name)


def is_manifest(name: str) -> bool:
    """Whether a file of a run is the manifest of a checkpoint."""
    return re.fullmatch(rf"{CHECKPOINTS}/\d+/{manifest.NAME}", name) is not None
