"""A source written as a Bundle, one tensor in memory at a time."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from systolic.artifact.bundle import BundleDraft
from systolic.artifact.tensors import TensorSpec
from systolic.core.errors import DataError
from systolic.formats.source import Source
from systolic.job import Model
from systolic.steps.network import ModelStructure
from systolic.steps.target import MeshTarget

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
    import jax

    from systolic.job import Layout
    from systolic.steps.mesh import make_mesh

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
    made = structure_of(source.model)
    return {path: shape.shape for path, shape in {**made.params, **made.model_state}.items()}


def planned(source: Source, dtype: np.dtype | None) -> list[TensorSpec]:
    """The tensors of a Bundle for a source; with ``dtype`` floats are stored in that one."""
    shapes = shapes_of(source)
    made = []
    for path, own in source.dtypes().items():
        kept = own if dtype is None or own.kind in "iub" else dtype
        made.append(TensorSpec(name=path, shape=shapes[path], dtype=kept))
    return made


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
