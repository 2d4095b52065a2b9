"""Weights of another library's files as parameters of ours, and back, one stacked layer or expert at a time."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from systolic.core.errors import DataError

if TYPE_CHECKING:
    import jax


Array = np.ndarray
SHOWN = 8
"""Names of missing or unknown tensors in a message."""
ALIGNMENT = 64
"""Bytes that JAX on a CPU wants a buffer aligned to; it then takes the buffer as it is, without a copy."""
Pieces = Sequence[Array]


class Tensor(Protocol):
    """One tensor of a file, read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dims."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the arrays that :meth:`read` returns; bfloat16 and float8 are those of ml_dtypes."""
        ...

    def read(self) -> Array:
        """The tensor; may be a view of a mapped file."""
        ...


Tensors = Mapping[str, Tensor]
"""Tensors of a model's files by their names there."""


def as_they_are(pieces: Pieces) -> Pieces:
    """The pieces themselves."""
    return pieces


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How some tensors of a file make some parameters of ours.

    Leading dims of ours that the file keeps apart (layers, experts) are ``stack``: a template in
    ``theirs`` has their names, ``model.layers.{layer}.mlp.experts.{expert}.up_proj.weight``. ``read``
    and ``write`` see one piece of the stack at a time, so that neither needs the memory of a whole stack.
    """

    ours: tuple[str, ...]
    """Paths of parameters: ``blocks/query``."""
    theirs: tuple[str, ...]
    """Templates of names of tensors."""
    stack: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name of a leading dim of ours to its numbers in the file, in our order."""
    read: Callable[[Pieces], Pieces] = as_they_are
    """Their pieces to ours."""
    write: Callable[[Pieces], Pieces] = as_they_are
    """Our pieces to theirs, the inverse of ``read``."""

    def names(self, place: Sequence[int]) -> tuple[str, ...]:
        """Names of their tensors at an index of the stack."""
        numbers = {
            name: where[i] for (name, where), i in zip(self.stack.items(), place, strict=True)
        }
        return tuple(template.format(**numbers) for template in self.theirs)

    def places(self) -> Iterator[tuple[int, ...]]:
        """All indices of the stack; one empty index where nothing is stacked."""
        return itertools.product(*(range(len(where)) for where in self.stack.values()))


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Rules for all parameters of a model."""

    rules: Sequence[Rule]
    unused: Sequence[str] = ()
    """Patterns (full matches) of names that hold nothing we need: buffers, and copies of tied weights."""

    def check(self, tensors: Tensors, source: str) -> None:
        """Whether every parameter has its tensors and every tensor is used.

        Raises:
            DataError: not so; names the first of them.
        """
        wanted = {
            name for rule in self.rules for place in rule.places() for name in rule.names(place)
        }
        missing = sorted(wanted - set(tensors))
        if missing:
            raise DataError(
                f"{source} lacks {len(missing)} of {len(wanted)} tensors: {_some(missing)}; give the whole model"
            )
        known = [re.compile(pattern) for pattern in self.unused]
        unknown = sorted(
            name
            for name in set(tensors) - wanted
            if not any(pattern.fullmatch(name) for pattern in known)
        )
        if unknown:
            raise DataError(
                f"{source} has {len(unknown)} tensors that this model has no place for: {_some(unknown)}; its weights would not mean the same"
            )

    def arrays(
        self, tensors: Tensors, like: "Mapping[str, jax.ShapeDtypeStruct]"
    ) -> "dict[str, jax.Array]":
        """All that :meth:`each` gives."""
        return dict(self.each(tensors, like))

    def each(
        self, tensors: Tensors, like: "Mapping[str, jax.ShapeDtypeStruct]"
    ) -> "Iterator[tuple[str, jax.Array]]":
        """Parameters with their paths, each made shard by shard on the devices of its sharding when it is asked for.

        Beside the shards at most one piece is in memory: a tensor of the file and its form here.

        Args:
            tensors: Of the file.
            like: Shape, dtype and sharding of each parameter that is wanted.

        Raises:
            DataError: a tensor has another shape than the model's.
        """
        import jax

        for rule in self.rules:
            for which, path in enumerate(rule.ours):
                if path in like:
                    shape = like[path]
                    fill = partial(_shard, rule, which, tensors, shape)
                    yield path, jax.make_array_from_callback(shape.shape, shape.sharding, fill)

    def pieces(self, path: str, tensors: Tensors) -> Iterator[Array]:
        """A parameter in consecutive pieces of its stacked dims, one in memory at a time."""
        rule = self._rule(path)
        which = rule.ours.index(path)
        for place in rule.places():
            yield rule.read([tensors[name].read() for name in rule.names(place)])[which]

    def dtype(self, path: str, tensors: Tensors) -> np.dtype:
        """The narrowest dtype that holds all tensors of a parameter exactly."""
        rule = self._rule(path)
        dtypes = {tensors[n].dtype for place in rule.places() for n in rule.names(place)}
        try:
            return np.result_type(*dtypes)
        except np.exceptions.DTypePromotionError:
            return np.dtype(np.float32)  # float16 beside bfloat16

    def _rule(self, path: str) -> Rule:
        return next(rule for rule in self.rules if path in rule.ours)

    def tensors(self, params: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
        """Names and tensors of the file for our parameters, the inverse of :meth:`arrays`; one piece at a time."""
        for rule in self.rules:
            arrays = [_at_hand(params[path]) for path in rule.ours]
            for place in rule.places():
                written = rule.write([np.asarray(array[place]) for array in arrays])
                yield from zip(rule.names(place), written, strict=True)


def _at_hand(array: Any) -> Any:
    """An array that lies in this process's memory as NumPy has it, without a copy: JAX would compile each cut of it."""
    import jax

    devices = array.devices() if isinstance(array, jax.Array) else ()
    return np.asarray(array) if [device.platform for device in devices] == ["cpu"] else array


def _shard(
    rule: Rule,
    which: int,
    tensors: Tensors,
    like: "jax.ShapeDtypeStruct",
    index: tuple[slice, ...] | None,
) -> Array:
    """The part of a parameter at ``index``, aligned so that a CPU takes it without a copy."""
    assert index is not None  # JAX gives one wherever there is a sharding
    bounds = [range(*cut.indices(size)) for cut, size in zip(index, like.shape, strict=True)]
    out = aligned(tuple(len(bound) for bound in bounds), np.dtype(like.dtype))
    stacked, rest = len(rule.stack), tuple(index[len(rule.stack) :])
    for place in itertools.product(*bounds[:stacked]):
        names = rule.names(place)
        piece = rule.read([tensors[name].read() for name in names])[which]
        if piece.shape != tuple(like.shape[stacked:]):
            sources = ", ".join(f"{name} {tensors[name].shape}" for name in names)
            raise DataError(
                f"{sources} makes {rule.ours[which]} {piece.shape}, and the model has {tuple(like.shape[stacked:])}; the configuration is of another model"
            )
        at = tuple(i - bound.start for i, bound in zip(place, bounds, strict=False))
        out[at] = piece[rest]
    return out


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """An uninitialised array whose first byte lies at a multiple of :data:`ALIGNMENT`."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# Rules that many families share.


def plain(ours: str, theirs: str, stack: Mapping[str, Sequence[int]] | None = None) -> Rule:
    """A parameter that a file has in the same form."""
    return Rule(ours=(ours,), theirs=(theirs,), stack=stack or {})


def shaped(
    ours: str,
    theirs: str,
    here: tuple[int, ...],
    there: tuple[int, ...],
    stack: Mapping[str, Sequence[int]] | None = None,
) -> Rule:
    """A parameter whose piece has shape ``here``, and ``there`` in the file, elements in the same order."""
    return Rule(
        ours=(ours,),
        theirs=(theirs,),
        stack=stack or {},
        read=lambda pieces: [pieces[0].reshape(here)],
        write=lambda pieces: [pieces[0].reshape(there)],
    )


def matrix(
    ours: str,
    theirs: str,
    shape: tuple[int, ...],
    inputs: int = 1,
    stack: Mapping[str, Sequence[int]] | None = None,
) -> Rule:
    """A weight of ours [inputs ..., outputs ...] that PyTorch's Linear keeps as [outputs, inputs].

    Args:
        ours: Its path.
        theirs: Template of its name in the file.
        shape: Of one piece of ours.
        inputs: How many of its first dims are inputs.
        stack: As in :class:`Rule`.
    """
    wide = int(np.prod(shape[:inputs]))
    return Rule(
        ours=(ours,),
        theirs=(theirs,),
        stack=stack or {},
        read=lambda pieces: [pieces[0].T.reshape(shape)],
        write=lambda pieces: [pieces[0].reshape(wide, -1).T],
    )


def layer_norm(
    ours: str, theirs: str, stack: Mapping[str, Sequence[int]] | None = None
) -> list[Rule]:
    """Scale and bias of a norm."""
    return [
        plain(f"{ours}/scale", f"{theirs}.weight", stack),
        plain(f"{ours}/bias", f"{theirs}.bias", stack),
    ]


def kernel(ours: str, theirs: str, stack: Mapping[str, Sequence[int]] | None = None) -> Rule:
    """A convolution's kernel [taps ..., inputs, outputs] that PyTorch keeps as [outputs, inputs, taps ...]."""
    return Rule(
        ours=(ours,),
        theirs=(theirs,),
        stack=stack or {},
        read=lambda pieces: [np.moveaxis(pieces[0], (0, 1), (-1, -2))],
        write=lambda pieces: [np.moveaxis(pieces[0], (-1, -2), (0, 1))],
    )
