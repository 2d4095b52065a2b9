"""Layout of a job: mesh axes, gradient accumulation, rematerialisation.

The mesh has six named axes. A size of 1 turns an axis off; ``fsdp = -1`` takes the remaining devices.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from systolic.core.errors import LayoutError, nearest
from systolic.core.ranges import COUNT, NOT_NEGATIVE, Range, check
from systolic.core.units import plural

AXIS = Range(least=1, only=(-1,))
"""Range of an axis size; -1 takes the remaining devices."""

RENAMED = {"loss_tiles": "loss_chunks"}
"""Earlier names of fields of a layout, which saved jobs and plans may have."""


class Axis(enum.Enum):
    """A mesh axis, from the one that communicates least (outermost) to the one that communicates most."""

    data = "data"
    """Replicas of the model, each with its share of the batch."""
    pipeline = "pipeline"
    """Consecutive layers on consecutive devices."""
    fsdp = "fsdp"
    """Parameters and optimizer state sharded, gathered layer by layer; the batch is split too."""
    expert = "expert"
    """Experts of a mixture on different devices; the batch is split too."""
    context = "context"
    """The sequence split."""
    tensor = "tensor"
    """Heads, hidden units and vocabulary split."""


class Remat(enum.Enum):
    """Activations of a layer that are saved for the backward pass; the others are recomputed."""

    none = "none"
    """All are saved: fastest when they fit."""
    minimal = "minimal"
    """Results of weight matmuls are saved; attention and elementwise ops are recomputed."""
    save_names = "save-names"
    """Only the activations named in ``Layout.remat_names`` are saved."""
    offload = "offload"
    """The activations named in ``Layout.remat_names`` are offloaded to host memory."""
    full = "full"
    """Only each layer's input is saved."""


class Residual(enum.Enum):
    """Sharding of the residual stream over the tensor axis between blocks, and with it of each saved layer input."""

    whole = "whole"
    """Replicated: each device of the axis holds all of it; the results of a block's matmuls are all-reduced."""
    sequence = "sequence"
    """Split by tokens: gathered before a block's matmuls, reduce-scattered after them (Korthikanti et al. 2022)."""
    embed = "embed"
    """Split by width, over which norms then sum across the axis."""


class AttentionBackward(enum.Enum):
    """Kernels that compute the gradients of the TPU attention kernel."""

    auto = "auto"
    """``fused`` where keys have up to four blocks, else ``split``."""
    fused = "fused"
    """One kernel with five matmuls per block of scores; each block of keys writes a partial sum of the queries' gradient to device memory."""
    split = "split"
    """One kernel for keys and values and one for queries: seven matmuls per block of scores, no partial sums in device memory."""


class Placement(enum.Enum):
    """Placement of mesh axes on the torus of a TPU slice."""

    lines = "lines"
    """Whole rings of the torus per axis where possible, else a part of one (JAX's own assignment)."""
    blocks = "blocks"
    """A compact block per axis, the innermost first, so that a short axis has links in two or three directions."""


class ContextOrder(enum.Enum):
    """Order of the tokens of a causal decoder over the context axis."""

    auto = "auto"
    """``natural`` on TPUs below 4,096 tokens, where reordering costs more than balanced work saves; else ``balanced``."""
    balanced = "balanced"
    """A piece of the start and one of the end on each device, so that all have equal attention work."""
    natural = "natural"
    """Contiguous pieces: the device with the end of the sequence has nearly twice the mean attention work."""


class Group(enum.Enum):
    """Fields of a layout that are chosen together: two changes of one group exclude each other."""

    mesh = "mesh"
    placement = "placement"
    passes = "passes"
    residual = "residual"
    remat = "remat"
    loss = "loss"
    attention = "attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Mesh axes and memory policies. Each field names its :class:`Group`; code that prints, compares or searches layouts iterates over the fields.

    Raises:
        LayoutError: a number outside its range, or more than one axis at -1.
    """

    data: Annotated[int, AXIS, Group.mesh] = 1
    """Replicas of the model; across slices this axis crosses the data-centre network."""
    fsdp: Annotated[int, AXIS, Group.mesh] = -1
    """Ways to shard parameters; -1 takes the remaining devices."""
    tensor: Annotated[int, AXIS, Group.mesh] = 1
    """Ways to split heads, hidden units and vocabulary."""
    context: Annotated[int, AXIS, Group.mesh] = 1
    """Ways to split the sequence."""
    expert: Annotated[int, AXIS, Group.mesh] = 1
    """Ways to split the experts of a mixture."""
    pipeline: Annotated[int, AXIS, Group.mesh] = 1
    """Stages of consecutive layers."""
    slices: Annotated[Axis, Group.mesh] = Axis.data
    """The axis that crosses slices when there are several (data, pipeline or fsdp)."""
    placement: Annotated[Placement, Group.placement] = Placement.lines
    """Placement of the axes on a TPU's torus."""
    context_order: Annotated[ContextOrder, Group.attention] = ContextOrder.auto
    """Order of the tokens over the context axis."""
    microbatches: Annotated[int, NOT_NEGATIVE, Group.passes] = 0
    """Microbatches in flight per pipeline pass; 0 means two per stage."""
    accumulate: Annotated[int, COUNT, Group.passes] = 1
    """Forward and backward passes per optimizer step."""
    residual: Annotated[Residual, Group.residual] = Residual.sequence
    """Sharding of the activations between blocks over the tensor axis; a dim that it does not divide stays whole."""
    remat: Annotated[Remat, Group.remat] = Remat.none
    """Activations that the backward pass recomputes."""
    remat_names: Annotated[tuple[str, ...], Group.remat] = (
        "query",
        "key",
        "value",
        "attention",
        "mlp",
    )
    """Activations that save-names saves or offload offloads; a decoder also has layer_input, out and down."""
    saved_names: Annotated[tuple[str, ...], Group.remat] = ()
    """Activations that offload saves in device memory besides the offloaded ones."""
    loss_chunks: Annotated[int, COUNT, Group.loss] = 1
    """Chunks of the sequence in a language model's loss; only one chunk's logits exist at a time. More chunks use less memory; above 1 the logits are computed twice."""
    attention_block: Annotated[int, Range(least=128), Group.attention] = 512
    """Block size of the TPU attention kernel in tokens, a multiple of 128; larger is faster where it fits VMEM."""
    attention_backward: Annotated[AttentionBackward, Group.attention] = AttentionBackward.auto
    """Kernels of attention's gradients on TPUs: fused does 5 matmuls instead of 7 and holds one more array of queries per block of keys."""

    def __post_init__(self) -> None:
        check(self, "layout", LayoutError)
        free = [axis.value for axis in Axis if self.size(axis) == -1]
        if len(free) > 1:
            raise LayoutError(
                f"layout has {' and '.join(free)} at -1; only one axis can take the remaining devices, so give the others a size"
            )
        both = sorted(set(self.remat_names) & set(self.saved_names))
        if self.remat is Remat.offload and both:
            raise LayoutError(
                f"layout.saved-names and layout.remat-names both have {', '.join(both)}; an activation is either offloaded or saved, name it once"
            )
        if self.attention_block % 128:
            raise LayoutError(
                f"layout.attention-block is {self.attention_block}; it must be a multiple of 128"
            )

    def size(self, axis: Axis) -> int:
        """The size of one axis, -1 when it takes the rest."""
        size: int = getattr(self, axis.value)
        return size

    def on(self, num_devices: int, num_slices: int = 1) -> "Layout":
        """The same layout with every axis definite for ``num_devices`` in ``num_slices`` slices.

        If the axis that crosses slices is 1, it becomes their number where the others allow it: the default
        on several slices is one replica of the model on each.

        Raises:
            LayoutError: the axes don't multiply to the number of devices.
        """
        if num_slices > 1 and self.size(self.slices) == 1:
            crossing = replace(self, **{self.slices.value: num_slices})
            if crossing.fits(num_devices):
                return crossing.on(num_devices)
        if not self.fits(num_devices):
            raise LayoutError(self._misfit(num_devices))
        rest = num_devices // self._fixed
        return replace(self, **dict.fromkeys(self._free, rest))

    @property
    def _fixed(self) -> int:
        return math.prod(size for axis in Axis if (size := self.size(axis)) != -1)

    @property
    def _free(self) -> list[str]:
        return [axis.value for axis in Axis if self.size(axis) == -1]

    def fits(self, num_devices: int) -> bool:
        """Whether the axes can multiply to so many devices."""
        return self._fixed == num_devices or (bool(self._free) and num_devices % self._fixed == 0)

    def _misfit(self, num_devices: int) -> str:
        fixed = self._fixed
        axes = [f"{axis.value} {n}" for axis in Axis if (n := self.size(axis)) not in (1, -1)]
        shape = ", ".join(axes) or "all axes 1"
        have = f"{num_devices:,} {'is' if num_devices == 1 else 'are'} available"
        if self._free:
            return f"layout ({shape}) needs a multiple of {plural(fixed, 'device')}, but {have}; choose axes whose product divides {num_devices}"
        return f"layout ({shape}) is for {plural(fixed, 'device')}, but {have}; choose axes whose product is {num_devices}, or set one to -1 to take the remaining devices"

    def check_slices(self, num_slices: int) -> None:
        """Whether a definite layout spreads over so many slices.

        Raises:
            LayoutError: the axis that crosses slices is not a multiple of their number.
        """
        ways = self.size(self.slices)
        if ways % num_slices:
            raise LayoutError(
                f"layout.{self.slices.value} {ways} is not a multiple of the {num_slices} slices it crosses; choose a multiple, or another axis for layout.slices"
            )

    def check_effects(self) -> None:
        """Whether each field that is set has an effect beside the others.

        Raises:
            LayoutError: names the field and what it needs.
        """
        named = self.remat in (Remat.save_names, Remat.offload)
        for name, works, needs in (
            ("remat_names", named, "--layout.remat save-names or offload"),
            ("saved_names", self.remat is Remat.offload, "--layout.remat offload"),
            ("microbatches", self.pipeline != 1, "--layout.pipeline"),
        ):
            if not works and getattr(self, name) != getattr(_PLAIN, name):
                raise LayoutError(
                    f"layout.{name.replace('_', '-')} has no effect here; leave it out, or set {needs}"
                )

    def take(self, other: "Layout", *groups: Group) -> "Layout":
        """Copy of this layout with the fields of some groups taken from another."""
        return replace(
            self,
            **{name: getattr(other, name) for group in groups for name in fields_of(group)},
        )

    def differs(self, other: "Layout", group: Group) -> bool:
        """Whether a field of a group has another value in the other layout."""
        return any(getattr(self, name) != getattr(other, name) for name in fields_of(group))

    def settings(self) -> dict[str, Any]:
        """Values by field as they are typed or saved: an enum by its value."""
        return {
            field.name: value.value if isinstance(value, enum.Enum) else value
            for field in fields(self)
            for value in (getattr(self, field.name),)
        }

    def words(self) -> dict[str, str]:
        """Text of each setting by its label: ``attention block`` to ``1024``. Axes come first, outermost first."""
        words = {axis.value: str(self.size(axis)) for axis in Axis}
        words["remat"] = self.policy
        for name, value in self.settings().items():
            if name not in _SPOKEN:
                words.setdefault(name.replace("_", " "), str(value))
        return words

    @property
    def text(self) -> str:
        """Axes larger than 1, rematerialisation, and settings that are not their default: ``data 2 fsdp 8 remat full``."""
        plain = _PLAIN.words() | {axis.value: "1" for axis in Axis} | {"remat": ""}
        if self.tensor == 1:
            plain["residual"] = str(self.residual.value)
        return " ".join(
            f"{name} {text}" for name, text in self.words().items() if plain[name] != text
        )

    def difference(self, other: "Layout") -> list[str]:
        """Changes from this layout to another: ``fsdp 16 -> 8``."""
        now, then = self.words(), other.words()
        return [f"{name} {now[name]} -> {then[name]}" for name in now if now[name] != then[name]]

    @property
    def policy(self) -> str:
        """Rematerialisation policy with the names that it saves or offloads."""
        if self.remat is Remat.save_names:
            return f"save {'+'.join(self.remat_names)}"
        if self.remat is Remat.offload:
            kept = f" keep {'+'.join(self.saved_names)}" if self.saved_names else ""
            return f"offload {'+'.join(self.remat_names)}{kept}"
        return self.remat.value

    def num_microbatches(self, batch: int) -> int:
        """Microbatches of a pass over ``batch`` examples; 0 without a pipeline."""
        if self.pipeline == 1:
            return 0
        return self.microbatches or min(2 * self.pipeline, max(1, batch // self.batch_ways))

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {axis.value: self.size(axis) for axis in Axis}

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values: the axes, outermost first, then the others in their order."""
        plain = {
            name: list(v) if isinstance(v, tuple) else v for name, v in self.settings().items()
        }
        return self.mesh_shape | plain

    @property
    def definite(self) -> bool:
        """Whether no axis takes the remaining devices."""
        return not self._free

    @property
    def num_devices(self) -> int:
        """Product of the axes of a definite layout."""
        return math.prod(self.mesh_shape.values())

    @property
    def batch_ways(self) -> int:
        """Number of parts that the batch is split into."""
        return self.data * self.fsdp * self.expert


_SPOKEN = (*(axis.value for axis in Axis), "remat", "remat_names", "saved_names")
"""Fields whose label is not their name."""
_PLAIN = Layout()


@cache
def fields_of(group: Group) -> tuple[str, ...]:
    """Names of a group's fields."""
    hints = get_type_hints(Layout, include_extras=True)
    return tuple(name for name, hint in hints.items() if group in hint.__metadata__)


@cache
def group_of(name: str) -> Group:
    """The group of a field."""
    return next(group for group in Group if name in fields_of(group))


def refuse_axes(
    layout: Layout, model: str, *axes: Axis, instead: str = "layout.data or layout.fsdp"
) -> None:
    """Raises LayoutError when one of ``axes`` is used, which ``model`` has nothing to split over."""
    for axis in axes:
        if layout.size(axis) > 1:
            raise LayoutError(
                f"layout.{axis.value} is {layout.size(axis)} but {model} has nothing to split that way; set it to 1 and use {instead}"
            )


def check_divides(layout: Layout, sizes: Iterable[tuple[Axis, str, int]]) -> None:
    """Raises LayoutError for the first axis that does not divide the size of a model's dim of this name."""
    for axis, dim, size in sizes:
        if size % layout.size(axis):
            raise LayoutError(
                f"layout.{axis.value} {layout.size(axis)} does not divide model.{dim} {size}; use a divisor of {size}, or change model.{dim}"
            )


def check_names(layout: Layout, model: str, activations: Sequence[str]) -> None:
    """Raises LayoutError where the layout keeps an activation that ``model`` does not name."""
    if layout.remat in (Remat.save_names, Remat.offload):
        for name in (*layout.remat_names, *layout.saved_names):
            if name not in activations:
                raise LayoutError(
                    f"layout.remat-names has {name!r}{nearest(name, activations)}; {model} names {', '.join(activations)}"
                )
