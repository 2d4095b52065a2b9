"""Sending what a run writes into its copy to its bucket, also what a killed writer left unsent."""

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from systolic.artifact import manifest, replace, room
from systolic.artifact.objects import Objects
from systolic.artifact.parts import CHECKPOINTS, HostParts, Part
from systolic.core.errors import RunError
from systolic.core.files import write_json

RECORDS = "metrics.jsonl"
"""File that every session of a run adds to."""
SEND_SECONDS = 10.0
"""Between two sendings of what a run has written."""
LOOK_SECONDS = 1.0
"""Between two looks for a new checkpoint, which is sent at once."""
PATIENCE_SECONDS = 600.0
"""At the end, for parts of checkpoints that other hosts send, after the last that came."""
_TRANSFERS = 8

Stamp = tuple[int, int]
"""Size in bytes and time of the last change."""


def _say(text: str) -> None:
    print(f"systolic: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRecord:
    """What a writer has sent, kept beside its copy until it has sent all."""

    files: Mapping[str, Stamp]
    records: str
    """SHA-256 of the bucket's ``metrics.jsonl``, empty without one."""

    def write(self, copy: Path) -> None:
        """Keeps it."""
        value = {"files": {n: list(stamp) for n, stamp in self.files.items()}}
        write_json(_record(copy), value | {"records": self.records})

    @classmethod
    def read(cls, copy: Path) -> "SentRecord | None":
        """That of a copy whose last writer did not end well."""
        try:
            value = json.loads(_record(copy).read_text())
            files = {name: (size, changed) for name, (size, changed) in value["files"].items()}
            return cls(files=files, records=value["records"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _record(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.sent.json")


def _records(objects: Objects) -> tuple[str, bytes]:
    found = objects.read(RECORDS)
    return ("", b"") if found is None else (hashlib.sha256(found[0]).hexdigest(), found[0])


def _is_ours(objects: Objects, sent: SentRecord) -> bool:
    """Whether nobody else has written the run since: a kill may come between sending its records and noting it."""
    digest, content = _records(objects)
    records = objects.folder.copy / RECORDS
    goes_on = bool(content) and records.exists() and records.read_bytes().startswith(content)
    return digest == sent.records or goes_on


def send_rest(objects: Objects, tell: room.Tell, *, sends: bool = True) -> None:
    """Sends what a writer that was killed, or whose bucket did not answer, has left in a copy.

    Where the run has gone on elsewhere since, and unless ``sends``, that is set aside. A part of a checkpoint that other
    hosts have parts of is neither.

    Raises:
        RunError: it cannot be sent; the copy stays as it is.
    """
    copy = objects.folder.copy
    sent = SentRecord.read(copy)
    if sent is None:
        return
    local = files_of(copy)
    whole = _whole(local)
    unsent = [name for name in local if sent.files.get(name) != stamp_of(copy / name)]
    unsent = [name for name in unsent if not is_array(name) or name.split("/")[1] in whole]
    if unsent and not (sends and _is_ours(objects, sent)):
        aside = _aside(copy)
        tell(
            f"{objects.folder.url} has gone on elsewhere since {len(unsent)} files were written here that never reached it; they are kept in {aside}"
        )
    elif unsent:
        try:
            Sender(objects, sent.files).send(deletes=False)
        except RunError as error:
            raise RunError(
                f"{copy} holds {len(unsent)} files of {objects.folder.url} that never reached it, and they cannot be sent now ({error}); try again, or give the folder itself"
            ) from error
        steps = sorted(int(name.split("/")[1]) for name in unsent if is_manifest(name))
        which = f", with the checkpoints of steps {steps}" if steps else ""
        tell(
            f"sent {len(unsent)} files{which}, which were written here and not yet in {objects.folder.url}"
        )
    _record(copy).unlink(missing_ok=True)


def _aside(copy: Path) -> Path:
    """Moves a copy's content, but for its lock, to a folder beside it."""
    numbers = iter(range(1, sys.maxsize))
    aside = next(
        p for n in numbers if not (p := copy.with_name(f"{copy.name}.unsent-{n}")).exists()
    )
    aside.mkdir()
    for entry in copy.iterdir():
        if not entry.name.startswith("."):
            entry.rename(aside / entry.name)
    return aside


class Sender:
    """Sends what a run writes into its copy to the bucket, in the background.

    Args:
        objects: The run's.
        sent: Files of the copy that are in the bucket as they were then; by default all that it has by these names.
        tell: Called when the bucket does not take them any more, and when it does again.
        part: Where other hosts write parts of the checkpoints; then only the first process sends anything else.

    Raises:
        RunError: the bucket refuses.
    """

    def __init__(
        self,
        objects: Objects,
        sent: Mapping[str, Stamp] | None = None,
        tell: room.Tell = _say,
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
        """Steps whose checkpoint the bucket does not have yet; None when it was said that one was dropped before."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="systolic-sender", daemon=True)

    def start(self) -> None:
        """Sends what is there, then goes on in the background."""
        self.send()
        self._thread.start()

    def close(self, *, waits: bool = True) -> None:
        """Sends the rest, and ``waits`` for that of other hosts.

        Raises:
            RunError: it could not be sent; the copy is whole.
        """
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.send()
        except RunError as error:
            raise RunError(
                f"{self._copy} is whole, and its last changes did not reach {self._objects.folder.url} ({error}); the next command here that reads or continues it sends them"
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
                    f"{self._objects.folder.url} lacks parts of the checkpoint of step {left[-1]}: nothing came from other hosts for {PATIENCE_SECONDS:.0f} s; it goes on from the checkpoint before"
                )
            time.sleep(LOOK_SECONDS)
            self.send()

    def send(self, *, deletes: bool = True) -> None:
        """Sends what changed and deletes what is gone, unless ``deletes`` is false."""
        with self._sending:
            self._note_dropped()
            self._send_new(deletes)

    def _note_dropped(self) -> None:
        """Says once that a checkpoint went before it was sent: where all do, the bucket never has a new one."""
        if self._waiting is None or not self._writes:
            return
        sent = {name.split("/")[1] for name in self._sent if is_manifest(name)}
        here = {file.parent.name for file in (self._copy / CHECKPOINTS).glob("[0-9]*/*.json")}
        dropped = sorted(map(int, self._waiting - here - sent))
        self._waiting = {step for step in here if step.isdigit()} - sent
        if dropped:
            self._waiting = None
            self._tell(
                f"the checkpoint of step {dropped[0]} made room for later ones before {self._objects.folder.url} had all of it; save more seldom (--checkpoints.every) or keep more (--checkpoints.keep-last)"
            )

    def _send_new(self, deletes: bool) -> None:
        if self._parts is not None:
            self._parts.advance()
        if not self._writes:
            return
        # A step's records are written before its checkpoint, so files are listed first and logs sent after arrays.
        local = files_of(self._copy)
        whole = _whole(local)
        changed = [name for name in local if self._sent.get(name) != stamp_of(self._copy / name)]
        arrays = [name for name in changed if is_array(name) and name.split("/")[1] in whole]
        manifests = [name for name in changed if is_manifest(name)]
        others = [n for n in changed if not is_array(n) and not is_manifest(n)]
        absent = self._there - set(local)
        # Arrays of a step that was not needed here stay there as long as its manifest.
        gone = [n for n in absent if not (is_array(n) and n.split("/")[1] in whole)]
        try:
            for names in (arrays, others, manifests):
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
        record = SentRecord(files=dict(self._sent), records=self._records)
        if record != self._kept:
            record.write(self._copy)
            self._kept = record

    def _upload(self, names: Sequence[str]) -> None:
        def one(name: str) -> None:
            # A checkpoint may go meanwhile; its manifest then does, too.
            with suppress(FileNotFoundError):
                self._send_one(name)

        in_parallel(one, names)

    def _upload_all(self, names: Sequence[str]) -> None:
        """Sends what is not yet there; raises FileNotFoundError where one is gone."""
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
                except RunError as error:  # It is tried again.
                    if not failed:
                        self._tell(
                            f"{error}; until it does, what is written is in {self._copy} alone"
                        )
                    failed = True
                else:
                    if failed:
                        self._tell(f"{self._objects.folder.url} has all again")
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
    """Steps whose manifest is here."""
    return {name.split("/")[1] for name in local if is_manifest(name)}


def in_parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Several transfers at a time."""
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        for _ in pool.map(work, names):
            pass


def files_of(copy: Path) -> list[str]:
    """Names of files in a copy that belong to the bucket: no lock, nothing half written."""
    found = []
    for folder, folders, files in os.walk(copy):
        unfinished = (".orbax-checkpoint-tmp", *replace.FOLDERS)
        folders[:] = [n for n in folders if not n.startswith(".") and not n.endswith(unfinished)]
        inside = Path(folder).relative_to(copy)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def stamp_of(file: Path) -> tuple[int, int] | None:
    """Size in bytes and time of the last change; None without the file."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


def is_array(name: str) -> bool:
    """Whether a file of a run is in a checkpoint, and not its manifest."""
    return re.match(rf"{CHECKPOINTS}/\d+/", name) is not None and not is_manifest(name)


def is_manifest(name: str) -> bool:
    """Whether a file of a run says what a checkpoint holds."""
    return re.fullmatch(rf"{CHECKPOINTS}/\d+/{manifest.NAME}", name) is not None
