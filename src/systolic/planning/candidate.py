"""One point of the search (slice, layout, batch, precision, compiler flags), and a change of its settings, tried by a search and advised by an explanation."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice
from systolic.chips.flags import merged
from systolic.job import Batch, Job, Layout, Precision, Remat
from systolic.job.layout import Group, fields_of, group_of
from systolic.planning.flags import DEFAULT, FlagSet, joined


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Candidate of the search, with a definite layout."""

    on: Slice
    layout: Layout
    batch: int
    """Examples an optimizer step."""
    precision: Precision
    flags: FlagSet = DEFAULT
    """Flags on top of ``base``."""
    base: tuple[str, ...] = ()
    """Compiler flags of all candidates on this chip: the shared set and the user's."""

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """All compiler flags, ``base`` included."""
        return merged(self.base, self.flags.flags)

    def job(self, base: Job) -> Job:
        """The job under this layout."""
        return replace(
            base, layout=self.layout, batch=Batch(total=self.batch), precision=self.precision
        )

    @property
    def per_pass(self) -> float:
        """Examples of one device in one forward and backward pass; a fraction where an axis splits an example."""
        layout = self.layout
        ways = layout.batch_ways * layout.context * layout.tensor * layout.pipeline
        return self.batch / (ways * layout.accumulate)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key: axes in use, offload, how much is recomputed, flags under trial, passes, loss chunks."""
        of, flags = self.layout, len(self.flags.flags)
        recomputed = of.remat is Remat.offload, list(Remat).index(of.remat)
        axes = sum(size > 1 for size in of.mesh_shape.values())
        return axes, *recomputed, flags, of.accumulate, of.loss_chunks

    @property
    def name(self) -> str:
        """``v5e-16 data 2 fsdp 8 remat full accumulate 2``."""
        return f"{self.on.name} {self.text}"

    @property
    def text(self) -> str:
        """The layout in words."""
        flags = "" if self.flags is DEFAULT else f" flags {self.flags.name}"
        return f"{self.layout.text}{flags}"

    def settings(self, base: Job) -> dict[str, Any]:
        """Settings that differ from the job, by option: ``layout.fsdp``, ``batch``, ``precision``."""
        always = {*fields_of(Group.mesh), "accumulate"}
        if self.on.num_slices == 1:
            always.discard("slices")
        mine, plain, own = (layout.settings() for layout in (self.layout, Layout(), base.layout))
        settings: dict[str, Any] = {
            f"layout.{name}": value
            for name, value in mine.items()
            if name in always or not value == plain[name] == own[name]
        }
        if base.precision.resolve(self.on.platform) is not self.precision:
            settings["precision"] = self.precision.value
        settings["batch"] = self.batch
        return settings


class ChangedPart(enum.Enum):
    """Parts of a candidate that a change sets besides the groups of a layout's fields."""

    flags = "flags"
    batch = "batch"
    precision = "precision"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """New values for some settings; flags are added to the candidate's."""

    layout: tuple[tuple[str, Any], ...] = ()
    """(field, value) pairs of the layout."""
    flags: FlagSet = DEFAULT
    batch: int | None = None
    precision: Precision | None = None

    @property
    def same_result(self) -> bool:
        """Whether training gives the same model but for rounding; a new batch or precision changes training."""
        return self.batch is None and self.precision is None

    @property
    def touches(self) -> frozenset[Group | ChangedPart]:
        """Parts that it sets."""
        others = {
            ChangedPart.flags: self.flags is not DEFAULT,
            ChangedPart.batch: self.batch is not None,
            ChangedPart.precision: self.precision is not None,
        }
        return frozenset(
            (
                *(group_of(name) for name, _ in self.layout),
                *(p for p, sets in others.items() if sets),
            )
        )

    def on(self, candidate: Candidate) -> Candidate:
        """The candidate with this change."""
        return replace(
            candidate,
            layout=replace(candidate.layout, **dict(self.layout)),
            flags=joined(candidate.flags, self.flags),
            batch=candidate.batch if self.batch is None else self.batch,
            precision=candidate.precision if self.precision is None else self.precision,
        )

    def text(self, base: Candidate) -> str:
        """The change relative to a candidate: ``accumulate 2 -> 1``."""
        after = self.on(base)
        texts = base.layout.difference(after.layout)
        if self.flags is not DEFAULT:
            texts.append(f"flags {self.flags.name}")
        if self.batch is not None:
            texts.append(f"batch {base.batch} -> {self.batch}")
        if self.precision is not None:
            texts.append(f"precision {base.precision.value} -> {self.precision.value}")
        return ", ".join(texts) or "the same settings"


def layout_change(**layout: Any) -> Change:
    """Change of some of a layout's fields."""
    return Change(layout=tuple(layout.items()))


def together(base: Candidate, helped: Sequence[Change]) -> Candidate:
    """A base with all changes that helped alone; the first in ``helped`` wins where two set the same."""
    for change in reversed(helped):
        base = change.on(base)
    return base


def compatible(helped: Iterable[Change]) -> list[Change]:
    """Changes that touch different settings, the first of each; sets of flags add up."""
    chosen: list[Change] = []
    touched: set[Group | ChangedPart] = set()
    for change in helped:
        if not (change.touches - {ChangedPart.flags}) & touched:
            touched |= change.touches
            chosen.append(change)
    return chosen


def differences(before: Layout, after: Candidate) -> list[str]:
    """Settings of a layout that a candidate changes, and the flags that it adds: ``accumulate 2 -> 1``."""
    flags = [] if after.flags is DEFAULT else [f"flags {after.flags.name}"]
    return [*before.difference(after.layout), *flags]
