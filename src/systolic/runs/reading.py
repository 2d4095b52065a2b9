"""Reads of a checkpoint, in one process or in several that must agree.

A checkpoint is read by every process of a job or by none. Their findings (no such step, damage, another
model) are exchanged before a decision, so that all raise or return alike.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import NotFoundError, RunError
from systolic.core.files import fault_of
from systolic.runs import manifest as manifests
from systolic.runs import tree
from systolic.runs.manifest import DamagedError, Manifest
from systolic.runs.remote import mirror
from systolic.runs.remote.upload import Part

Wanted = Mapping[tuple[str, ...], Any]
"""Path to abstract leaf."""


def _alone(text: str) -> list[str]:
    return [text]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This process among those of its job; alone by default."""

    index: int = 0
    count: int = 1
    exchange: Callable[[str], list[str]] = _alone
    """Exchanges a text of each process for the texts of all, in order; every process calls it at the same point."""
    part: Part | None = None
    """Part of a run that has several copies."""

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this is the i-th of n processes that read the same files."""
        return (self.index, self.count) if self.part is None else self.part.share

    def tell(self, **mine: Any) -> list[dict[str, Any]]:
        """Values of every process, in order."""
        return [json.loads(text) for text in self.exchange(json.dumps(mine))]

    def named(self, index: int, reason: str) -> str:
        """``reason`` with its process, if there are several."""
        return f"{reason} in process {index}" if self.count > 1 else reason


ALONE = Peers()


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """One restore from the checkpoints in ``folder``."""

    folder: Path
    peers: Peers

    def common(
        self, candidates: Callable[[], list[int]]
    ) -> tuple[list[int], list[tuple[int, str]]]:
        """Steps that every process sees, in the first one's order; then the others, newest first, with the reason.

        Args:
            candidates: Steps that this process sees, the preferred first.

        Raises:
            NotFoundError: ``candidates`` raised it in a process.
        """
        steps: list[int] = []
        missing = ""
        try:
            steps = candidates()
        except NotFoundError as error:
            missing = str(error)
        answers = self.peers.tell(steps=steps, missing=missing)
        for index, each in enumerate(answers):
            if each["missing"]:
                raise NotFoundError(self.peers.named(index, each["missing"]))
        unseen = {
            step: self.peers.named(index, "not there")
            for step in {step for each in answers for step in each["steps"]}
            for index, each in enumerate(answers)
            if step not in each["steps"]
        }
        common = [step for step in answers[0]["steps"] if step not in unseen]
        return common, sorted(unseen.items(), reverse=True)

    def verified(self, step: int, wanted: Wanted, only: Sequence[str] | None) -> Manifest:
        """Manifest of a checkpoint after a check of its files.

        Every process compares all sizes and its share of the bytes, so that bytes of a copy are read once.

        Raises:
            DamagedError: a process found damage, or reads another manifest.
            RunError: it holds another model.
        """
        from systolic.runs import backend

        folder, manifest, damaged, other = self.path(step), None, "", ""
        try:
            manifest = manifests.read(folder)
            mirror.complete(folder)
            held = {
                path: leaf
                for path, leaf in manifest.leaves.items()
                if only is None or (path and path[0] in only)
            }
            tree.require_same(step, held, wanted)
            items = {backend.EXTRA, *map(tree.item, wanted)}
            manifests.verify(folder, manifest, items, self.peers.share)
        except DamagedError as error:
            damaged = str(error)
        except RunError as error:
            other = str(error)
        digest = "" if manifest is None else manifest.digest
        answers = self.peers.tell(damaged=damaged, other=other, digest=digest)
        for index, each in enumerate(answers):
            if each["other"]:
                raise RunError(each["other"])
            if each["damaged"]:
                raise DamagedError(self.peers.named(index, each["damaged"]))
            if each["digest"] != answers[0]["digest"]:
                raise DamagedError(self.peers.named(index, f"another {manifests.NAME}"))
        assert manifest is not None
        return manifest

    def load(
        self, step: int, wanted: Wanted
    ) -> tuple[dict[tuple[str, ...], Any], list[dict[str, Any]]]:
        """Arrays by path, and the values that each process saved beside them.

        Raises:
            DamagedError: a file has disappeared meanwhile in a process.
            RunError: the files are intact but do not load.
        """
        from systolic.runs import backend

        folder, loaded, damaged, failed = self.path(step), None, "", ""
        cause: Exception | None = None
        try:
            loaded = backend.load(folder, wanted), backend.load_extra(folder)
        except DamagedError as error:
            damaged = str(error)
        except Exception as error:
            cause, failed = error, fault_of(error)
        for index, each in enumerate(self.peers.tell(damaged=damaged, failed=failed)):
            if each["failed"]:
                # Every byte is as it was written, so an older checkpoint would fail alike.
                reason = self.peers.named(index, each["failed"])
                raise RunError(
                    f"checkpoint of step {step} is intact but could not be loaded: {reason}"
                ) from cause
            if each["damaged"]:
                raise DamagedError(self.peers.named(index, each["damaged"]))
        assert loaded is not None
        return loaded

    def path(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.folder / str(step)
