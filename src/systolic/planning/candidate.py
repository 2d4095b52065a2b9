"""One point of the search: a slice, a layout, a batch, a precision and compiler flags."""

from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice
from systolic.chips.flags import merged
from systolic.job import Batch, Job, Layout, Precision
from systolic.job.layout import Group, fields_of
from systolic.planning.flags import DEFAULT, FlagSet


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
        mine, plain, own = (one.settings() for one in (self.layout, Layout(), base.layout))
        found: dict[str, Any] = {
            f"layout.{name}": value
            for name, value in mine.items()
            if name in always or not value == plain[name] == own[name]
        }
        if base.precision.resolve(self.on.platform) is not self.precision:
            found["precision"] = self.precision.value
        found["batch"] = self.batch
        return found
