"""Inputs and results of traces, without imports from their own package."""

import enum
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from systolic.job import Job, Served, ServedCache

OF_SOME = (
    *("batch_size", "parameters", "attention", "weight_bytes", "stored_bytes"),
    *("adapters_bytes", "cache_bytes", "page_bytes", "int8_products", "replicas"),
)
"""Fields of :class:`ProgramFacts` that jobs and servers alone have."""


class StepKind(enum.Enum):
    """Kind of a job's programs."""

    train = "train"
    eval = "eval"
    prefill = "prefill"
    decode = "decode"


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a program before any compile."""

    name: str = ""
    verb: str = "train"
    """A :class:`StepKind`, ``step`` of a server that reads and writes at once, ``function`` or ``captured``."""
    model_flops: int | float | None = None
    unit: str = "calls"
    """``tokens``, ``examples`` or ``calls``."""
    units: int | float = 1
    """Units of a step, all devices."""
    batch_size: int = 0
    parameters: int = 0
    precision: str | None = None
    layout: dict[str, Any] = {}
    attention: str = ""
    """Kernel of a cache in pages."""
    weight_bytes: float = 0.0
    """Bytes of the weights that a step reads on one device."""
    stored_bytes: float = 0.0
    """Bytes of all weights on one device."""
    adapters_bytes: float = 0.0
    """Bytes of those that are matrices of adapters side by side, which every step reads."""
    cache_bytes: float = 0.0
    """Bytes of the cache that a step reads on one device."""
    page_bytes: int = 0
    """Bytes of a page of the cache on one device."""
    int8_products: bool = False
    """Whether activations are multiplied in int8."""
    replicas: int = 0
    notes: list[str] = []

    def to_json(self) -> dict[str, Any]:
        """Plain values; of the fields of jobs and servers those that it has."""
        fields = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if value or name not in OF_SOME}


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Program with abstract, sharded arguments, and its facts before any compile."""

    traced: Any
    """``jax.stages.Traced``."""
    facts: ProgramFacts
    mesh: Any = None


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """Function with abstract arguments and their shardings."""

    content: bytes
    """A ``CalledFunction`` as :func:`systolic.compiling.pickled.packed` writes it."""
    name: str
    mesh: Mapping[str, int]
    specs: tuple[Any, ...]
    """PartitionSpecs over ``mesh`` by leaf of the arguments; None where ``in_specs`` and shardings have none."""
    axis_types: tuple[Any, ...] | None = None
    """Types of the axes as the user's mesh has them; None for ``Auto``."""
    devices: tuple[tuple[str, int], ...] = ()
    """Platform and number of the user's devices in the order of the mesh; empty where there is no such mesh."""
    in_context: bool = True
    """Whether ``mesh`` is JAX's mesh while the function is traced."""
    own_mesh: bool = True
    """Whether ``mesh`` is the user's; a default one gives way to a mesh that the function makes."""
    retried: bool = False
    """Whether it is traced in the context of its mesh after it failed without, or the other way round."""
    numbers_constant: bool = False
    """Whether numbers of Python among the arguments of a plain function are constants."""
    out_specs: Any = None
    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    model_flops: float | None = None
    units: tuple[str, float] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """The part of a :class:`FunctionCall` that refers to devices."""

    context: Any
    """JAX's mesh where the forecast was asked for; None for none."""
    entered: bool
    """Whether that mesh was entered with ``with mesh``, and not set."""
    args: tuple[Any, ...]
    """ShapeDtypeStructs with the shardings that they were given, or static values."""
    kwargs: Mapping[str, Any]
    function: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ServingCall:
    """Sizes of a step of a server."""

    job: Job
    rows: int
    """Texts of the step."""
    tokens: int
    """Tokens that it reads of each; 1 makes the next token over a cache, more read the start of a prompt."""
    context: int
    """Positions of the cache of each text."""
    served: Served = field(default_factory=Served)


@dataclass(frozen=True, kw_only=True)
class PagedCall:
    """Sizes of a step of a server over a cache in pages."""

    job: Job
    rows: int
    """Texts that read one token."""
    pages: int
    """Pages of a text, all of them full where the step's bytes are counted."""
    num_pages: int
    """Pages of the cache."""
    page_size: int = 64
    """Positions of a page."""
    chunk: int = 0
    """Prompt tokens that one more text reads; 0 for none."""
    cache: ServedCache = ServedCache.plain
    """Format of the pages."""
    drafts: int = 0
    """Tokens proposed for each text and verified by the step; 0 for none."""
    adapters: int = 0
    """Adapters side by side in that of the job, of which each text has one or none."""

    @property
    def context(self) -> int:
        """Positions of a text."""
        return self.pages * self.page_size


def name_of(function: Callable[..., Any]) -> str:
    """Name of a function in a report."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    return getattr(inner, "__name__", type(function).__name__)


def is_filtered(function: Callable[..., Any]) -> bool:
    """Whether a function is an ``equinox.filter_jit``, which traces arrays and treats other arguments as static."""
    equinox = sys.modules.get("equinox")  # loaded if the function uses it
    return equinox is not None and isinstance(function, type(equinox.filter_jit(name_of)))
