"""One point of the search: a slice, a layout, a batch, a precision and compiler flags."""

import enum
from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice
from systolic.chips.flags import merged
from systolic.job import Axis, Batch, Job, Layout, Placement, Precision, Remat
from systolic.plan.flags import DEFAULT, FlagSet

_POLICY = (
    "residual",
    "remat",
    "remat_names",
    "saved_names",
    "attention_block",
    "attention_backward",
    "loss_tiles",
    "placement",
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is compiled; the layout is definite."""

    on: Slice
    layout: Layout
    batch: int
    """Examples an optimizer step."""
    precision: Precision
    flags: FlagSet = DEFAULT
    """On top of ``base``."""
    base: tuple[str, ...] = ()
    """Compiler flags of all candidates on this chip: the shared set and the user's."""

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """All flags that it is compiled with."""
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
        layout = self.layout
        parts = [f"{axis.value} {layout.size(axis)}" for axis in Axis if layout.size(axis) > 1]
        if layout.tensor > 1 and layout.residual is not Layout().residual:
            parts.append(f"residual {layout.residual.value}")
        parts += [f"remat {remat_text(layout)}"]
        if layout.accumulate > 1:
            parts.append(f"accumulate {layout.accumulate}")
        if layout.attention_block != 512:
            parts.append(f"attention block {layout.attention_block}")
        if layout.attention_backward is not Layout().attention_backward:
            parts.append(f"attention backward {layout.attention_backward.value}")
        if layout.loss_tiles > 1:
            parts.append(f"loss tiles {layout.loss_tiles}")
        if layout.placement is not Placement.lines:
            parts.append(f"placement {layout.placement.value}")
        if self.flags is not DEFAULT:
            parts.append(f"flags {self.flags.name}")
        return " ".join(parts)

    def settings(self, base: Job) -> dict[str, Any]:
        """What differs from the job, by option: ``layout.fsdp``, ``batch``, ``precision``."""
        found: dict[str, Any] = {}
        for axis in Axis:
            found[f"layout.{axis.value}"] = self.layout.size(axis)
        if self.on.num_slices > 1:
            found["layout.slices"] = self.layout.slices.value
        found["layout.accumulate"] = self.layout.accumulate
        for name in _POLICY:
            value = getattr(self.layout, name)
            if value != getattr(Layout(), name) or value != getattr(base.layout, name):
                found[f"layout.{name}"] = value.value if isinstance(value, enum.Enum) else value
        if base.precision.resolve(self.on.platform) is not self.precision:
            found["precision"] = self.precision.value
        found["batch"] = self.batch
        return found


def remat_text(layout: Layout) -> str:
    """The policy, with the names it keeps or moves."""
    if layout.remat is Remat.save_names:
        return f"save {'+'.join(layout.remat_names)}"
    if layout.remat is Remat.offload:
        kept = f" keep {'+'.join(layout.saved_names)}" if layout.saved_names else ""
        return f"offload {'+'.join(layout.remat_names)}{kept}"
    return layout.remat.value
