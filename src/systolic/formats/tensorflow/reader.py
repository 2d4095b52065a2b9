"""A TensorFlow SavedModel as a pure function, through tf2jax; runs in a process of its own."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.core.errors import (
    DataError,
    NotFoundError,
    OptionError,
    extra,
    nearest,
)
from systolic.models.program.function import Named, PureFunction, narrowed, outputs_of

SERVING = "serving_default"
"""Signature that TensorFlow Serving calls."""
EXAMPLES = 2
"""Examples of the random inputs of a signature."""
OWN = "XlaCallModule"
"""Operation that holds a program of JAX in a SavedModel."""


def saved_model_function(
    source: Path | str, signature: str | None, example: Mapping[str, np.ndarray] | None
) -> PureFunction:
    """The pure function of a signature.

    Args:
        source: Folder of the SavedModel.
        signature: Its name; by default ``serving_default``, or the only one there is.
        example: Inputs by name; random ones where None.

    Raises:
        MissingExtraError: TensorFlow or tf2jax is not installed.
        NotFoundError: there is no such signature.
        OptionError: an input has an unknown size, or an operation has no form in JAX.
        DataError: it is no SavedModel.
    """
    folder = Path(source)
    with extra("a TensorFlow SavedModel", "tf"):
        import tensorflow as tf  # ty: ignore[import-not-found]
        import tf2jax  # ty: ignore[import-not-found]  # noqa: F401
    logging.disable(logging.WARNING)  # tf2jax warns of every attribute that it passes over
    try:
        restored = tf.saved_model.load(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder} does not load as a SavedModel: {str(error).splitlines()[0]}; save it again with tf.saved_model.save"
        ) from error
    name, called = _signature(folder, restored, signature)
    # The operation may also lie in a function that the graph calls, so the whole description is searched.
    if OWN.encode() in called.graph.as_graph_def().SerializeToString():
        raise OptionError(
            f"{folder} was written by jax2tf, whose programs ({OWN}) tf2jax can't read; export the JAX function itself with jax.export, or import its weights"
        )
    graph = _Graph(folder, restored, name, _inputs(folder, called, example))
    _, variables = graph.converted(tuple(input_.shape for input_ in graph.inputs.values()))
    return PureFunction(
        framework=f"tensorflow {tf.__version__}",
        trained={
            key: narrowed(variable, key)
            for key, variable in variables.items()
            if variable.trainable
        },
        state={
            key: narrowed(variable, key)
            for key, variable in variables.items()
            if not variable.trainable
        },
        example=graph.inputs,
        call=graph,
        source=graph.in_tensorflow,
        random=False,
    )


class _Graph:
    """A signature as a function of its variables and inputs."""

    def __init__(
        self, folder: Path, restored: Any, name: str, inputs: dict[str, np.ndarray]
    ) -> None:
        # The restored object owns the variables: without it they are deleted.
        self.folder, self.restored, self.name, self.inputs = folder, restored, name, inputs
        self._made: dict[tuple[tuple[int, ...], ...], Any] = {}

    def converted(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        """The function and its variables for inputs of these shapes: tf2jax takes sizes as they are in its graph.

        Raises:
            OptionError: an operation has no form in JAX.
        """
        import tensorflow as tf  # ty: ignore[import-not-found]
        import tf2jax  # ty: ignore[import-not-found]

        if shapes in self._made:
            return self._made[shapes]
        called = self.restored.signatures[self.name]
        wrapped = tf.function(
            lambda *inputs: called(**dict(zip(self.inputs, inputs, strict=True))), autograph=False
        )
        kinds = [input_.dtype for input_ in self.inputs.values()]
        zeros = [np.zeros(size, kind) for size, kind in zip(shapes, kinds, strict=True)]
        try:
            self._made[shapes] = tf2jax.convert(wrapped, *zeros)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise OptionError(
                f"signature {self.name} of {self.folder} does not convert: {reason}; replace that operation in the TensorFlow model"
            ) from error
        return self._made[shapes]

    def __call__(
        self, trained: Named, state: Named, inputs: Named, train: bool, key: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`PureFunction`."""
        del train, key
        arrays = [inputs[input_] for input_ in self.inputs]
        function, _ = self.converted(tuple(tuple(array.shape) for array in arrays))
        outputs, _ = function({**trained, **state}, *arrays)
        return outputs_of(outputs, (jax.Array, np.ndarray)), dict(state)

    def in_tensorflow(self, inputs: Named) -> dict[str, np.ndarray]:
        """The signature's own outputs."""
        import tensorflow as tf  # ty: ignore[import-not-found]

        called = self.restored.signatures[self.name]
        outputs = called(**{input_: tf.constant(inputs[input_]) for input_ in self.inputs})
        return {
            key: narrowed(output.numpy()) for key, output in outputs_of(outputs, tf.Tensor).items()
        }


def _signature(folder: Path, restored: Any, chosen: str | None) -> tuple[str, Any]:
    known = dict(restored.signatures)
    if not known:
        raise NotFoundError(
            f"{folder} has no signatures; save it with tf.saved_model.save(module, path, signatures=…)"
        )
    name = chosen or (SERVING if SERVING in known else next(iter(known)))
    if chosen is None and SERVING not in known and len(known) > 1:
        raise OptionError(
            f"{folder} has the signatures {', '.join(sorted(known))}; choose one with --signature"
        )
    if name not in known:
        raise NotFoundError(
            f"{folder} has no signature {name}{nearest(name, known)}; it has {', '.join(sorted(known))}"
        )
    return name, known[name]


def _inputs(
    folder: Path, called: Any, example: Mapping[str, np.ndarray] | None
) -> dict[str, np.ndarray]:
    """Example inputs of a signature, random where none are given."""
    specs = called.structured_input_signature[1]
    if example is not None:
        if set(example) != set(specs):
            raise DataError(
                f"the example inputs are {', '.join(sorted(example))}, and the signature takes {', '.join(sorted(specs))}; give these"
            )
        return {name: narrowed(example[name], name) for name in specs}
    rng, arrays = np.random.default_rng(0), {}
    for name, spec in specs.items():
        sizes = spec.shape.as_list() if spec.shape.rank is not None else [None, None]
        if None in sizes[1:]:
            raise OptionError(
                f"input {name} of {folder} has the shape {spec.shape}, of unknown size; give example inputs with --example inputs.npz"
            )
        shape = [EXAMPLES if size is None else size for size in sizes]
        kind = spec.dtype.as_numpy_dtype
        if np.issubdtype(kind, np.integer):
            arrays[name] = narrowed(rng.integers(0, 2, shape).astype(kind))
        elif np.issubdtype(kind, np.floating):
            arrays[name] = narrowed(rng.normal(size=shape).astype(kind))
        else:
            raise OptionError(
                f"input {name} of {folder} is {spec.dtype.name}, which JAX has no arrays of; make it numbers"
            )
    return arrays
