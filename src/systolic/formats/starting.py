"""The weights that a job begins with, streamed from a model in files into the shards of the job's state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.artifact.run import JOB
from systolic.artifact.weights import Weights, begin_with
from systolic.core.errors import DataError, OptionError, RunError
from systolic.core.heap import trim
from systolic.formats.outline import published_at
from systolic.formats.peft import PeftSource, same_adapter
from systolic.formats.source import Source, open_source
from systolic.models.adapters import BASE, CODES, SCALES, STACKED, A, B, compact_base
from systolic.steps.sharding import parameter_spec
from systolic.steps.steps import StepFunctions


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrigin:
    """Where a job's first weights are from, as its run keeps it."""

    path: str
    kind: str
    """Format: ``hugging-face``, ``gguf``, ``bundle`` or ``run``."""
    fingerprint: str | None
    """Of the files; None for a run, whose checkpoints hold all weights."""

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
    if (path / JOB).is_file():
        return _of_run(path, steps)
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


def _continued(source: PeftSource, steps: StepFunctions) -> Weights:
    """Adapters of a folder of PEFT, to be trained on, beside the weights of their base."""
    made = _weights(source.base, steps)
    params = {}
    for path, pair in source.pairs.items():
        for last, value in ((A, pair.a), (B, pair.b)):
            like = steps.abstract_state.params[f"{path}/{last}"]
            array = jax.device_put(value.astype(like.dtype), like.sharding)
            params[f"{path}/{last}"] = _owned(array, steps)
    return replace(made, params=params)


def _of_run(path: Path, steps: StepFunctions) -> tuple[Weights, StartOrigin]:
    if steps.job.adapter:
        raise OptionError(
            f"adapters begin with a model in files, and {path} is a run; write it first with systolic export {path} --to bundle --out DIR, then give --from DIR"
        )
    return begin_with(path, steps), StartOrigin(path=str(path), kind="run", fingerprint=None)


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
    """What is read as it will be kept, shape, dtype and sharding by path in the plain model; and the matrices that are kept in 4 bits."""
    state = steps.abstract_state
    found: dict[str, Any] = {**state.params, **state.model_state}
    if not steps.job.adapter:
        return found, []
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
        made = pack(value)
        parts.append(jax.block_until_ready((made.codes, made.scales)))
        del value, piece, made
        trim()  # what threads of the packing have freed

    def joined(parts: list[tuple[jax.Array, ...]]) -> tuple[jax.Array, ...]:
        if not outer:
            return parts[0]
        return tuple(jnp.stack(each) for each in zip(*parts, strict=True))

    made = jax.jit(joined, out_shardings=(codes.sharding, scales.sharding))(parts)
    jax.block_until_ready(made)
    trim()
    return dict(zip(names, made, strict=True))


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
