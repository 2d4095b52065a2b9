"""A source's weights, one tensor in memory at a time: into a Bundle, onto a mesh, or into the state that a job begins with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, OptionError, RunError
from systolic.core.machine import trim
from systolic.core.units import si
from systolic.formats.outline import published_at
from systolic.formats.source import Source, open_source
from systolic.job import Model
from systolic.job.precision import CODES, SCALES
from systolic.models.adapters import BASE, STACKED, A, B, compact_base
from systolic.runs.bundle.folder import BundleDraft
from systolic.runs.bundle.tensors import TensorSpec
from systolic.runs.run import JOB
from systolic.runs.weights import Weights, begin_with
from systolic.steps.network import ModelStructure
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, parameter_spec

if TYPE_CHECKING:
    from systolic.formats.peft import PeftSource

TESTED = 1 << 20
"""Elements that are tested at a time for NaN and infinity."""


def structure_of(model: Model) -> ModelStructure:
    """A model's structure on one device, traced once for each of the last few of ours; computes nothing."""
    try:
        hash(model)
    except TypeError:  # holds a list
        return _traced(model)
    # One of the user's may compare equal and be another, or be changed.
    ours = type(model).__module__.startswith("systolic.")
    return _kept(model) if ours else _traced(model)


def _traced(model: Model) -> ModelStructure:
    from systolic.job import Layout
    from systolic.steps.target import make_mesh

    layout = Layout(data=1, fsdp=1)
    target = MeshTarget(
        platform="cpu",
        layout=layout,
        dtype="float32",
        matmul_format=None,
        mesh=make_mesh(layout, jax.devices()[:1]),
    )
    return ModelStructure(model, target)


_kept = lru_cache(maxsize=4)(_traced)


def shapes_of(source: Source) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters and other variables of a model, by path."""
    structure = structure_of(source.model)
    return {
        path: shape.shape for path, shape in {**structure.params, **structure.model_state}.items()
    }


def planned(source: Source, dtype: np.dtype | None) -> list[TensorSpec]:
    """The tensors of a Bundle for a source; with ``dtype`` floats are stored in that one."""
    shapes = shapes_of(source)
    specs = []
    for path, own in source.dtypes().items():
        kept = own if dtype is None or own.kind in "iub" else dtype
        specs.append(TensorSpec(name=path, shape=shapes[path], dtype=kept))
    return specs


def write_weights(
    source: Source,
    out: BundleDraft,
    tensors: list[TensorSpec],
    progress: Callable[[int], None],
) -> None:
    """Writes a source's weights into a Bundle.

    Raises:
        DataError: a tensor has another shape than the model's, or a value that the dtype can't hold.
    """
    shapes = {tensor.name: tensor for tensor in tensors}

    def pieces(path: str) -> Any:
        want = shapes[path]
        rest = want.nbytes
        for number, piece in enumerate(source.pieces(path)):
            rest -= piece.size * want.dtype.itemsize
            if piece.shape != tuple(want.shape[len(want.shape) - piece.ndim :]) or rest < 0:
                raise DataError(
                    f"{path} of {source.path} has a piece of {piece.shape} and the model has {tuple(want.shape)}; the configuration is of another model"
                )
            if not _finite(piece):
                raise DataError(
                    f"{source.origin(path, number)} of {source.path} holds NaN or infinity, so that the model computes no numbers; copy the file again, or train from a checkpoint before that"
                )
            yield piece if piece.dtype == want.dtype else piece.astype(want.dtype)
            del piece  # before the next one is made

    out.weights(tensors, pieces, progress)


def _finite(piece: np.ndarray) -> bool:
    """Whether all elements are finite; rows are tested a few at a time, which needs little memory."""
    if piece.dtype.kind in "iub":
        return True
    rows = np.atleast_1d(piece)
    step = max(1, TESTED // max(rows[:1].size, 1))
    return all(
        bool(np.isfinite(rows[start : start + step]).all()) for start in range(0, len(rows), step)
    )


def weights_of(source: Source, steps: StepFunctions) -> Weights:
    """Weights in the dtypes and shardings of the programs' state; the step is 0.

    Variables that are no parameters and that the files lack, such as counters, are those of a new model.

    Raises:
        DataError: a parameter is missing or has another shape than the model's.
    """
    state: Any = steps.abstract_state
    arrays = source.arrays({**state.params, **state.model_state})
    needed = [*state.params, *steps.network.frozen]
    missing = next((path for path in needed if path not in arrays), None)
    if missing is not None:
        raise DataError(f"{source.path} lacks {missing}; import the model again")
    rest = {path: arrays[path] for path in state.model_state if path in arrays}
    if new := sorted(set(state.model_state) - set(rest)):
        init = jax.jit(lambda key: {path: steps.network.init(key)[1][path] for path in new})
        rest |= init(jax.random.key(0))
    params = {path: arrays[path] for path in state.params}
    return Weights(step=0, params=params, model_state=rest, skipped=[])


class SourceWeights(Mapping[str, Any]):
    """Weights of a source by path, read whole when they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source, self._paths = source, list(source.dtypes())
        self._shapes = {p: s.shape for p, s in structure_of(source.model).params.items()}
        self._last: dict[str, np.ndarray] = {}
        """The matrix that was asked for last: it is asked for layer by layer."""

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._last:
            rows = list(self._source.pieces(path))
            flat = np.concatenate([np.asarray(row).reshape(-1) for row in rows])
            self._last = {path: flat.reshape(self._shapes[path])}
        return self._last[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrigin:
    """Origin of a job's initial weights, as its run records it."""

    path: str
    kind: str
    """Format: ``hugging-face``, ``gguf``, ``bundle`` or ``run``."""
    fingerprint: str | None
    """Fingerprint of the files; None for a run, whose checkpoints hold all weights."""

    def require(self, before: Mapping[str, str | None], run: Path) -> None:
        """Refuses other files than those that a run began with, as its job.json has them.

        Raises:
            RunError: their fingerprints differ.
        """
        if self.fingerprint != before["fingerprint"]:
            raise RunError(
                f"{run} began with the weights of {before['path']} ({before['fingerprint']}), and {self.path} has others ({self.fingerprint}); restore that model, or train a new run"
            )


def starting_weights(path: Path, steps: StepFunctions) -> tuple[Weights, StartOrigin]:
    """The weights at a path for a job: all that train, or all that are frozen.

    Args:
        path: A Hugging Face folder, a Bundle, a GGUF file, or a run.
        steps: The programs of the job, on its mesh.

    Raises:
        NotFoundError: nothing is there.
        OptionError: its model is another than the job's.
        DataError: a file is damaged, or a tensor has another shape than the job's.
    """
    from systolic.formats.peft import PeftSource, same_adapter  # which imports this module

    if (path / JOB).is_file():
        if steps.job.adapter:
            raise OptionError(
                f"adapters begin with a model in files, and {path} is a run; write it first with systolic export {path} --to bundle --out DIR, then give --from DIR"
            )
        return begin_with(path, steps), StartOrigin(path=str(path), kind="run", fingerprint=None)
    if not path.exists() and (known := published_at(path)) is not None:
        raise OptionError(
            f"{known.name} is known here by its sizes, which only a forecast does with; training begins with weights: download {known.hub}, and give its folder as --from"
        )
    source = open_source(path)
    if source.model != steps.job.model:
        raise OptionError(
            f"{path} holds another model than {steps.job.name} trains; give the job the model of its config.json"
        )
    origin = StartOrigin(path=str(path), kind=source.kind, fingerprint=source.fingerprint())
    if isinstance(source, PeftSource) and steps.job.adapter:
        same_adapter(source, steps.job.adapter)
        return _continued(source, steps), origin
    return _weights(source, steps), origin


def _continued(source: "PeftSource", steps: StepFunctions) -> Weights:
    """Adapters of a folder of PEFT, to be trained on, beside the weights of their base."""
    base = _weights(source.base, steps)
    params = {}
    for path, pair in source.pairs.items():
        for last, value in ((A, pair.a), (B, pair.b)):
            like = steps.abstract_state.params[f"{path}/{last}"]
            array = jax.device_put(value.astype(like.dtype), like.sharding)
            params[f"{path}/{last}"] = _owned(array, steps)
    return replace(base, params=params)


def _weights(source: Source, steps: StepFunctions) -> Weights:
    """Weights of a source by their places in the job's state; beside them at most one matrix is in memory."""
    like, packed = _like(steps)
    params, rest = {}, {}
    for path, value in source.each(like):
        if path in steps.network.params:
            params[path] = _owned(value, steps)
        else:
            beside = f"{path}/{BASE}" if steps.is_adapted(path) else path
            rest[beside] = _owned(value, steps)
    for path in packed:
        rest |= _packed(source, path, steps)
    return Weights(step=0, params=params, model_state=rest, skipped=[])


def _owned(value: jax.Array, steps: StepFunctions) -> jax.Array:
    """An array in memory of JAX's own: XLA copies what it can't donate in each first step, all weights at once."""
    if steps.target.platform != "cpu":
        return value  # a transfer to the device has made it
    # Waited for, else reading goes on while the array that is copied lives.
    return jax.block_until_ready(jnp.array(value, copy=True))


def _like(steps: StepFunctions) -> tuple[dict[str, Any], list[str]]:
    """Abstract arrays of the weights as stored, by path in the base model, and the paths kept in 4 bits."""
    state = steps.abstract_state
    abstract: dict[str, Any] = {**state.params, **state.model_state}
    if not steps.job.adapter:
        return abstract, []
    plain: dict[str, Any] = {}
    packed: list[str] = []
    for path, leaf in state.model_state.items():
        home, _, last = path.rpartition("/")
        if not steps.is_adapted(home):
            plain[path] = leaf
        elif last == BASE:
            plain[home] = leaf
        elif last == CODES:
            packed.append(home)
    return plain, packed


def _packed(source: Source, path: str, steps: StepFunctions) -> dict[str, jax.Array]:
    """A frozen matrix, or a stack of them, in 4 bits beside its adapter, read and packed one matrix of the stack at a time.

    Raises:
        DataError: a tensor has another shape than the model's.
    """
    names = f"{path}/{CODES}", f"{path}/{SCALES}"
    codes, scales = (steps.abstract_state.model_state[name] for name in names)
    axes = steps.network.frozen[names[0]]
    assert axes is not None  # only matrices with named dims have adapters
    outer = int(axes[0] in STACKED)
    shape, axes = codes.shape[outer:], axes[outer:]
    place = steps.target.sharding(parameter_spec(steps.target, shape, axes))

    pack = jax.jit(partial(compact_base, axes=axes))
    parts: list[tuple[jax.Array, ...]] = []
    for piece in matrices_of(source, path, codes.shape, outer):
        value = jax.make_array_from_callback(
            shape, place, lambda index, piece=piece: np.asarray(piece[index], scales.dtype)
        )
        # Waited for, else reading runs ahead of packing.
        packed = pack(value)
        parts.append(jax.block_until_ready((packed.codes, packed.scales)))
        del value, piece, packed
        trim()  # what threads of the packing have freed

    def joined(parts: list[tuple[jax.Array, ...]]) -> tuple[jax.Array, ...]:
        if not outer:
            return parts[0]
        return tuple(jnp.stack(each) for each in zip(*parts, strict=True))

    packed = jax.jit(joined, out_shardings=(codes.sharding, scales.sharding))(parts)
    jax.block_until_ready(packed)
    trim()
    return dict(zip(names, packed, strict=True))


def matrices_of(
    source: Source, path: str, shape: tuple[int, ...], outer: int
) -> Iterator[np.ndarray]:
    """The matrices of a stack, in order; the only one, whole, where nothing is stacked."""
    pieces = source.pieces(path)
    if not outer:
        rows = list(pieces)
        pieces = iter(rows if rows[0].ndim == len(shape) else [np.stack(rows)])
    for piece in pieces:
        if piece.shape != shape[len(shape) - piece.ndim :]:
            raise DataError(
                f"{path} of {source.path} has a piece of {piece.shape} and the model has {shape}; the configuration is of another model"
            )
        if outer and piece.ndim == len(shape):
            yield from piece
        else:
            yield piece
        del piece


def weight_progress(size: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """A callback for the bytes of each tensor that was written, of ``size`` in all.

    It reports tenths, so that a log has ten lines and no more.
    """
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        say(f"weights {done * 10 // size * 10} % of {si(size, 'B')}")

    return progress
