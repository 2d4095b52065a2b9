"""``systolic serve --check-cache``: which programs a server would find on the disk, and why not the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.serving.server import (
    ServeSettings,
    ServeTarget,
    expecting,
    opened,
    targets,
    writes,
)

if TYPE_CHECKING:
    from systolic.compiling.program_store import EntryCheck, ProgramStore
    from systolic.serving.batch.options import BatchOptions
    from systolic.steps.steps import StepFunctions


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPrograms:
    """Programs of a model that a server would look for."""

    name: str
    version: int
    folder: Path
    """Folder of all entries."""
    programs: "Sequence[EntryCheck]"
    notes: Sequence[str] = ()
    """Why nothing is kept, where that is so."""

    @property
    def hits(self) -> int:
        """Programs that are on the disk."""
        return sum(one.hit for one in self.programs)

    def lines(self) -> list[str]:
        """For a terminal."""
        count = f"{self.hits} of {len(self.programs)} programs are in {self.folder}"
        return [f"{self.name}: {count}", *self.notes, *(f"  {one.line}" for one in self.programs)]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "version": self.version,
            "folder": str(self.folder),
            "hits": self.hits,
            "programs": [one.to_json() for one in self.programs],
            "notes": list(self.notes),
        }


def kept_programs(words: Sequence[str], settings: ServeSettings) -> list[KeptPrograms]:
    """Looks up the programs that a server of these models would find on the disk; reads no weights and compiles nothing.

    Raises: as :func:`systolic.serving.server.serve` for a model that can't be opened.
    """
    return [_checked(one, settings) for one in targets(words)]


def _checked(target: ServeTarget, settings: ServeSettings) -> KeptPrograms:
    from systolic.compiling.program_store import ProgramStore

    steps, notes = _steps(target, settings), list[str]()
    store = ProgramStore(steps, notes.append)
    settings = expecting(settings, target.name, steps.job)
    if writes(steps.job):
        from systolic.serving.text.opening import plan_engine

        found = plan_engine(steps, settings.sizes, store).kept()
    else:
        found = _of_batches(steps, settings.batch, store)
    return KeptPrograms(
        name=target.name,
        version=target.version,
        folder=store.root,
        programs=found,
        notes=notes,
    )


def _steps(target: ServeTarget, settings: ServeSettings) -> "StepFunctions":
    """Programs of the first of a model's engines."""
    from systolic.serving.text.replica_placement import ReplicaPlacement

    placement = ReplicaPlacement(asked=settings.layout, sizes=settings.sizes)
    return opened(target, settings, placement, 0, lambda _: None).setup.steps


def _of_batches(
    steps: "StepFunctions", options: "BatchOptions", store: "ProgramStore"
) -> "list[EntryCheck]":
    from systolic.inference.predictor import Predictor
    from systolic.serving.batch.model import buckets_of
    from systolic.serving.batch.opening import intake_of

    state = steps.abstract_state
    params, rest = state.params, state.model_state
    intake = intake_of(steps, params, rest, options.limits, store)
    run = Predictor(intake.form, params, rest, store)
    return [store.check(run.spec(bucket)) for bucket in buckets_of(intake, options).all]
