"""Reading a checkpoint, alone or in several processes that must come to the same answer.

A checkpoint is read by every process of a job or by none. What each one found (no such step, damage,
another model) is exchanged before anything is decided, so all of them raise or return alike.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.artifact import failure, tree
from systolic.artifact import manifest as manifests
from systolic.artifact.manifest import DamagedError, Manifest
from systolic.core.errors import NotFoundError, RunError

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
    """A text of each process to those of all, in order; every process calls it at the same point."""

    def tell(self, **mine: Any) -> list[dict[str, Any]]:
        """What every process says here, as plain values, in order."""
        return [json.loads(text) for text in self.exchange(json.dumps(mine))]

    def named(self, index: int, reason: str) -> str:
        """``reason`` with the process that gave it, where there are several."""
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
        """The steps that every process sees, in the first one's order; the others, newest first, with the reason.

        Args:
            candidates: Those that this process sees, the preferred first.

        Raises:
            NotFoundError: ``candidates`` raised it in a process.
        """
        steps: list[int] = []
        missing = ""
        try:
            steps = candidates()
        except NotFoundError as error:
            missing = str(error)
        told = self.peers.tell(steps=steps, missing=missing)
        for index, each in enumerate(told):
            if each["missing"]:
                raise NotFoundError(self.peers.named(index, each["missing"]))
        unseen = {
            step: self.peers.named(index, "not there")
            for step in {step for each in told for step in each["steps"]}
            for index, each in enumerate(told)
            if step not in each["steps"]
        }
        common = [step for step in told[0]["steps"] if step not in unseen]
        return common, sorted(unseen.items(), reverse=True)

    def verified(self, step: int, wanted: Wanted, only: Sequence[str] | None) -> Manifest:
        """The manifest of a checkpoint whose files are as they were written.

        Every process compares all sizes and its share of the bytes, so that they are read once.

        Raises:
            DamagedError: a process found damage, or reads another manifest.
            RunError: it holds another model.
        """
        from systolic.artifact import backend

        folder, manifest, damaged, other = self.path(step), None, "", ""
        try:
            manifest = manifests.read(folder)
            held = {
                path: leaf
                for path, leaf in manifest.leaves.items()
                if only is None or (path and path[0] in only)
            }
            tree.require_same(step, held, wanted)
            part = (self.peers.index, self.peers.count)
            manifests.verify(folder, manifest, {backend.EXTRA, *map(tree.item, wanted)}, part)
        except DamagedError as error:
            damaged = str(error)
        except RunError as error:
            other = str(error)
        digest = "" if manifest is None else manifest.digest
        told = self.peers.tell(damaged=damaged, other=other, digest=digest)
        for index, each in enumerate(told):
            if each["other"]:
                raise RunError(each["other"])
            if each["damaged"]:
                raise DamagedError(self.peers.named(index, each["damaged"]))
            if each["digest"] != told[0]["digest"]:
                raise DamagedError(self.peers.named(index, f"another {manifests.NAME}"))
        assert manifest is not None
        return manifest

    def load(
        self, step: int, wanted: Wanted
    ) -> tuple[dict[tuple[str, ...], Any], list[dict[str, Any]]]:
        """The arrays by path, and what each process saved beside them.

        Raises:
            DamagedError: a file has disappeared meanwhile in a process.
            RunError: the files are as they were written and yet do not load.
        """
        from systolic.artifact import backend

        folder, loaded, damaged, failed = self.path(step), None, "", ""
        cause: Exception | None = None
        try:
            loaded = backend.load(folder, wanted), backend.load_extra(folder)
        except DamagedError as error:
            damaged = str(error)
        except Exception as error:
            cause, failed = error, failure.reason(error)
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
        """The folder of a step's checkpoint."""
        return self.folder / str(step)
