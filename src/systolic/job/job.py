"""The job: everything that decides what is computed, as one frozen value; and the same job on fewer devices than it was made for."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import msgspec

from systolic.chips import Slice
from systolic.core.errors import LayoutError, OptionError, OutOfRangeError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range, check, complaint, ranges_of
from systolic.core.units import with_article
from systolic.job.data import Data
from systolic.job.layout import Axis, Layout, Remat
from systolic.job.model import Adapter, Model, Task
from systolic.job.optimizer import Optimizer, Schedule
from systolic.job.precision import Dtypes, Precision, Quantization


class Mode(enum.Enum):
    """Direction in which a metric improves."""

    min = "min"
    max = "max"


class GuardRule(enum.Enum):
    """Policy for a loss that is not finite or jumps."""

    stop = "stop"
    """Stop before the bad update is applied, name the step and save its batch."""
    skip = "skip"
    """Drop the update, count it, save the batch and continue; stop after ``patience`` in a row."""
    ignore = "ignore"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Examples per optimizer step: ``total``, or ``per_device`` x devices x accumulation."""

    total: Annotated[int | None, COUNT] = None
    per_device: Annotated[float | None, POSITIVE] = None

    def __post_init__(self) -> None:
        if (self.total is None) == (self.per_device is None):
            raise OptionError(
                f"batch total {self.total} and batch per device {self.per_device}: give exactly one of them"
            )
        check(self, "batch")

    @classmethod
    def given(cls, total: int | None, per_device: float | None, own: "Batch") -> "Batch":
        """Batch of a recipe's options, or its ``own`` if neither is given.

        Raises:
            OptionError: both are given, or one is out of its range.
        """
        if total is None and per_device is None:
            return own
        if total is not None and per_device is not None:
            raise OptionError(
                f"--batch is {total} and --batch-per-device is {per_device:g}, and both set the size of the batch; give one of them"
            )
        ranges = ranges_of(cls)
        typed = (("--batch", "total", total), ("--batch-per-device", "per_device", per_device))
        for option, name, value in typed:
            if (invalid := complaint(option, ranges[name], value)) is not None:
                raise OutOfRangeError(invalid)
        return cls(total=total, per_device=per_device)

    def resolve(self, layout: Layout) -> int:
        """Examples per optimizer step under a definite layout.

        Raises:
            LayoutError: the batch does not divide over passes and batch axes.
        """
        if self.total is not None:
            total = self.total
        else:
            exact = (
                Fraction(self.per_device or 0).limit_denominator(4096)
                * layout.num_devices
                * layout.accumulate
            )
            total = int(exact)
            if exact != total or total < 1:
                raise LayoutError(
                    f"batch of {self.per_device} per device on {layout.num_devices} devices makes {float(exact):g} examples a step, which must be a whole number of at least 1; change --batch-per-device"
                )
        ways = layout.batch_ways * layout.accumulate
        if total < 1:
            raise LayoutError(
                f"batch is {total}; a step takes at least {ways}, one for each part of the layout"
            )
        if total % ways:
            raise LayoutError(
                f"batch of {total} does not divide by {ways} (data {layout.data} x fsdp {layout.fsdp} x expert {layout.expert} x accumulate {layout.accumulate}); use a multiple of {ways}"
            )
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Evaluation during training.

    Raises:
        OptionError: a number outside its range.
    """

    every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    batches: Annotated[int, NOT_NEGATIVE] = 0
    """Batches per evaluation; 0 reads the full split."""
    final_batches: Annotated[int | None, NOT_NEGATIVE] = None
    """Batches of the last evaluation, 0 for the full split; by default as many as in the others."""
    metric: str = "loss"
    """Metric that ranks checkpoints and decides early stopping."""
    mode: Mode = Mode.min
    patience: Annotated[int, NOT_NEGATIVE] = 0
    """Evaluations without improvement before stopping early; 0 never stops early."""

    def __post_init__(self) -> None:
        check(self, "evaluation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Checkpoints to write and to keep.

    Raises:
        OptionError: a number outside its range.
    """

    every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between checkpoints. Whatever it is, one is written at the end, when interrupted, and after each evaluation on the way
    if keep-best is above 0."""
    keep_last: Annotated[int, COUNT] = 2
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, NOT_NEGATIVE] = 1
    """Number of best checkpoints to keep besides, by the evaluation's metric."""

    def __post_init__(self) -> None:
        check(self, "checkpoints")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Guard against a loss that is not finite or jumps.

    Raises:
        OptionError: a number outside its range.
    """

    rule: GuardRule = GuardRule.stop
    jump: Annotated[float, Range(above=1, only=(0,))] = 3.0
    """A loss above ``jump`` times its running mean is bad; 0 checks for NaN and infinity only."""
    patience: Annotated[int, COUNT] = 10
    """skip: consecutive bad steps before stopping."""

    def __post_init__(self) -> None:
        check(self, "guard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything to compute, immutable, comparable, and saved as JSON with every run."""

    name: str
    model: Model
    task: Task
    data: Data
    steps: Annotated[int, COUNT]
    batch: Batch
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = Precision.auto
    dtypes: Dtypes = field(default_factory=Dtypes)
    layout: Layout = field(default_factory=Layout)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    guard: Guard = field(default_factory=Guard)
    seed: Annotated[int, NOT_NEGATIVE] = 0
    sample: str | None = None
    """Prompt that a language model continues at the end of training."""
    start: Path | None = None
    """The weights that it begins with: a Hugging Face directory, a Bundle, a GGUF file or a run; None for random ones."""
    adapter: Adapter = field(default_factory=Adapter)
    """Trained part of the model."""
    quantization: Quantization = field(default_factory=Quantization)
    """Matrices that are stored in fewer bits, of a model that came so; such a job does not train."""

    def __post_init__(self) -> None:
        _check_parts(self.model, self.task, self.data)
        check(self)
        self.adapter.check(type(self.model).__name__, self.model.adaptable())
        self.model.check_optimizer(self.optimizer.kind)

    def on(self, num_devices: int, num_slices: int = 1) -> "Job":
        """The same job with a definite layout.

        Raises:
            LayoutError: an axis does not divide the devices, the slices, the model or the batch, or the
            model does not follow the rematerialisation policy.
        """
        layout = self.layout.on(num_devices, num_slices)
        layout.check_slices(num_slices)
        if layout.remat not in self.model.policies():
            known = ", ".join(policy.value for policy in Remat if policy in self.model.policies())
            raise LayoutError(
                f"layout.remat is {layout.remat.value}, which {type(self.model).__name__} does not support; it takes {known}"
            )
        self.model.check(layout)
        self.model.check_batch(self.batch.resolve(layout) // layout.accumulate)
        return replace(self, layout=layout)

    def for_slice(self, on: Slice) -> "Job":
        """The same job with layout and precision definite for a slice.

        Raises:
            LayoutError: as :meth:`on`, or several slices of a CPU.
            OptionError: the model has no matmuls in the precision's format.
        """
        if on.platform == "cpu" and on.num_slices > 1:
            raise LayoutError(f"{on.name} has several slices; a CPU has one")
        settled = self.on(on.num_devices, on.num_slices)
        precision = settled.precision.resolve(on.platform)
        settled.check_precision(precision)
        return replace(settled, precision=precision)

    def check_precision(self, precision: Precision) -> None:
        """Raises OptionError where the model has no such precision, or an adapter's frozen matrices would be rounded."""
        self.model.check_precision(precision)
        if precision.weight_format is not None and self.adapter:
            raise OptionError(
                f"precision is {precision.value}, and beside an adapter the matrices do not train; leave the adapter out, or use bf16"
            )

    def check_effects(self) -> None:
        """Whether each field of model and layout that is set has an effect in this job.

        Raises:
            LayoutError: one of the layout has none.
            OptionError: one of the model has none.
        """
        self.layout.check_effects()
        self.model.check_effects(self.precision)

    @property
    def forward_flops(self) -> float | None:
        """Matmul FLOPs of one example's forward pass, adapters included; ``None``: counted from the program."""
        fields = self.data.fields()
        known = self.model.flops(fields)
        if known is None or not self.adapter:
            return known
        tokens = fields["tokens"].shape[0] if "tokens" in fields else 1
        return known + 2.0 * tokens * self.adapter_parameters

    @property
    def adapter_parameters(self) -> int:
        """Elements of all adapters."""
        if not self.adapter:
            return 0
        known = self.model.adaptable()
        return self.adapter.rank * sum(known[name] for name in self.adapter.targets or known)

    @property
    def unused_flops(self) -> float:
        """FLOPs of gradients of one example that no step computes: of the input, and of frozen weights."""
        fields = self.data.fields()
        frozen = self.model.weight_flops(fields) if self.adapter else 0.0
        return self.model.input_flops(fields) + frozen

    def to_json(self) -> dict[str, Any]:
        """The job as plain values; parts that are chosen by class carry it as ``type``."""
        plain = {
            name: msgspec.to_builtins(getattr(self, name), enc_hook=_plain) for name in _FIELDS
        }
        for part in ("model", "task", "data"):
            plain[part] = {"type": type(getattr(self, part)).__name__, **plain[part]}
        if self.quantization:
            plain["quantization"] = msgspec.to_builtins(self.quantization, enc_hook=_plain)
        return plain


def _plain(value: Any) -> Any:
    return str(value)


_FIELDS = tuple(name for name in Job.__dataclass_fields__ if name != "quantization")
"""Fields of a job that trains."""


def _check_parts(model: object, task: object, data: object) -> None:
    """Refuses parts of a job that are of other kinds, as a recipe's author may give them.

    Raises:
        OptionError: one is; names the kind that wraps it.
    """
    if not isinstance(data, Data):
        cure = "give a Data, such as systolic.data.arrays.Arrays.of(train={name: array}, validation={name: array})"
        if isinstance(data, Mapping):
            splits = ", ".join(f"{name}=…" for name in data if isinstance(name, str))
            cure = f"wrap it: systolic.data.arrays.Arrays.of({splits or 'train={name: array}'}), or Arrays.call(load) for a function that makes it"
        elif callable(data):
            cure = "wrap it: systolic.data.arrays.Arrays.call(load) calls it when the data is first needed"
        raise OptionError(f"the job's data is {with_article(type(data).__name__)}; {cure}")
    if not isinstance(model, Model):
        raise OptionError(
            f"the job's model is {with_article(type(model).__name__)}; give a systolic.job.Model, a frozen dataclass whose build(rngs, target) returns the module"
        )
    if not isinstance(task, Task):
        raise OptionError(
            f"the job's task is {with_article(type(task).__name__)}; give a systolic.job.Task, whose terms(model, batch, train) return the loss"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fewer:
    """A job that was made for more devices than there are."""

    intended: Job
    """With the definite layout and batch that it was made for."""
    job: Job
    """For the devices that are there."""
    text: str
    """Summary of the change, on one line."""


def on_fewer(job: Job, intended: int, num_devices: int, num_slices: int = 1) -> Fewer | None:
    """The job with the same batch in every step; None where no device is missing.

    The axis that crosses slices shrinks with the devices, or one at -1 does, or fsdp; passes grow so that no device
    has more examples at a time.

    Args:
        job: With its layout for all devices.
        intended: Devices that layout and batch are for.
        num_devices: Devices that are there.
        num_slices: Slices that they are in.

    Raises:
        LayoutError: there are more devices than ``intended``, no axis shrinks to a whole number, or the batch does not divide.
    """
    if num_devices > intended:
        raise LayoutError(
            f"for-devices is {intended} and {num_devices} devices are available; give --for-devices {num_devices}, or leave it out"
        )
    if num_devices == intended:
        return None
    full = job.layout.on(intended)
    total = job.batch.resolve(full)
    shrunk = _shrunk(job.layout, full, num_devices).on(num_devices, num_slices)
    most = total // (full.batch_ways * full.accumulate)
    rows = next((n for n in range(most, 0, -1) if total % (shrunk.batch_ways * n) == 0), 0)
    if not rows:
        raise LayoutError(
            f"batch of {total} does not divide by the {shrunk.batch_ways} parts that {num_devices} of {intended} devices have (data {shrunk.data} x fsdp {shrunk.fsdp} x expert {shrunk.expert}); start all devices, or give a layout for {num_devices}"
        )
    layout = replace(shrunk, accumulate=total // (shrunk.batch_ways * rows))
    changes = ", ".join(
        f"{axis.value} {layout.size(axis)} (was {full.size(axis)})"
        for axis in Axis
        if layout.size(axis) != full.size(axis)
    )
    passes = f"{layout.accumulate} (was {full.accumulate})"
    return Fewer(
        intended=replace(job, layout=full, batch=Batch(total=total)),
        job=replace(job, layout=layout, batch=Batch(total=total)),
        text=f"{num_devices} of {intended} devices are here: batch {total} as before, passes a step {passes}, {changes}",
    )


def _shrunk(layout: Layout, full: Layout, num_devices: int) -> Layout:
    """The layout with an axis that is smaller in proportion, or still takes the remaining devices.

    Raises:
        LayoutError: there is none.
    """
    crossing = layout.slices
    for axis in (crossing, Axis.fsdp, Axis.data):
        size = full.size(axis) * num_devices
        if layout.size(axis) > 1 and size % full.num_devices == 0:
            return replace(layout, **{axis.value: size // full.num_devices})
        if axis is crossing and not layout.definite and layout.fits(num_devices):
            return layout
    raise LayoutError(
        f"layout {full.text} is for {full.num_devices} devices, and neither {crossing.value} nor fsdp shrinks to {num_devices}; start all of them, or give a layout for {num_devices}"
    )
