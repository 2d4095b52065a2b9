"""Low-rank adapters of a served model: side by side in the model's own, of which each text has the columns of one.

The adapters of n names are one of rank n times that of the largest: x A of all is one product, whose columns of other adapters
are zero for a text, and so is (x A) B. One program runs for texts of any adapters, and of none.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.data.fingerprint import of_files
from systolic.formats.outline import contents_of
from systolic.formats.registry import in_files, is_peft
from systolic.inference.model import PreparedModel, set_up_here
from systolic.job import Adapter, AdapterKind, Job, Model
from systolic.models.adapters import BASE, A, B
from systolic.recipes.jobs.run import check_folder, rebuild
from systolic.runs import weights
from systolic.runs.run import Run

if TYPE_CHECKING:
    from systolic.inference.grammar import Grammars
    from systolic.serving.registry import LiveEngine
    from systolic.serving.text.request import AnswerStream, TextRequest
    from systolic.setup import Setup

Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Path of a matrix to A [stack ..., inputs ..., rank] and B [stack ..., rank, outputs ...], whose product is what is added."""


def read_matrices(path: Path, base: Path, model: Model, *, trust: bool = False) -> Matrices:
    """Matrices of a run with adapters, or of a folder of PEFT.

    Args:
        path: The run or folder.
        base: The model that they stand beside.
        model: The same.
        trust: Whether the recipe of a run may be executed.

    Raises: as :func:`systolic.formats.peft.open_peft`, and
        OptionError: it holds no adapters, those of another model, or numbers that are not finite.
    """
    if is_peft(path):
        matrices = _of_peft(path, base)
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
        from systolic.formats.peft import ADAPTERS, WEIGHTS

        own = of_files(path, [path / ADAPTERS, path / WEIGHTS])
        return "" if own is None else own.digest
    return contents_of(path, "best")


def _of_peft(path: Path, base: Path) -> Matrices:
    from systolic.formats.peft import open_peft

    source = open_peft(path, base)
    return {name: (pair.a, pair.b * source.scale) for name, pair in source.pairs.items()}


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


def with_adapters(
    model: PreparedModel,
    adapters: Sequence[Matrices],
    rank: int,
    again: Callable[[Job], "Setup"],
    name: str,
) -> PreparedModel:
    """A model with adapters side by side.

    Args:
        model: Without any.
        adapters: Of each number, from 1.
        rank: Columns of each; 0 takes the largest rank among them.
        again: Sets a job up on the same devices.
        name: Of the model, for messages.

    Raises:
        OptionError: the model has adapters of its own or is quantized, or an adapter has a larger rank.
    """
    job = model.setup.job
    if job.adapter:
        raise OptionError(
            f"{name} has adapters of its own, and others stand beside a model without; write it merged with systolic export --to bundle, and serve that"
        )
    if job.quantization.matrices:
        raise OptionError(
            f"{name} is quantized, and adapters stand beside matrices of floats; give the model that it was made from"
        )
    largest = max(a.shape[-1] for matrices in adapters for a, _ in matrices.values())
    if rank and rank < largest:
        raise OptionError(
            f"--adapter-rank is {rank} and an adapter has rank {largest}; give {largest} or more"
        )
    each = rank or largest
    total = each * len(adapters)
    targets = sorted({path.rpartition("/")[2] for matrices in adapters for path in matrices})
    adapter = Adapter(kind=AdapterKind.lora, rank=total, alpha=float(total), targets=tuple(targets))
    setup = again(replace(job, adapter=adapter))

    def read() -> weights.Weights:
        plain, network = model.read(), setup.steps.network
        return replace(
            plain,
            params=_side_by_side(network.params, network.model_state, adapters, each),
            model_state=_frozen(setup.steps, {**plain.params, **plain.model_state}),
        )

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


def _side_by_side(
    shapes: Mapping[str, Any], frozen: Mapping[str, Any], adapters: Sequence[Matrices], rank: int
) -> dict[str, Any]:
    """A and B of all adapters by path; what an adapter lacks is zero."""
    import jax.numpy as jnp

    arrays = {path: np.zeros(like.shape, np.float32) for path, like in shapes.items()}
    homes = [path.removesuffix(f"/{A}") for path in arrays if path.endswith(f"/{A}")]
    # Of A and B together only the dims of the stack are there twice, beside both ranks.
    num_stacked = {
        home: arrays[f"{home}/{A}"].ndim
        + arrays[f"{home}/{B}"].ndim
        - 2
        - frozen[f"{home}/{BASE}"].ndim
        for home in homes
    }
    for number, matrices in enumerate(adapters):
        for path, (a, b) in matrices.items():
            down, up = arrays[f"{path}/{A}"], arrays[f"{path}/{B}"]
            own = slice(number * rank, number * rank + a.shape[-1])
            down[..., own] = a
            outer = num_stacked[path]
            up[(slice(None),) * outer + (own,)] = b
    return {path: jnp.asarray(array) for path, array in arrays.items()}


@dataclass(kw_only=True, eq=False)
class AdaptedEngine:
    """Implements :class:`systolic.serving.registry.LiveEngine` for an adapter of an engine, which begins and ends with its model."""

    engine: "LiveEngine"
    number: int
    """Number of the adapter, from 1."""
    root: bytes = field(default_factory=lambda: os.urandom(16))
    """Key of its empty text."""

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
        """Queues a request for the adapter; errors as the engine's."""
        return self.engine.submit(replace(request, adapter=self.number, root=self.root))

    def start(self) -> None:
        """Starts nothing: the engine is its model's."""

    def drain(self, seconds: float) -> bool:
        """Ends nothing: the engine is its model's."""
        del seconds
        return True

    def stop(self) -> None:
        """Ends nothing: the engine is its model's."""
