"""Checkpoints of a run in a bucket that several hosts write without a folder in common.

Each host has a copy of the run, and in it its part of every checkpoint, with a manifest of that part (``part.json``). It sends
the part's files, and then says so in the bucket. When all have, the first process makes of the parts one
checkpoint there and writes its manifest. So a checkpoint in the bucket is there as a whole or not at all, whichever host ends when.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from systolic.artifact import manifest as manifests
from systolic.artifact.objects import Objects

CHECKPOINTS = "checkpoints"
_SAID = "parts"
"""Folder in a checkpoint of the bucket where hosts say what they have sent."""
_OF_PROCESS = re.compile(r"(^|[/.])process_\d+(\.json)?(/|$)")
"""Names that no other process writes."""
_DATABASE = re.compile(r"([^/]+)/(ocdbt\.process_\d+)/")
"""An item of a checkpoint, and the database in it that a process has written."""

Files = Mapping[str, tuple[int, int]]
"""Size in bytes and CRC-32 by name in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a process holds of a run whose processes have several copies."""

    index: int
    """Of this process."""
    leaders: tuple[int, ...]
    """By process: the first one with the same copy."""
    session: str
    """Text of this session, the same in all processes, which tells its parts from those of one before."""
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Held while a manifest of the copy is changed."""

    @property
    def leader(self) -> int:
        """The first process with this copy, which looks after it."""
        return self.leaders[self.index]

    @property
    def leads(self) -> bool:
        """Whether that is this process."""
        return self.leader == self.index

    @property
    def members(self) -> list[int]:
        """The processes with this copy."""
        return [index for index, leader in enumerate(self.leaders) if leader == self.leader]

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this is the i-th of n processes with this copy."""
        return self.members.index(self.index), len(self.members)


def rate(folder: Path, metrics: Mapping[str, float], part: Part | None) -> None:
    """Replaces the metrics in the manifest of a checkpoint, or of a host's part of it."""
    with nullcontext() if part is None else part.lock:
        name = manifests.NAME if manifests.is_at(folder) else manifests.PART
        held = manifests.read(folder, (name,))
        manifests.write(folder, replace(held, metrics=dict(metrics)), name)


class HostParts:
    """The parts of checkpoints in the copy of one host, and in the first process also those that the others have sent.

    Args:
        objects: The run's.
        part: Of this host.
        send: Sends files of the copy by name; raises FileNotFoundError where one went meanwhile.
        there: Names in the bucket, to which those are added that are not from this copy.
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
        """Grows when something of another host has come."""
        return len(self._seen)

    def open_steps(self) -> list[int]:
        """Steps whose part is not sent or, in the first process, whose checkpoint is not complete in the bucket."""
        folders = self._folder.glob(f"[0-9]*/{manifests.PART}")
        steps = sorted(int(file.parent.name) for file in folders if file.parent.name.isdigit())
        return steps if self._part.index == 0 else [n for n in steps if n not in self._sent]

    def advance(self) -> None:
        """Sends what is new, and in the first process completes what can be.

        Raises:
            RunError: the bucket does not take it.
        """
        for step in self.open_steps():
            # Retention may drop it meanwhile, here as in the other copies.
            with suppress(FileNotFoundError, manifests.DamagedError):
                mine = manifests.read(self._folder / str(step), (manifests.PART,)).files
                if self._part.index == 0:
                    self._send([f"{CHECKPOINTS}/{step}/{name}" for name in mine])
                    self._complete(step, mine)
                else:
                    self._say(step, mine)

    def _say(self, step: int, mine: Files) -> None:
        """Sends what no other host has, and says so."""
        mine = {name: file for name, file in mine.items() if _OF_PROCESS.search(name)}
        self._send([f"{CHECKPOINTS}/{step}/{name}" for name in mine])
        said = {"session": self._part.session, "files": mine}
        self._objects.write(_said(step, self._part.leader), json.dumps(said).encode())
        self._sent.add(step)

    def _complete(self, step: int, mine: Files) -> None:
        """Makes one checkpoint of the parts of all hosts, when all have said theirs."""
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
        found = self._objects.read(_said(step, leader))
        said = {} if found is None else json.loads(found[0])
        if said.get("session") == self._part.session:
            files = {name: (size, crc) for name, (size, crc) in said["files"].items()}
            self._said[step][leader] = files

    def _merge(self, below: str, files: Files) -> Files:
        """Makes one database of those of all processes, which it refers to; its own files."""
        databases: dict[str, list[str]] = {}
        for item, database in sorted({m.groups() for n in files if (m := _DATABASE.match(n))}):
            databases.setdefault(item, []).append(f"{below}{item}/{database}")
        made: dict[str, tuple[int, int]] = {}
        for item, parts in databases.items():
            own = (f"{below}{item}/d/", f"{below}{item}/manifest.ocdbt")
            for left in self._objects.names(f"{below}{item}/"):
                if left.startswith(own):  # A merge before has failed.
                    self._objects.delete(left)
            self._objects.merge(f"{below}{item}", parts)
            for name in self._objects.names(f"{below}{item}/"):
                if name.startswith(own) and (found := self._objects.read(name)) is not None:
                    made[name.removeprefix(below)] = manifests.crc32_of(found[0])
        return made


def _said(step: int, leader: int) -> str:
    return f"{CHECKPOINTS}/{step}/{_SAID}/{leader}.json"
