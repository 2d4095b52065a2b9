"""Models of other frameworks as models of a job, and the users' functions that make them; imports without jax."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.core.errors import MissingExtraError, OptionError, SystolicError
from systolic.job import Layout, Model, Precision, Target
from systolic.job.layout import Axis, refuse_axes

if TYPE_CHECKING:
    import numpy as np
    from flax import nnx

    from systolic.models.program.function import PureFunction

SEED = 0
"""Seed of a framework's random numbers before a user's function is called, so that every process makes the same model."""


class Maker:
    """A user's function that makes a model, called once in each process; saved as its name."""

    def __init__(self, function: Callable[[], Any]) -> None:
        if not callable(function):
            raise OptionError(
                f"the model is made by {function!r}, which is no function; give the function itself, in the recipe or to systolic.resume(run, job=…)"
            )
        self.__wrapped__ = function

    def __call__(self) -> Any:
        """The function's outputs."""
        return self.__wrapped__()

    def __str__(self) -> str:
        function: Any = self.__wrapped__
        # A partial or an instance has no name of its own; its class stands for it.
        named = function if inspect.isroutine(function) else type(function)
        return f"{named.__module__}.{named.__qualname__}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Maker) and self.__wrapped__ is other.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __reduce__(self) -> tuple[Any, ...]:
        return Maker, (self.__wrapped__,)


class ForeignModel(Model):
    """Base of models of other frameworks: replicated or with sharded parameters, FLOPs counted from the trace."""

    def check(self, layout: Layout) -> None:
        """Data and fsdp."""
        axes = (Axis.tensor, Axis.context, Axis.expert, Axis.pipeline)
        refuse_axes(layout, "a model of another framework", *axes)


@dataclass(frozen=True)
class TorchModule(ForeignModel):
    """A PyTorch module that trains here, traced by torchax: ``TorchModule(make)``.

    ``make()`` returns the module and its example inputs: a tensor, or a tuple or dict of arguments of ``forward``. It is
    called after ``torch.manual_seed(0)``, and training starts from the module's weights. Parameters are
    named as in ``named_parameters()``. A task calls the built module with arrays by the names of forward's
    parameters (``mask_input`` for one named ``mask``, which marks padding in a batch) and gets arrays by name: ``output`` for one tensor, ``output_0`` and so on for a tuple, the
    keys of a dict.

    - Weights without ``requires_grad`` and buffers are state: not trained, kept in checkpoints.
    - In training, dropout draws from the job's seed, and batch norm uses the statistics of the whole batch
      of all devices and moves its running ones, as after ``module.train()``.
    - Other buffers change as the module changes them in place.

    Before the first step of a session, outputs, buffers and gradients of a few examples are compared with PyTorch's own,
    without dropout; training does not start where they differ.
    """

    make: Any
    """The function; kept as a Maker."""

    def __post_init__(self) -> None:
        if not isinstance(self.make, Maker):
            object.__setattr__(self, "make", Maker(self.make))

    def function(self) -> "PureFunction":
        """The module as a pure function.

        Raises:
            OptionError: the function fails.
            DataError: it returned something else.
            MissingExtraError: torch or torchax is not installed.
        """
        from systolic.models.program.torch_training import trainable_function

        return _made(self.make, trainable_function, "torch")

    def check_training(self, batch: "Callable[[], Mapping[str, np.ndarray]]") -> tuple[str, ...]:
        """Compares a step with PyTorch's; on the module's example inputs where the data's arrays have other names.

        Raises:
            OptionError: outputs, buffers or gradients differ; names the one that differs most.
        """
        function = self.function()
        assert function.compare is not None
        arrays = batch()
        whole = all(name in arrays for name in function.example)
        compared = function.compare(
            {name: arrays[name] for name in function.example} if whole else function.example
        )
        decayed = [name for name in compared.unused if function.trained[name].ndim > 1]
        if not decayed:
            return compared.notes
        note = f"no output of {self.make} depends on its weight {decayed[0]}: PyTorch's optimizers leave such a weight as it is, and weight decay shrinks it here; set its requires_grad to False"
        return (*compared.notes, note)

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.program.function.ProgramModule` with the module's weights."""
        from systolic.models.program.module import ProgramModule

        return ProgramModule(self.function(), rngs, target)


@dataclass(frozen=True)
class KerasModel(ForeignModel):
    """A Keras 3 model that trains here, on Keras' JAX backend: ``KerasModel(make)``.

    ``make()`` returns a built keras.Model; it is called after ``keras.utils.set_random_seed(0)``. Variables are named by
    their paths; the non-trainable ones, batch statistics and the seeds of dropout among them, are state that
    training moves. Losses that layers add (regularizers, ``add_loss``) and constraints of weights are refused. A task calls the built module with arrays by the names of the inputs.

    Keras computes in the dtype of its own policy, so the job's precision is f32; for bf16 set
    ``keras.config.set_dtype_policy("mixed_bfloat16")`` before the model is made.
    """

    make: Any
    """The function; kept as a Maker."""

    def __post_init__(self) -> None:
        if not isinstance(self.make, Maker):
            object.__setattr__(self, "make", Maker(self.make))

    def check_precision(self, precision: Precision) -> None:
        """Raises OptionError for anything but f32."""
        only_f32(
            precision,
            'a Keras model computes by its own policy: keras.config.set_dtype_policy("mixed_bfloat16")',
        )

    def function(self) -> "PureFunction":
        """The model as a pure function.

        Raises:
            OptionError: the function fails, or Keras was loaded with another backend than JAX.
            DataError: it returned something else.
            MissingExtraError: Keras is not installed.
        """
        from systolic.models.program.keras_function import keras_function

        return _made(self.make, keras_function, "keras")

    def check_training(self, batch: "Callable[[], Mapping[str, np.ndarray]]") -> tuple[str, ...]:
        """Refuses a model that adds losses to the task's, or whose weights have constraints; raises OptionError."""
        from systolic.models.program.keras_function import check_losses

        del batch
        check_losses(self.function(), str(self.make))
        return ()

    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """A :class:`~systolic.models.program.function.ProgramModule` with the model's weights."""
        from systolic.models.program.module import ProgramModule

        return ProgramModule(self.function(), rngs, target)


def only_f32(precision: Precision, why: str) -> None:
    """Raises OptionError for another precision than f32, with the reason."""
    if precision is not Precision.f32:
        raise OptionError(f"precision is {precision.value}, but {why}; use --precision f32")


_functions: dict[Maker, "PureFunction"] = {}
"""Traced once a process: making a module again would take its memory again."""


def _made(
    make: Maker, convert: Callable[[Any, str], "PureFunction"], framework: str
) -> "PureFunction":
    import jax

    from systolic.models.program.function import without_mask

    if make not in _functions:
        # Models are built inside a trace, and Keras draws its first weights with JAX.
        with jax.ensure_compile_time_eval():
            function = convert(made_by(make, framework, str(make)), str(make))
            _functions[make] = without_mask(function)
    return _functions[make]


def made_by(function: Callable[[], Any], framework: str, source: str) -> Any:
    """Result of a user's function, called with the framework's random numbers seeded.

    Args:
        function: The user's.
        framework: ``torch`` or ``keras``.
        source: Its name, for messages.

    Raises:
        MissingExtraError: the framework is not installed.
        OptionError: the function fails, or Keras computes with another backend than JAX.
    """
    seed(framework)
    try:
        return function()
    except SystolicError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"{source} failed: {type(error).__name__}: {reason}; call it alone to see where"
        ) from error


def seed(framework: str) -> None:
    """Seeds a framework's random numbers; raises as :func:`made_by`."""
    if framework == "torch":
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("a PyTorch module", "torch")
        import torch

        torch.manual_seed(SEED)
    else:
        load_keras().utils.set_random_seed(SEED)


def load_keras() -> Any:
    """Keras on its JAX backend.

    Raises:
        MissingExtraError: Keras is not installed.
        OptionError: it was loaded with another backend, or its environment asks for one.
    """
    if "keras" not in sys.modules:
        if importlib.util.find_spec("keras") is None:
            raise MissingExtraError("a Keras model", "keras")
        chosen = os.environ.setdefault("KERAS_BACKEND", "jax")
        if chosen != "jax":
            raise OptionError(
                f"KERAS_BACKEND is {chosen}, and models run here on jax; set KERAS_BACKEND=jax"
            )
    import keras

    backend = keras.backend.backend()
    if backend != "jax":
        raise OptionError(
            f"Keras is loaded with the backend {backend}, and models run here on jax; set KERAS_BACKEND=jax before keras is imported"
        )
    return keras
