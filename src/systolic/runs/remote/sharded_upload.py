"""Checkpoints in a bucket that several hosts write without a shared folder.

Each host has a copy of the run with its part of every checkpoint, and a manifest of that part (``part.json``). It
uploads the part's files, then a note of them. When all hosts have, process 0 merges the parts into one checkpoint in
the bucket and writes its manifest. So a checkpoint in the bucket is complete or absent, whenever a host dies.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from systolic.runs import manifest as manifests
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
