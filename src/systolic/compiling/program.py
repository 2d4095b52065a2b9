"""Programs to compile: a step of a job, or a user's function. Sent to the child as bytes."""

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

from systolic.chips import Prices, Slice
from systolic.compiling.traced import FunctionCall, PagedCall, ServingCall, StepKind, Traced
from systolic.core.errors import SystolicError
from systolic.job import Job
from systolic.models.program.config import Maker

_KNOWN = ("systolic", "builtins")
"""Packages whose code is part of every key."""
_UNASKED = ("power_watts", "power_watts_min", "power_watts_max", "tdp_watts")
"""Fields of a chip, besides its prices, that no program depends on."""


class Program(Protocol):
    """Program to compile."""

    def key(self) -> Any:
        """JSON key; equal keys trace to equal programs. None for a program without one."""
        ...

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """Traces it for the devices; called in the child."""
        ...


@dataclass(frozen=True, kw_only=True)
class JobProgram:
    """Step of a job."""

    job: Job
    verb: StepKind = StepKind.train

    def key(self) -> Any:
        """The job, the arrays of a batch and the step kind; None where a part is a user's class, whose code is unknown."""
        if not _known(self.job):
            return None
        try:
            arrays = self.job.data.fields()
        except SystolicError:
            raise
        except Exception:  # an error of the user's data function, which the child reports
            return None
        batch = {
            name: [list(array.shape), array.dtype, list(array.axes)]
            for name, array in arrays.items()
        }
        return {"job": self.job.to_json(), "batch": batch, "verb": self.verb.value}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice, the model or the batch.
        """
        from systolic.compiling.steps import trace_job

        return trace_job(self.job, self.verb, on, devices)


@dataclass(frozen=True, kw_only=True)
class ServingProgram(ServingCall):
    """Step of a server of a job's language model."""

    def key(self) -> Any:
        """The job and the sizes; None where a part is a user's class, whose code is unknown."""
        if not _known(self.job):
            return None
        sizes: dict[str, Any] = {"rows": self.rows, "tokens": self.tokens, "context": self.context}
        sizes |= self.served.to_json()
        return {"job": self.job.to_json(), "serving": sizes}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice or the model.
            RunError: the model does not generate text.
        """
        from systolic.compiling.steps import trace_serving

        return trace_serving(self, on, devices)


@dataclass(frozen=True, kw_only=True)
class PagedProgram(PagedCall):
    """Step of a server over a cache in pages, as the engine runs it."""

    def key(self) -> Any:
        """The job and the sizes; None where a part is a user's class, whose code is unknown."""
        if not _known(self.job):
            return None
        sizes = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "job"
        }
        return {"job": self.job.to_json(), "paged": sizes | {"cache": self.cache.value}}

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`.

        Raises:
            LayoutError: the layout does not divide the slice or the model.
            RunError: the model does not generate text over pages.
        """
        from systolic.compiling.steps import trace_paged

        return trace_paged(self, on, devices)


@dataclass(frozen=True, kw_only=True)
class FunctionProgram(FunctionCall):
    """User's function with abstract arguments."""

    def key(self) -> Any:
        """None, since no name identifies a function's code; the lowered text does."""
        return

    def trace(self, on: Slice, devices: Sequence[Any]) -> Traced:
        """See :class:`Program`."""
        from systolic.compiling.functions import trace_function

        return trace_function(self, on, devices)


def _known(part: Any) -> bool:
    """Whether a value and its contents use only classes and functions whose code is part of every key."""
    if isinstance(part, Maker):
        return _known(part.__wrapped__)
    named = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    package = named.__module__.split(".")[0]
    if package not in _KNOWN and package not in sys.stdlib_module_names:
        return False
    if isinstance(part, functools.partial):
        return _known(part.func) and _known(part.args) and _known(part.keywords)
    if isinstance(part, Mapping):
        return all(_known(inner) for inner in part.values())
    if isinstance(part, list | tuple):
        return all(_known(inner) for inner in part)
    if is_dataclass(part):
        return all(_known(getattr(part, inner.name)) for inner in fields(part))
    return True


def decisive(on: Slice) -> str:
    """Facts of a slice and its chip that a program may depend on."""
    chip = replace(on.chip, usd_per_chip_hour=Prices(), **dict.fromkeys(_UNASKED))
    return repr(replace(on, chip=chip))
