"""Checkpoints of a run: saved in the background, verified when read, restored onto any devices.

A checkpoint is one folder per step, written by Orbax: one item per top-level part of the state
(``params``, ``optimizer``, ...), so a reader takes only what it needs. Its manifest commits in the
same rename, hence a folder without one is not a checkpoint of ours and is never restored.
"""

import contextlib
import dataclasses
import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from systolic.core.errors import NotFoundError, RunError
from systolic.core.files import fault_of, is_full
from systolic.job import Mode
from systolic.runs import manifest as manifests
from systolic.runs import tree
from systolic.runs.access import Access
from systolic.runs.manifest import DamagedError, Leaf, Manifest
from systolic.runs.reading import ALONE, Peers, Restore
from systolic.runs.remote import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """State being written, with the step and folder to commit."""

    step: int
    root: Path
    """Folder to write to: the store's own, or the one beside it if it replaces a checkpoint."""
    started: float
    """Seconds of ``time.monotonic``."""
    leaves: Mapping[tuple[str, ...], Leaf]
    metrics: Mapping[str, float]
    manifest: str = manifests.NAME
    """Name of the manifest: another where other hosts have other parts."""

    def seal(self) -> None:
        """Writes the manifest: after every array is on disk, before the commit.

        Raises:
            OSError: a file does not read.
            RunError: the manifest does not write.
        """
        from systolic.runs import backend

        manifests.seal(
            backend.scratch_folder(self.root, self.step),
            step=self.step,
            leaves=self.leaves,
            metrics=self.metrics,
            ignore=backend.CHANGES_AT_COMMIT,
            name=self.manifest,
        )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that can be ranked."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    step: int
    seconds: float
    """Upper bound: from the call of ``save`` until ``wait`` or ``poll`` noticed the commit."""
    num_bytes: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Content of a checkpoint."""

    step: int
    state: Any
    """The abstract state with arrays in place; leaves outside ``only`` are unchanged."""
    extras: Sequence[Mapping[str, Any]]
    """Values that each process saved beside the arrays, in order of the processes."""
    metrics: Mapping[str, float]
    skipped: Sequence[tuple[int, str]]
    """Newer (or better) checkpoints that are damaged: step and reason."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Values that the first process saved beside the arrays."""
        return self.extras[0]


class CheckpointStore:
    """The checkpoints in one folder.

    Args:
        folder: ``RUN/checkpoints``; made by the first save.
        keep_last: newest checkpoints to keep, at least 1.
        keep_best: checkpoints to keep by ``metric``; 0 keeps none for that reason.
        metric: the name in ``save(metrics=...)`` that ranks them; ``None`` ranks nothing.
        mode: whether a smaller or a larger metric is better.
        access: whether this process owns the folder.
        peers: the processes that restore from it together.

    Raises:
        RunError: ``keep_last`` is below 1.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        metric: str | None = None,
        mode: Mode = Mode.min,
        access: Access = Access.write,
        peers: Peers = ALONE,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise RunError(
                f"keep-last is {keep_last} and keep-best {keep_best}; keep at least 1 and 0 checkpoints"
            )
        self.folder = Path(folder).resolve()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.metric = metric
        self.mode = mode
        self.access = access
        self.peers = peers
        # A host's part of a checkpoint counts for the one that writes it, complete or not.
        self._names = manifests.ALONE if peers.part is None else manifests.IN_PARTS
        self._saver: Any = None
        self._flight: Flight | None = None
        self._written: set[int] = set()
        self._news: deque[SavedCheckpoint] = deque()
        self._read: dict[int, Manifest] = {}
        if access is Access.write:
            self._sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return [step for step in self._folders() if manifests.is_at(self.path(step), self._names)]

    def latest_step(self) -> int | None:
        """The newest committed step."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The committed step with the best metric; the later one if two are equal."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics that were saved with a step.

        Raises:
            NotFoundError: there is no such checkpoint, or its manifest is damaged.
        """
        try:
            return self._manifest(step).metrics
        except DamagedError as error:
            raise NotFoundError(f"checkpoint {step} in {self.folder}: {error}") from error

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / str(step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Starts writing a checkpoint; returns when the arrays may be donated or changed.

        A save that is still under way is waited for first. A step that this store has already
        written is not written again; one that an earlier process left is replaced when the new one
        is whole, so that there is always one.

        Args:
            step: optimizer steps done.
            state: a pytree of ``jax.Array``, typed PRNG keys among them.
            extra: ``bytes`` or JSON values by name, such as the data's position.
            metrics: numbers by name; ranks the checkpoint for ``keep_best``.

        Returns:
            False when the step is there already.

        Raises:
            RunError: this save or the one before failed; names the intact checkpoint.
            TypeError: a leaf is not a ``jax.Array``.
        """
        import jax

        self._require_write()
        self._commit_save()
        if step in self._written:
            return False
        if self.peers.part is not None and self.path(step).exists():
            if metrics:
                self.rate(step, metrics)
            return False
        table = tree.flatten(state)
        for path, leaf in table.items():
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"{tree.text(path)} is {type(leaf).__name__}, not a jax.Array")
        self._read.pop(step, None)
        self._flight = Flight(
            step=step,
            root=manifests.beside(self.folder) if self.path(step).exists() else self.folder,
            started=time.monotonic(),
            leaves={path: tree.describe(leaf) for path, leaf in table.items()},
            metrics=finite(metrics or {}),
            manifest=self._names[0],
        )
        try:
            self._open_saver(self._flight.root).save(step, table, extra or {})
        except Exception as error:
            self._fail(error)
        return True

    def rate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics, measured after the save, to the newest checkpoint.

        Checkpoints that are no longer among the newest or the best go.

        Args:
            step: of the checkpoint; a save that is under way is waited for.
            metrics: numbers by name, in place of those it had.

        Raises:
            RunError: its save failed, or the disk is full.
            NotFoundError: there is no such checkpoint, or its manifest is damaged.
        """
        self._require_write()
        self._commit_save()
        self.metrics(step)
        rated = dataclasses.replace(self._manifest(step), metrics=finite(metrics))
        if self._first():
            upload.rate(self.path(step), rated.metrics, self.peers.part)
        self._read[step] = rated
        self._close_saver()  # It keeps a list of its own of what is there.
        if self._first():
            kept = {*self.steps()[-self.keep_last :], *self._ranked()[: self.keep_best]}
            for surplus in {*self.steps()} - kept:
                shutil.rmtree(self.path(surplus))

    def poll(self) -> SavedCheckpoint | None:
        """Returns the oldest committed checkpoint not yet returned, without waiting.

        Raises:
            RunError: the save failed; names the intact checkpoint.
        """
        if self._flight is not None and not self._saver.saving():
            self._commit_save()
        return self._news.popleft() if self._news else None

    def wait(self) -> SavedCheckpoint | None:
        """Blocks until the save in progress is committed; returns as :meth:`poll`.

        Raises:
            RunError: the save failed; names the intact checkpoint.
        """
        self._commit_save()
        return self._news.popleft() if self._news else None

    def restore(
        self,
        abstract_state: Any,
        *,
        step: int | str | None = None,
        only: Sequence[str] | None = None,
    ) -> Restored:
        """Reads and verifies a checkpoint, into the shardings of ``abstract_state``.

        Several processes choose together: a checkpoint is read by all of them, or by none because one
        does not see it or finds it damaged. Each verifies a share of the files' bytes.

        Args:
            abstract_state: a pytree of ``jax.ShapeDtypeStruct`` (or arrays) whose shardings may be
                of any mesh; a leaf without one goes to the first device.
            step: a step, ``"best"``, or ``None`` for the newest. Where the newest or best is
                damaged, the next one is read, unranked ones among them; a step that is asked for by
                number is read or refused.
            only: top-level names, such as ``("params",)``; nothing else is read from disk.

        Raises:
            NotFoundError: there is no such checkpoint.
            RunError: none is intact, or it holds another model; names the first path that differs.
        """
        self._commit_save()
        wanted = {
            path: leaf
            for path, leaf in tree.flatten(abstract_state).items()
            if only is None or (path and path[0] in only)
        }
        reading = Restore(folder=self.folder, peers=self.peers)
        candidates, skipped = reading.common(lambda: self._candidates(step))
        for candidate in candidates:
            try:
                manifest = reading.verified(candidate, wanted, only)
                table, extras = reading.load(candidate, wanted)
            except DamagedError as error:
                skipped.append((candidate, str(error)))
                continue
            return Restored(
                step=candidate,
                state=tree.unflatten(abstract_state, table),
                extras=extras,
                metrics=manifest.metrics,
                skipped=tuple(skipped),
            )
        raise RunError(self._nothing_intact(step, skipped))

    def require_same(self, abstract_state: Any) -> None:
        """Checks that the newest checkpoint with an intact manifest holds the leaves of a state; reads no array.

        Raises:
            RunError: it does not; names the first path that differs.
        """
        newest = self.latest_step()
        if newest is not None:
            with contextlib.suppress(DamagedError):  # restoring tries the one before
                held = self._manifest(newest).leaves
                tree.require_same(newest, held, tree.flatten(abstract_state))

    def discard_after(self, step: int) -> list[int]:
        """Makes ``step`` the newest: later checkpoints go, damaged ones are set aside, not deleted.

        For a run that continues from an earlier checkpoint than its newest.

        Returns:
            The steps that were removed.
        """
        self._require_write()
        self._commit_save()
        later = [newer for newer in self._folders() if newer > step]
        for newer in later:
            try:
                manifest = self._manifest(newer)
                manifests.verify(self.path(newer), manifest, _top(manifest))
                shutil.rmtree(self.path(newer))
            except DamagedError:
                manifests.set_aside(self.folder, newer)
            self._read.pop(newer, None)
            self._written.discard(newer)
        self._close_saver()
        return later

    def close(self) -> None:
        """Waits for the save in progress and frees the threads.

        Raises:
            RunError: that save failed.
        """
        try:
            self._commit_save()
        finally:
            self._close_saver()

    def _commit_save(self) -> None:
        flight = self._flight
        if flight is None:
            return
        try:
            self._saver.wait()
            if flight.root == self.folder:
                manifest = manifests.read(self.path(flight.step), self._names)
            else:
                manifest = manifests.read_replaced(self.folder, flight.step)
                if self._first():
                    manifests.swap(self.folder, flight.step)
        except Exception as error:
            self._fail(error)
        self._flight = None
        self._written.add(flight.step)
        self._read[flight.step] = manifest
        self._news.append(
            SavedCheckpoint(
                step=flight.step,
                seconds=time.monotonic() - flight.started,
                num_bytes=manifest.num_bytes,
                path=self.path(flight.step),
            )
        )

    def _folders(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _manifest(self, step: int) -> Manifest:
        if step not in self._read:
            self._read[step] = manifests.read(self.path(step), self._names)
        return self._read[step]

    def _reads(self, step: int) -> bool:
        """Whether a step has an intact manifest."""
        try:
            self._manifest(step)
        except DamagedError:
            return False
        return True

    def _score(self, step: int) -> float | None:
        if self.metric is None:
            return None
        if self._flight is not None and self._flight.step == step:
            return self._flight.metrics.get(self.metric)
        try:
            return self._manifest(step).metrics.get(self.metric)
        except DamagedError:
            return None

    def _ranked(self) -> list[int]:
        scores = {step: self._score(step) for step in self.steps()}
        sign = 1 if self.mode is Mode.min else -1
        known = [(sign * score, -step) for step, score in scores.items() if score is not None]
        return [-negative for _, negative in sorted(known)]

    def _candidates(self, step: int | str | None) -> list[int]:
        saved = self._folders()
        if not saved:
            raise NotFoundError(f"{self.folder} holds no checkpoint; train a few steps first")
        if step is None:
            return saved[::-1]
        if step == "best":
            ranked = self._ranked()
            if not ranked:
                raise NotFoundError(
                    f"no checkpoint in {self.folder} has the metric {self.metric}; restore the newest or one of {_list(self.steps())}"
                )
            # Another intact checkpoint is worth more than none. A manifest that can't be read ranks
            # nothing, so it comes first and is named among the damaged ones.
            others = [other for other in saved[::-1] if other not in ranked]
            unread = [other for other in others if not self._reads(other)]
            return [*unread, *ranked, *(other for other in others if other not in unread)]
        if step not in saved:
            raise NotFoundError(
                f"there is no checkpoint of step {step} in {self.folder}; there are {_list(self.steps())}"
            )
        return [int(step)]

    def _nothing_intact(self, step: int | str | None, skipped: list[tuple[int, str]]) -> str:
        reasons = "; ".join(f"step {damaged}: {reason}" for damaged, reason in skipped)
        if isinstance(step, int):
            others = [other for other in self.steps() if other != step]
            return f"checkpoint of step {step} is damaged ({reasons.split(': ', 1)[1]}); choose another of {_list(others)}"
        return (
            f"no checkpoint in {self.folder} is intact ({reasons}); start again in another folder"
        )

    def _require_write(self) -> None:
        if self.access is not Access.write:
            raise RunError(f"{self.folder} is open for reading; open it with Access.write")

    def _first(self) -> bool:
        """Whether this process, of those that share the folder, may change committed checkpoints."""
        from systolic.runs import backend

        part = self.peers.part
        return backend.is_first() if part is None else part.leads

    def _open_saver(self, root: Path) -> Any:
        from systolic.runs import backend

        if self._saver is not None and self._saver.folder != root:
            self._close_saver()
        if self._saver is None:
            root.mkdir(parents=True, exist_ok=True)
            self._saver = backend.Saver(
                root,
                retention=backend.Retention(
                    keep_last=self.keep_last,
                    keep_best=self.keep_best if self.metric else 0,
                    mode=self.mode,
                ),
                score=self._score,
                before_commit=self._seal,
                part=self.peers.part,
            )
        return self._saver

    def _seal(self) -> None:
        if self._flight is None:
            raise RuntimeError("a commit without a save")
        self._flight.seal()

    def _close_saver(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    def _fail(self, error: Exception) -> None:
        """Forgets the failed save, frees its space and raises."""
        flight, self._flight = self._flight, None
        saver, self._saver = self._saver, None
        if saver is not None:
            with contextlib.suppress(Exception):  # The same failure, which is raised below.
                saver.close()
        if self._first():
            self._sweep()
        run = self.folder.parent if self.folder.name == "checkpoints" else self.folder
        step = flight.step if flight else None
        raise RunError(_not_saved(error, step, self.latest_step(), run)) from error

    def _sweep(self) -> None:
        if not self.folder.is_dir():
            return
        from systolic.runs import backend

        for scratch in backend.scratch_folders(self.folder):
            shutil.rmtree(scratch, ignore_errors=True)
        manifests.recover(self.folder)


def _top(manifest: Manifest) -> set[str]:
    return {name.split("/")[0] for name in manifest.files}


def _list(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _not_saved(error: BaseException, step: int | None, intact: int | None, run: Path) -> str:
    """Message of one line for a checkpoint that could not be written, with the newest step that is on disk."""
    kept = "there is no earlier checkpoint"
    if intact is not None:
        kept = f"the checkpoint of step {intact} is intact"
    cure = "free space" if is_full(error) else "fix that"
    return f"checkpoint of step {step} failed: {fault_of(error)}; {kept}; {cure} and continue with --resume {shlex.quote(str(run))}"
