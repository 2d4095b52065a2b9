"""Model split into its static structure and its arrays.

Arrays are kept in flat dicts, path to array, so that every layer above (optimizer masks, sharding,
checkpoints, conversions) names a parameter the same way: ``blocks/mlp/up``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Adapter, MatrixFormat, Model, Quantization
from systolic.models.adapters import Frozen, adapt
from systolic.models.quantized.codes import fake_quantized
from systolic.models.quantized.placement import formats_of_all, place_quantized
from systolic.steps.target import MeshTarget

Arrays = dict[str, jax.Array]


class ModelStructure:
    """Static structure of a model for a target.

    Attributes:
        params: Path to ShapeDtypeStruct of each parameter.
        model_state: The same for all other variables, frozen weights among them.
        frozen: Paths of the frozen weights, with the logical names of their dims.
        axes: Path to the logical names of a parameter's dims, ``None`` where the module names none.
    """

    def __init__(
        self,
        model: Model,
        target: MeshTarget,
        adapter: Adapter = Adapter(),  # noqa: B008
        quantization: Quantization = Quantization(),  # noqa: B008
    ) -> None:
        self.model, self.target = model, target
        self.adapter, self.quantization = adapter, quantization

        def split() -> tuple[Any, ...]:
            module = self._module(jax.random.key(0))
            module.eval()
            evaluation, *_ = nnx.split(module, nnx.Param, ...)
            module.train()
            graph, params, model_state = nnx.split(module, nnx.Param, ...)
            graphs.append((graph, evaluation))
            return params, model_state

        graphs: list[Any] = []
        params, model_state = jax.eval_shape(split)
        self.rounded: Mapping[str, tuple[tuple[int, ...], MatrixFormat]] = {}
        """Matrices that are rounded before each use: dims that products sum over, and formats."""
        self._graphs = dict(zip((True, False), graphs[0], strict=True))
        self._params, self._model_state = _flat(params), _flat(model_state)
        self.params = {path: _shape(variable) for path, variable in self._params.items()}
        self.model_state = {path: _shape(variable) for path, variable in self._model_state.items()}
        self.axes = {path: _axes(variable) for path, variable in self._params.items()}
        if target.weight_format and not (self.adapter or self.quantization):
            shapes = {path: param.shape for path, param in self.params.items()}
            self.rounded = formats_of_all(model, shapes, self.axes, target.weight_format)
        self.frozen = {
            path: _axes(slot)
            for path, slot in self._model_state.items()
            if isinstance(slot.variable, Frozen)
        }

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters that train."""
        return sum(shape.size for shape in self.params.values())

    @property
    def shapes(self) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
        """Result of :meth:`init` as ShapeDtypeStructs, without building the module once more."""
        return self.params, self.model_state

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Fresh parameters and other variables; to be called under ``jit`` with sharded outputs."""
        module = self._module(key)
        _, params, model_state = nnx.split(module, nnx.Param, ...)
        return _values(params), _values(model_state)

    def module(
        self, params: Mapping[str, jax.Array], model_state: Mapping[str, jax.Array], train: bool
    ) -> nnx.Module:
        """The module with these arrays, in training or evaluation mode."""
        return nnx.merge(
            self._graphs[train],
            _state(self._params, params),
            _state(self._model_state, model_state),
        )

    def variables(self, module: nnx.Module) -> Arrays:
        """The module's variables that are not parameters, after a call changed them."""
        _, _, model_state = nnx.split(module, nnx.Param, ...)
        return _values(model_state)

    def cast(self, params: Mapping[str, jax.Array]) -> Arrays:
        """Float parameters in the target's compute dtype, those of :attr:`rounded` as their codes have them."""
        dtype = jnp.dtype(self.target.dtype)

        def cast_param(path: str, p: jax.Array) -> jax.Array:
            if path in self.rounded:
                return fake_quantized(p, *self.rounded[path], dtype)
            return p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p

        return {path: cast_param(path, p) for path, p in params.items()}

    def _module(self, key: jax.Array) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            rngs, stream = nnx.Rngs(), TracedStream(key, tag="default")
            setattr(rngs, stream.tag, stream)
            module = self.model.build(rngs, self.target)
            if self.adapter:
                names = frozenset(self.model.adaptable())
                adapt(module, self.adapter, names, rngs, jnp.dtype(self.target.dtype))
            place_quantized(module, self.quantization.by_path(), self.target.platform)
            return module


class TracedStream(nnx.RngStream):
    """Random keys that cost the same however many a module has drawn.

    Flax compares the shardings of a count before and after it adds one, and a traced value has none: the text of JAX's
    error names the arguments that it comes from, for which JAX walks all that was traced so far.
    """

    def __call__(self) -> jax.Array:
        """The next key."""
        key = jax.random.fold_in(self.key.get_value(), self.count.get_value())
        self.count.set_value(self.count.get_value() + 1)
        return key


class _Slot(NamedTuple):
    """Path of a variable in the module's state, and its kind and metadata."""

    path: tuple[Any, ...]
    variable: nnx.Variable


def _flat(state: Any) -> dict[str, _Slot]:
    return {
        "/".join(map(str, path)): _Slot(path, variable)
        for path, variable in nnx.to_flat_state(state)
    }


def _values(state: Any) -> Arrays:
    return {name: slot.variable.get_value() for name, slot in _flat(state).items()}


def _state(slots: Mapping[str, _Slot], values: Mapping[str, jax.Array]) -> nnx.State:
    return nnx.from_flat_state(
        [(slot.path, slot.variable.replace(values[name])) for name, slot in slots.items()]
    )


def _shape(slot: _Slot) -> jax.ShapeDtypeStruct:
    value = slot.variable.get_value()
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _axes(slot: _Slot) -> tuple[str | None, ...] | None:
    return slot.variable.get_metadata().get("out_sharding")
