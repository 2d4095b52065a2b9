"""A Keras 3 model as a pure function, through its stateless calls on the JAX backend."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from systolic.core.errors import DataError, OptionError, SystolicError
from systolic.models.program.config import load_keras
from systolic.models.program.function import (
    VALUE_ERRORS,
    Named,
    PureFunction,
    narrowed,
    outputs_of,
)

EXAMPLES = 2
"""Examples of the random inputs of a model that comes without its own."""


def keras_function(returned: Any, source: str) -> PureFunction:
    """The pure function of a Keras model, or of a model with example inputs.

    Args:
        returned: A built keras.Model, or (model, inputs): an array, or a list or dict of arrays, as the model takes them.
        source: Its name, for messages.

    Raises:
        DataError: it is something else, is not built, or its inputs have an unknown size without example inputs.
        OptionError: Keras was loaded with another backend than JAX.
        MissingExtraError: Keras is not installed.
    """
    keras = load_keras()
    model, example = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    )
    if not isinstance(model, keras.Model):
        raise DataError(
            f"{source} made {type(model).__name__}, not a keras.Model; return the model, or model, inputs"
        )
    if example is not None:
        model(example)
    if not model.built or not model.inputs:
        raise (
            DataError(
                f"{source} has unknown input shapes; start the model with keras.Input, or return model, inputs"
            )
            if example is None
            else DataError(
                f"{source} is a subclassed model without named inputs; wrap it: keras.Model(x, model(x)) with x = keras.Input(shape)"
            )
        )
    names = _unique([tensor.name for tensor in model.inputs])
    inputs = _random(model, names, source) if example is None else _named(example, names, source)
    trained, state = model.trainable_variables, model.non_trainable_variables
    trained_names = _unique([variable.path for variable in (*trained, *state)])
    names_of = trained_names[: len(trained)], trained_names[len(trained) :]
    call = _Stateless(model, names, *names_of)

    def run(batch: Named) -> dict[str, np.ndarray]:
        result = model(call.packed(batch), training=False)
        return {
            name: narrowed(output, name) for name, output in outputs_of(result, jax.Array).items()
        }

    return PureFunction(
        framework=f"keras {keras.__version__}",
        trained=_values(names_of[0], trained),
        state=_values(names_of[1], state),
        example=inputs,
        call=call,
        source=run,
        random=False,  # seeds of dropout are variables of the model
    )


def _values(names: Sequence[str], variables: Sequence[Any]) -> dict[str, np.ndarray]:
    return {
        name: narrowed(variable.value, name)
        for name, variable in zip(names, variables, strict=True)
    }


def check_losses(function: PureFunction, source: str) -> None:
    """Refuses what Keras does in training besides the loss of a task.

    Args:
        function: That of a Keras model.
        source: Its name.

    Raises:
        OptionError: a layer adds a loss (a regularizer, ``add_loss``), or a weight has a constraint.
    """
    call = function.call
    assert isinstance(call, _Stateless)
    for variable in call.model.trainable_variables:
        if variable.constraint is not None:
            raise OptionError(
                f"{variable.path} of {source} has the constraint {type(variable.constraint).__name__}, which training here does not keep; make the model without it"
            )
    losses = call.losses(function)
    regular = [
        weight.path for weight in call.model.trainable_variables if weight.regularizer is not None
    ]
    if losses:
        which = f"such as that of {regular[0]}" if regular else "which a layer computes"
        many = "1 loss" if losses == 1 else f"{losses} losses"
        raise OptionError(
            f"{source} adds {many} to its own, {which}, and training here has the loss of its task alone; make the model without regularizers and add_loss, and set optimizer.weight_decay"
        )


class _Stateless:
    """The model as a function of its variables' values."""

    def __init__(
        self, model: Any, inputs: Sequence[str], trained: Sequence[str], state: Sequence[str]
    ) -> None:
        self.model, self.inputs, self.trained, self.state = model, inputs, trained, state

    def packed(self, inputs: Named) -> Any:
        """Inputs in the structure that the model takes them in: one, a list or a dict."""
        keras, arrays = load_keras(), [inputs[name] for name in self.inputs]
        if isinstance(self.model, keras.Sequential):
            return arrays[0]
        return keras.tree.pack_sequence_as(self.model.input, arrays)

    def losses(self, function: PureFunction) -> int:
        """Number of losses that the layers add in training."""

        def added(trained: Named, state: Named, inputs: Named) -> Any:
            return self.model.stateless_call(
                [trained[name] for name in self.trained],
                [state[name] for name in self.state],
                self.packed(inputs),
                training=True,
                return_losses=True,
            )[2]

        return len(jax.eval_shape(added, function.trained, function.state, function.example))

    def __call__(
        self, trained: Named, state: Named, inputs: Named, train: bool, key: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`PureFunction`."""
        try:
            returned, after = self.model.stateless_call(
                [trained[name] for name in self.trained],
                [state[name] for name in self.state],
                self.packed(inputs),
                training=train,
            )
        except SystolicError:
            raise
        except VALUE_ERRORS as error:
            raise OptionError(
                f"{self.model.name} needs the values of its arrays while it is traced (an if, a loop or a size that depends on them); write it with keras.ops.where or keras.ops.cond"
            ) from error
        except Exception as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise OptionError(
                f"{self.model.name} does not trace: {type(error).__name__}: {reason}; its layers must compute with keras.ops"
            ) from error
        outputs = outputs_of(returned, jax.Array)
        return outputs, dict(zip(self.state, after, strict=True))


def load_file(path: Any) -> Any:
    """The model of a ``.keras`` file; code in it (lambdas) is not executed.

    Raises:
        DataError: the file is damaged, or holds layers that Keras does not know.
        MissingExtraError: Keras is not installed.
    """
    keras = load_keras()
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[0].split())[:300]
        raise DataError(
            f"{path} does not load: {reason}; for layers of your own give a function that returns the model, file.py:function"
        ) from error


def _random(model: Any, names: Sequence[str], source: str) -> dict[str, np.ndarray]:
    """Random inputs: normal numbers, or small whole ones."""
    rng, inputs = np.random.default_rng(0), {}
    for name, tensor in zip(names, model.inputs, strict=True):
        shape = tuple(tensor.shape[1:])
        if None in shape:
            raise DataError(
                f"input {name} of {source} has the shape {tuple(tensor.shape)}, of unknown size; return model, inputs from file.py:function"
            )
        size = (EXAMPLES, *shape)
        integer = np.issubdtype(np.dtype(tensor.dtype), np.integer)
        values = rng.integers(0, 2, size) if integer else rng.normal(size=size)
        inputs[name] = narrowed(values.astype(tensor.dtype))
    return inputs


def _named(example: Any, names: Sequence[str], source: str) -> dict[str, np.ndarray]:
    if isinstance(example, Mapping):
        named = {str(name): value for name, value in example.items()}
    else:
        several = example if isinstance(example, list | tuple) else [example]
        named = dict(zip(names, several, strict=False))
    if set(named) != set(names):
        raise DataError(
            f"{source} returned inputs {', '.join(named)}, and the model takes {', '.join(names)}; give these"
        )
    return {name: narrowed(named[name], name) for name in names}


def _unique(names: Sequence[str]) -> list[str]:
    """The names, with numbers where two are equal."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        unique.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return unique
