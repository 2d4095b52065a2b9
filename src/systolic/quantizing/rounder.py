"""Codes of a model's matrices, and a Bundle's weights made of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError
from systolic.formats.matrices import Matrix, planned_tensors
from systolic.formats.source import Source
from systolic.formats.weights import matrices_of
from systolic.job import MatrixFormat
from systolic.models.adapters import INPUTS, SCALES
from systolic.models.quantized.codes import SCALES_DTYPE, Quantized, quantized
from systolic.models.quantized.rounding import compensated, least_error
from systolic.models.quantized.w8a8 import w8a8
from systolic.runs.bundle.folder import BundleDraft
from systolic.runs.bundle.packed import QuantizedRecord, packed
from systolic.runs.weights import Weights

Asked = tuple[str, MatrixFormat]
"""Path of a matrix, and a format."""


class Rounder:
    """Makes codes of a model's matrices.

    Those of 4 bits are fitted to the inputs of their products where these are known, which takes a while, so that they are
    kept: by :data:`Asked`. Matrices that were trained as a format rounds them (``trained``) take the codes that they were trained with. Where
    activations are rounded too, the largest magnitudes of the inputs are known (``moments`` [inputs], after the layers of a stack).
    """

    def __init__(
        self,
        matrices: Mapping[str, Matrix],
        moments: Mapping[str, np.ndarray] | None = None,
        trained: MatrixFormat | None = None,
    ) -> None:
        self.matrices, self.moments = matrices, {} if moments is None else moments
        self._trained = trained
        self._kept: dict[Asked, list[Quantized]] = {}

    def trained(self, path: str, how: MatrixFormat) -> bool:
        """Whether a matrix was trained as a format rounds it, in the same groups."""
        return self._trained is not None and self.matrices[path].how(self._trained) == how

    def codes(
        self, path: str, how: MatrixFormat, pieces: Iterable[np.ndarray | jax.Array]
    ) -> Iterator[Quantized]:
        """Codes and scales of each matrix of a stack, or of the only one.

        Raises:
            DataError: a weight is larger than scales can be.
        """
        for made in self._made(path, how, map(jnp.asarray, pieces)):
            if not np.isfinite(np.asarray(made.scales, np.float32)).all():
                raise DataError(
                    f"weights of {path} are too large for scales in {SCALES_DTYPE}; leave the matrix as it is with --keep {path}"
                )
            yield made

    def _made(
        self, path: str, how: MatrixFormat, pieces: Iterable[jax.Array]
    ) -> Iterator[Quantized]:
        one, asked = self.matrices[path], (path, how)
        inputs = tuple(dim - int(one.stacked) for dim in one.inputs)
        if how.format.activations:
            factored = tuple(dim - int(one.stacked) for dim in one.factored)
            make = _balanced(inputs, factored, how)
            largest = self.moments[path].reshape(-1, one.largest_shape[-1])
            for piece, own in zip(pieces, largest, strict=True):
                yield make(piece, jnp.asarray(own))
            return
        if path not in self.moments or how.format.bits != 4:
            program = _program(inputs, how, self.trained(path, how))
            yield from map(program, pieces)
            return
        if asked not in self._kept:
            moments = self.moments[path].reshape(-1, *one.moments_shape[-2:])
            self._kept[asked] = [
                jax.device_get(compensated(piece, own, inputs, how))
                for piece, own in zip(pieces, moments, strict=True)
            ]
        yield from self._kept[asked]

    def rounded(self, weights: Weights, formats: Mapping[str, MatrixFormat]) -> Weights:
        """Weights with some matrices rounded to what their codes would stand for, in the dtype that they have; as codes where activations are rounded too."""
        params = dict(weights.params)
        for path, how in formats.items():
            value, stacked = params[path], self.matrices[path].stacked
            codes = self.codes(path, how, value if stacked else [value])
            if how.format.activations:
                made: list[Any] = list(codes)
                params[path] = (
                    jax.tree.map(lambda *each: jnp.stack(each), *made) if stacked else made[0]
                )
                continue
            made = [code.restored(value.dtype) for code in codes]
            params[path] = jax.device_put(jnp.stack(made) if stacked else made[0], value.sharding)
        return replace(weights, params=params)


@jax.jit
def _finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """bool[] for each array: whether all of its numbers are finite."""
    return {path: jnp.isfinite(array).all() for path, array in arrays.items()}


def check_finite(weights: Weights) -> None:
    """Refuses weights that are no finite numbers, quantized or not: no code stands for them, and no loss can be measured.

    Raises:
        DataError: there are some.
    """
    arrays = {
        path: array
        for path, array in {**weights.params, **weights.model_state}.items()
        if jnp.issubdtype(array.dtype, jnp.floating)
    }
    for path, finite in jax.device_get(_finite(arrays)).items():
        if not finite:
            raise DataError(
                f"{path} has weights that are NaN or infinite; check the model: what computes with it is no number either"
            )


def write_quantized(
    source: Source,
    out: BundleDraft,
    rounder: Rounder,
    formats: Mapping[str, MatrixFormat],
    progress: Callable[[int], None],
) -> dict[str, QuantizedRecord]:
    """Writes a source's weights into a Bundle, one matrix in memory at a time.

    Returns:
        What bundle.json says of the quantized ones.
    """
    matrices = rounder.matrices
    specs = planned_tensors(source, matrices, formats)
    held: dict[str, list[np.ndarray]] = {}
    """Scales and factors of a matrix, or of those of a stack, until they are asked for."""

    def pieces(name: str) -> Iterator[np.ndarray]:
        path, _, last = name.rpartition("/")
        if path not in formats:
            yield from source.pieces(name)
            return
        if last in (SCALES, INPUTS):
            yield from held.pop(name)
            return
        one = matrices[path]
        given = matrices_of(source, path, one.shape, int(one.stacked))
        for draft in rounder.codes(path, formats[path], given):
            for part, array in ((SCALES, draft.scales), (INPUTS, draft.inputs)):
                if array is not None:
                    held.setdefault(f"{path}/{part}", []).append(np.asarray(array))
            yield packed(np.asarray(draft.codes))

    out.weights(specs, pieces, progress)
    return {
        path: QuantizedRecord.of(how, matrices[path].shape, matrices[path].dtype)
        for path, how in formats.items()
    }


@lru_cache
def _program(inputs: tuple[int, ...], how: MatrixFormat, nearest: bool) -> Any:
    """Codes of one matrix, compiled once a shape."""
    make = least_error if how.format.bits == 4 and not nearest else quantized
    return jax.jit(partial(make, inputs=inputs, how=how))


@lru_cache
def _balanced(inputs: tuple[int, ...], factored: tuple[int, ...], how: MatrixFormat) -> Any:
    """Codes of one matrix and factors of its inputs, compiled once a shape."""
    return jax.jit(partial(w8a8, inputs=inputs, factored=factored, how=how))
