"""A model of another framework as a Flax NNX module."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from systolic.core.errors import OptionError
from systolic.job import Target
from systolic.models.program.function import PureFunction


class Carried(nnx.Variable):
    """An array of the model that no optimizer changes."""


class ProgramModule(nnx.Module):
    """Arrays by name to arrays by name; its variables have the names of the framework's."""

    def __init__(self, function: PureFunction, rngs: nnx.Rngs, target: Target) -> None:
        clash = [
            name
            for name in (*function.trained, *function.state)
            if name in vars(nnx.Module) or name.startswith("systolic_")
        ]
        if clash:
            raise OptionError(
                f"the model has a weight named {clash[0]}, which a Flax module has too; rename it"
            )
        for name, array in function.trained.items():
            setattr(self, name, nnx.Param(_from_host(array)))
        for name, array in function.state.items():
            setattr(self, name, Carried(_from_host(array)))
        self.systolic_function, self.systolic_dtype = function, target.dtype
        self.systolic_random = rngs.dropout.fork() if function.random else None
        self.deterministic = False
        """Set by ``train()`` and ``eval()``."""

    def __call__(self, **inputs: jax.Array) -> dict[str, jax.Array]:
        """Outputs by name, floating ones of inputs in the dtype that the weights are computed in.

        Raises:
            OptionError: an input is missing.
        """
        function = self.systolic_function
        trained = {name: getattr(self, name)[...] for name in function.trained}
        state = {name: getattr(self, name)[...] for name in function.state}
        cast_inputs = {name: self._cast(array) for name, array in inputs.items()}
        train = not self.deterministic
        key = self.systolic_random() if train and self.systolic_random is not None else None
        outputs, after = function.call(trained, state, cast_inputs, train, key)
        if train:
            for name, array in after.items():
                getattr(self, name)[...] = array.astype(function.state[name].dtype)
        return outputs

    def _cast(self, array: Any) -> jax.Array:
        return (
            array.astype(self.systolic_dtype)
            if jnp.issubdtype(array.dtype, jnp.floating)
            else array
        )


def _from_host(array: np.ndarray) -> jax.Array:
    """An array of the host, asked for when the program runs: as a constant it would be part of the compiled program."""
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return jax.pure_callback(lambda: np.asarray(array), shape)
