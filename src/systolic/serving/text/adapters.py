"""Low-rank adapters of a served model: side by side in the model's own, of which each text has the columns of one.

The adapters of n names are one of rank n times that of the largest: x A of all is one product, whose columns of other adapters
are zero for a text, and so is (x A) B. One program runs for texts of any adapters, and of none.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from systolic.core.errors import OptionError, RunError, SystolicError
from systolic.data.text.chat import find_template
from systolic.formats.bundle import BundleSource, run_digest
from systolic.formats.outline import contents_of
from systolic.formats.registry import in_files, is_peft
from systolic.formats.source import open_source
from systolic.inference.model import PreparedModel, set_up_here
from systolic.job import MOST_RANK, Adapter, AdapterKind, Job, Model
from systolic.models.adapters import BASE, A, B
from systolic.recipes.jobs.run import check_folder, rebuild
from systolic.runs import weights
from systolic.runs.job_record import read_record
from systolic.runs.run import TOKENIZER, Run
from systolic.serving.request import RefusedError

if TYPE_CHECKING:
    from systolic.data.text.chat import ChatTemplate
    from systolic.inference.grammar import Grammars
    from systolic.serving.registry import LiveEngine, ServedText
    from systolic.serving.text.engine import Engine
    from systolic.serving.text.request import AnswerStream, TextRequest
    from systolic.setup import Setup
    from systolic.steps.paged import PagedSteps

RANK = 16
"""Columns of an adapter where none is known when the server starts."""
POLL_SECONDS = 0.02
"""Interval of checking whether an adapter's texts have ended."""

Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Path of a matrix to A [stack ..., inputs ..., rank] and B [stack ..., rank, outputs ...], whose product is what is added."""


def read_matrices(path: Path, base: Path, model: Model, *, trust: bool = False) -> Matrices:
    """Matrices of a run with adapters, or of a folder of PEFT.

    Args:
        path: The run or folder.
        base: The model that they stand beside.
        model: The same.
        trust: Whether the recipe of a run may be executed.

    Raises: as :func:`systolic.formats.peft.open_adapters`, and
        OptionError: it holds no adapters, those of another model, or numbers that are not finite.
    """
    if is_peft(path):
        matrices = _of_peft(path, base, model)
    elif in_files(path):
        raise OptionError(
            f"{path} is a whole model and holds no adapters by themselves; give a run of systolic train sft --adapter lora or a PEFT folder, or serve it as NAME=DIR"
        )
    else:
        matrices = _of_run(path, base, model, trust=trust)
    for name, pair in matrices.items():
        if not all(np.isfinite(array).all() for array in pair):
            raise OptionError(
                f"the adapter of {name} in {path} has numbers that are not finite; give another checkpoint of it"
            )
    return matrices


def adapter_contents(path: Path) -> str:
    """Fingerprint of an adapter's own files."""
    if is_peft(path):
        from systolic.formats.peft import adapters_digest

        return adapters_digest(path)
    return contents_of(path, "best")


def _of_peft(path: Path, base: Path, model: Model) -> Matrices:
    from systolic.formats.export import kept_config
    from systolic.formats.peft import open_adapters

    config = open_source(base).config if in_files(base) else kept_config(base)
    adapters = open_adapters(path, base, model, config)
    return {name: (pair.a, pair.b * adapters.scale) for name, pair in adapters.pairs.items()}


def _of_run(path: Path, base: Path, model: Model, *, trust: bool) -> Matrices:
    check_folder(path)
    with Run.open(path) as run:
        job = rebuild(run, trust_code=trust).job
        if not job.adapter:
            raise OptionError(
                f"{path} trained all weights and has no adapters; serve it as a model of its own, as NAME=DIR"
            )
        if job.model != model:
            raise OptionError(
                f"the adapters of {path} belong to another model than {base}; give those of a run that began with it"
            )
        params = weights.load(run, set_up_here(job).steps).params
    arrays = {name: np.asarray(array, np.float32) for name, array in params.items()}
    homes = [name.removesuffix(f"/{A}") for name in arrays if name.endswith(f"/{A}")]
    scale = job.adapter.scale
    return {home: (arrays[f"{home}/{A}"], arrays[f"{home}/{B}"] * scale) for home in homes}


def fingerprints(base: Path, checkpoint: str = "best") -> set[str]:
    """Fingerprints of a model, and of what its files were quantized, imported or exported from; of a run's checkpoint that of its exports' origin."""
    if not in_files(base):
        return {run_digest(base, weights.step_of(base, checkpoint))}
    source = open_source(base)
    made_from = [source.bundle.record.source.digest] if isinstance(source, BundleSource) else []
    return {source.fingerprint(), *made_from}


def other_weights(path: Path, base: Path, own: set[str]) -> str:
    """Warning where an adapter began with other files than those that are served; empty where it did not, or where that is not known.

    Args:
        path: A run, or a folder of PEFT.
        base: The model that is served.
        own: Its :func:`fingerprints`.
    """
    if is_peft(path):
        from systolic.formats.peft import base_of

        try:
            where = str(base_of(path))
            known = fingerprints(Path(where))
        except SystolicError:
            return ""  # Its base is not here.
    else:
        with Run.open(path) as run:
            start = read_record(run).start or {}
        where, begun = str(start.get("path")), start.get("fingerprint")
        if not begun:
            return ""
        known = {begun}
        with suppress(SystolicError):  # It is not here.
            now = fingerprints(Path(where))
            known |= now if begun in now else set()
    if known & own:
        return ""
    return f"{path} was trained on {where}, whose files are others than those of {base}; where the weights are others too, its answers are wrong"


def template_of(path: Path) -> "ChatTemplate | None":
    """The chat template that an adapter was trained with; None where it keeps none."""
    return find_template(path if is_peft(path) else path / TOKENIZER)


class AdapterRoom(NamedTuple):
    """Room for the adapters of a model."""

    count: int
    rank: int = 0
    """Columns of each; 0 takes the largest rank, and no less than :data:`RANK` beside all matrices."""
    every: bool = False
    """Whether they stand beside all matrices, or those of the adapters that are known."""


def with_adapters(job: Job, adapters: Sequence[Matrices], room: AdapterRoom, name: str) -> Job:
    """The job of a model with adapters side by side.

    Args:
        job: Without any.
        adapters: Those that are known.
        room: For these, and others.
        name: Of the model, for messages.

    Raises:
        OptionError: the model has adapters of its own, or an adapter has a larger rank.
    """
    if job.adapter:
        raise OptionError(
            f"{name} has adapters of its own, and others stand beside a model without; write it merged with systolic export --to bundle, and serve that"
        )
    largest = max([a.shape[-1] for matrices in adapters for a, _ in matrices.values()], default=0)
    if room.rank and room.rank < largest:
        raise OptionError(
            f"--adapter-rank is {room.rank} and an adapter has rank {largest}; give {largest} or more"
        )
    every = room.every or not adapters
    rank = room.rank or max(largest, RANK if every else 1)
    if rank * room.count > MOST_RANK:
        raise OptionError(
            f"{room.count:,} adapters of rank {rank} have {rank * room.count:,} columns side by side, and at most {MOST_RANK:,} can; give a smaller --adapters or --adapter-rank"
        )
    total = rank * room.count
    names = {path.rpartition("/")[2] for matrices in adapters for path in matrices}
    targets = () if every else tuple(sorted(names))
    adapter = Adapter(kind=AdapterKind.lora, rank=total, alpha=float(total), targets=targets)
    return replace(job, adapter=adapter)


def with_room(model: PreparedModel, setup: "Setup") -> PreparedModel:
    """A model with zeros where adapters will be; ``setup`` is of its job :func:`with_adapters`."""

    def read() -> weights.Weights:
        import jax.numpy as jnp

        plain = model.read()
        zeros = {path: jnp.zeros(a.shape) for path, a in setup.steps.network.params.items()}
        arrays = {**plain.params, **plain.model_state}
        return replace(plain, params=zeros, model_state=_frozen(setup.steps, arrays))

    return PreparedModel(setup=setup, read=read)


def _frozen(steps: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of the model where the module with adapters has them."""
    import jax

    network = steps.network
    state = {}
    for path, like in network.model_state.items():
        value = arrays[path.removesuffix(f"/{BASE}")].astype(like.dtype)
        state[path] = jax.device_put(value, steps.shardings.model_state[path])
    return state


@dataclass(kw_only=True, eq=False)
class AdapterSlots:
    """Places of adapters in a model's engines, changed by one thread at a time."""

    engine: "LiveEngine"
    """All engines as one."""
    engines: "Sequence[Engine]"
    base: Path
    model: Model
    checkpoint: str = "best"
    """Checkpoint of a base that is a run."""
    trust: bool = False
    """Whether the recipe of a run may be executed."""
    warn: Callable[[str], None] = print
    """Takes a line where an adapter may be one of other weights."""
    grace_seconds: float = 0.0
    """Time for the requests of an adapter whose place is needed."""
    taken: "dict[int, AdaptedEngine]" = field(default_factory=dict)
    """By number, from 1."""

    @property
    def count(self) -> int:
        """Places in all."""
        return self.engines[0].runner.programs.paged.adapters

    @cached_property
    def fingerprints(self) -> set[str]:
        """Fingerprints of the model that they stand beside."""
        return fingerprints(self.base, self.checkpoint)

    def place(self, name: str, path: Path) -> "AdaptedEngine":
        """Reads an adapter, and puts it in a free place; nothing is compiled.

        Where none is free it takes that of an adapter of its name, whose requests have ended then.

        Args:
            name: Of the adapter.
            path: A run or folder.

        Raises: as :func:`read_matrices`, and
            OptionError: every place is taken, the rank is too large, or a matrix has no room for an adapter.
            RunError: an engine has ended.
        """
        matrices = read_matrices(path, self.base, self.model, trust=self.trust)
        padded = _padded(matrices, path, self.engines[0].runner.programs.paged)
        number = self._free(name)
        for engine in self.engines:
            engine.place_adapter(number, padded)
        if doubt := other_weights(path, self.base, self.fingerprints):
            self.warn(doubt)
        self.taken[number] = AdaptedEngine(slots=self, name=name, number=number)
        return self.taken[number]

    def _free(self, name: str) -> int:
        count = self.count
        numbers = range(1, count + 1)
        if len(self.taken) == count:
            own = next((slot for slot in self.taken.values() if slot.name == name), None)
            if own is None:
                names = ", ".join(self.taken[number].name for number in numbers)
                raise OptionError(
                    f"the server has room for {count} adapters and serves {names}; unload one, or start it with a larger --adapters"
                )
            own.drain(self.grace_seconds)
        return next(number for number in numbers if number not in self.taken)


def _padded(matrices: Matrices, path: Path, paged: "PagedSteps") -> dict[str, np.ndarray]:
    """Matrices of an adapter with zeros for what it lacks."""
    arrays = {at: np.zeros(shape, np.float32) for at, shape in paged.adapter_shapes.items()}
    room = paged.steps.job.adapter.rank // paged.adapters
    for home, (a, b) in matrices.items():
        rank = a.shape[-1]
        if f"{home}/{A}" not in arrays:
            names = sorted({at.split("/")[-2] for at in arrays})
            raise OptionError(
                f"{path} has an adapter of {home}, and the server has room beside {', '.join(names)} alone; start it with --adapters {paged.adapters}, which takes every matrix"
            )
        if rank > room:
            raise OptionError(
                f"{path} has rank {rank} and the server has room for {room}; start it with --adapter-rank {rank}"
            )
        arrays[f"{home}/{A}"][..., :rank] = a
        outer = (slice(None),) * paged.columns_dim(f"{home}/{B}")
        arrays[f"{home}/{B}"][(*outer, slice(rank))] = b
    return arrays


def with_adapter(base: "ServedText", name: str, path: Path) -> "ServedText":
    """An adapter in a place of a model; errors as :meth:`AdapterSlots.place`."""
    contents = adapter_contents(path)  # before they are read, which may be newer
    assert base.slots is not None
    return replace(
        base,
        name=name,
        template=template_of(path) or base.template,
        base=base.name,
        created=int(time.time()),
        contents=contents,
        engine=base.slots.place(name, path),
        slots=None,
        adapters=(),
    )


@dataclass(kw_only=True, eq=False)
class AdaptedEngine:
    """Implements :class:`systolic.serving.registry.LiveEngine` for an adapter, whose engine begins and ends with its model."""

    slots: AdapterSlots
    name: str
    number: int
    """Number of its place, from 1."""
    root: bytes = field(default_factory=lambda: os.urandom(16))
    """Key of its empty text."""
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def engine(self) -> "LiveEngine":
        """The model's engine."""
        return self.slots.engine

    @property
    def context(self) -> int:
        """Tokens that a text of the engine may have."""
        return self.engine.context

    @property
    def grammars(self) -> "Grammars":
        """Grammars of the engine's tokens."""
        return self.engine.grammars

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.engine.ready

    @property
    def heartbeat_seconds(self) -> float:
        """Since the engine's loop last turned."""
        return self.engine.heartbeat_seconds

    def submit(self, request: "TextRequest") -> "AnswerStream":
        """Queues a request for the adapter; errors as the engine's.

        Raises:
            RefusedError: also where its place is given to another one.
        """
        with self._lock:
            if self._closed:
                raise RefusedError(f"{self.name} is being replaced; come back", retry_seconds=1)
            own = replace(request, adapter=self.number, adapter_name=self.name, root=self.root)
            return self.engine.submit(own)

    def start(self) -> None:
        """Starts nothing: the engine is its model's."""

    def drain(self, seconds: float) -> bool:
        """Takes no more requests, ends those that are left after some seconds with an error, and gives its place back; False where some were left."""
        with self._lock:
            self._closed = True
        end = time.monotonic() + seconds
        while (left := any(self.num_texts())) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if left:
            message = f"{self.name} was unloaded before the text ended; ask another model"
            with suppress(RunError):  # The engine has ended, and all texts with it.
                for engine in self.slots.engines:
                    engine.end_texts(self.root, message)
        if self.slots.taken.get(self.number) is self:
            del self.slots.taken[self.number]
        return not left

    def stop(self) -> None:
        """Ends its requests at once; the engine is its model's."""
        self.drain(0.0)

    def num_texts(self) -> tuple[int, int]:
        """Its texts that run, and that wait for their first step."""
        numbers = [engine.num_texts(self.root) for engine in self.slots.engines]
        return sum(running for running, _ in numbers), sum(waiting for _, waiting in numbers)
