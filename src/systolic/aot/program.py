"""What to compile: a step of a job, or anyone's function. Sent to the child as bytes."""

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from systolic.chips import Slice
from systolic.core.errors import LayoutError
from systolic.job import Job

_KNOWN = ("systolic", "builtins")
"""Packages whose code is a part of every key."""


class Verb(enum.Enum):
    """Which of a job's programs."""

    train = "train"
    eval = "eval"
    prefill = "prefill"
    decode = "decode"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A program with abstract, sharded arguments, and what is known of it before any compiler."""

    traced: Any
    """``jax.stages.Traced``."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """model_flops, unit and units per call, notes, layout, precision."""
    mesh: Any = None


class Program(Protocol):
    """Something to compile."""

    def key(self) -> Any:
        """JSON that names it; equal keys trace to equal programs. None when there is no such name."""
        ...

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """Its trace for those devices; called in the child."""
        ...


@dataclass(frozen=True, kw_only=True)
class JobProgram:
    """One of a job's steps."""

    job: Job
    verb: Verb = Verb.train

    def key(self) -> Any:
        """The job and the verb; None where a part is the user's own class, whose code the job does not tell."""
        parts = (getattr(self.job, one.name) for one in fields(self.job))
        if any(type(part).__module__.split(".")[0] not in _KNOWN for part in parts):
            return None
        return {"job": self.job.to_json(), "verb": self.verb.value}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice, the model or the batch.
        """
        from systolic.aot.steps import trace_job

        return trace_job(self.job, self.verb, on, devices)


@dataclass(frozen=True, kw_only=True)
class FunctionProgram:
    """Anyone's function with abstract arguments.

    ``args`` hold ShapeDtypeStructs (or arrays) whose shardings are PartitionSpecs over ``mesh``:
    each leaf's spec is in ``specs``, the flat list of the arguments' leaves.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: Mapping[str, int]
    specs: tuple[Any, ...]
    out_specs: Any = None
    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    model_flops: float | None = None
    units: tuple[str, float] | None = None

    def key(self) -> Any:
        """None: a function has no name that tells its code; it is known once it is lowered."""
        return

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`."""
        from systolic.aot.functions import trace_function

        return trace_function(self, on, devices)


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a report."""
    inner = inspect.unwrap(function)
    return getattr(inner, "__name__", type(function).__name__)


def definite(job: Job, on: Slice) -> Job:
    """The job with its layout and precision settled for a slice.

    Raises:
        LayoutError: the layout does not divide it.
    """
    made = job.on(on.num_devices, on.num_slices)
    if on.platform == "cpu" and on.num_slices > 1:
        raise LayoutError(f"{on.name} has several slices; a CPU has one")
    return replace(made, precision=made.precision.resolve(on.platform))
