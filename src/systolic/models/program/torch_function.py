"""A PyTorch module as a pure function, traced by torchax, which is also made to import beside versions of torch without operators that it names."""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import jax
import numpy as np

from systolic.core.errors import (
    DataError,
    MissingExtraError,
    OptionError,
    RunError,
    SystolicError,
    extra,
)
from systolic.core.units import with_article
from systolic.models.program.function import (
    VALUE_ERRORS,
    Named,
    PureFunction,
    narrowed,
    outputs_of,
)

LAST_WITH_NAMES = (2, 11)
"""Last version of torch with overloads for named tensors, which torchax 0.0.13 registers decompositions for."""
HOW = "return the module and its example inputs: return module, (x,) or return module, {'x': x}"


@cache
def environment() -> Any:
    """An own environment of torchax, whose batch norm keeps its running statistics.

    Raises:
        MissingExtraError: torch or torchax is not installed.
        RunError: torchax does not import with the version of torch here.
    """
    with extra("a PyTorch module", "torch"):
        import torch
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        with _removed_overloads(torch):
            import torchax.tensor  # noqa: F401

            env = _environment()
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] == "torchax":
            raise MissingExtraError("a PyTorch module", "torch") from error
        raise
    except AttributeError as error:
        raise RunError(
            f"torchax does not import with torch {torch.__version__} ({error}); pip install torch==2.13.0 torchax==0.0.13"
        ) from error
    finally:
        # torchax turns it off for the whole process; calls here do so for themselves.
        torch.backends.mha.set_fastpath_enabled(fast)
    env.override_op_definition(torch.nn.functional.batch_norm, _batch_norm)
    return env


def _environment() -> Any:
    import jax
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torchax.tensor import Environment, Tensor
    from torchax.view import View

    class Mixing(Environment):
        """Takes tensors that a forward makes on the CPU (``torch.arange(n)``) as constants of the program.

        Results under ``torch.no_grad`` are constants for gradients, which torchax leaves to its users.
        """

        flows: bool | None = None
        """Whether gradients flow inside a custom autograd function, whose forward PyTorch runs without them."""

        def t2j_iso(self, torchtensors: Any) -> Any:
            def constant(value: Any) -> Any:
                if isinstance(value, Tensor | View) or not value.ndim:
                    return value
                return self.t2j_copy(value)

            whole = tree_map_only(torch.Tensor, constant, torchtensors)
            return super().t2j_iso(whole)

        def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            outputs = super().dispatch(func, types, args, kwargs)
            if self.flows if self.flows is not None else torch.is_grad_enabled():
                return outputs

            argument_ids = {id(leaf) for leaf in tree_leaves((args, kwargs))}

            def constant(value: Any) -> Any:
                # An operation in place returns its argument, which the next one of a chain changes too;
                # any other that returns it (``to`` its own dtype) leaves it as it is.
                if id(value) not in argument_ids or func.__name__.partition(".")[0].endswith("_"):
                    value._elem = jax.lax.stop_gradient(value._elem)
                return value

            return tree_map_only(Tensor, constant, outputs)

    return Mixing()


@contextmanager
def open_functions(env: Any) -> Generator[None]:
    """Differentiates the forward of custom autograd functions; their own backward is never called."""
    from torch.autograd import Function

    own = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        before = env.flows
        env.flows = torch.is_grad_enabled() if before is None else before
        try:
            return own.__func__(cls, *args, **kwargs)
        finally:
            env.flows = before

    Function.apply = classmethod(apply)  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        Function.apply = own


@contextmanager
def _removed_overloads(torch: Any) -> Any:
    """Answers the names of removed overloads with objects that no call ever matches."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    packet = torch._ops.OpOverloadPacket
    own = packet.__getattr__
    if version <= LAST_WITH_NAMES:
        yield
        return

    def answer(self: Any, key: str) -> Any:
        try:
            return own(self, key)
        except AttributeError:
            if "imname" in key or "names_" in key or key.endswith("_names"):
                return _removed(torch, f"{self}.{key}")
            raise

    packet.__getattr__ = answer
    try:
        yield
    finally:
        packet.__getattr__ = own


def _removed(torch: Any, name: str) -> Any:
    """An overload that is only ever a key of torchax's tables."""

    class Removed(torch._ops.OpOverload):
        def __init__(self) -> None:
            self._name = name

        def __hash__(self) -> int:
            return hash(name)

        def __eq__(self, other: object) -> bool:
            return self is other

        def __repr__(self) -> str:
            return f"<removed {name}>"

    return Removed()


def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``torch.nn.functional.batch_norm`` in float32; torchax's own never changes the running statistics.

    The running variance is the unbiased one, as in PyTorch.
    """
    import jax
    import jax.numpy as jnp

    values = x.jax()
    wide = values.astype(jnp.float32)
    dims, shape = (0, *range(2, wide.ndim)), (1, -1, *(1,) * (wide.ndim - 2))
    if training:
        mean, variance = jnp.mean(wide, dims), jnp.var(wide, dims)
        count = wide.size // wide.shape[1]
        if running_mean is not None and momentum is not None:
            unbiased = variance * (count / max(count - 1, 1))
            for kept, now in ((running_mean, mean), (running_var, unbiased)):
                old = kept.jax()
                kept._elem = ((1 - momentum) * old + momentum * jax.lax.stop_gradient(now)).astype(
                    old.dtype
                )
    else:
        mean, variance = running_mean.jax(), running_var.jax()
    normed = (wide - mean.reshape(shape)) * jax.lax.rsqrt(variance.reshape(shape) + eps)
    if weight is not None:
        normed = normed * weight.jax().reshape(shape)
    if bias is not None:
        normed = normed + bias.jax().reshape(shape)
    return x._env.j2t_iso(normed.astype(values.dtype))


def torch_function(returned: Any, source: str, placed: int = 0) -> PureFunction:
    """The pure function of what a user's function returned.

    Args:
        returned: A module and example inputs: one tensor, a tuple or a dict of arguments of ``forward``. Arguments that are
            no arrays are constants.
        source: Name of the function, for messages.
        placed: Arguments that are passed by place, the first ones; a program of torch.export takes them only so.

    Raises:
        DataError: it is something else, an argument is a structure of tensors, or the module has no forward for these inputs.
        MissingExtraError: torch or torchax is not installed.
    """
    env = environment()
    import torch
    from torch.utils import _pytree as pytree

    if not (
        isinstance(returned, tuple)
        and len(returned) == 2
        and isinstance(returned[0], torch.nn.Module)
    ):
        raise DataError(
            f"{source} returned {_kind(returned)}, not a torch.nn.Module and its example inputs; {HOW}"
        )
    module, example = returned
    arguments = _arguments(module, example)
    inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    if not inputs:
        raise DataError(f"the example inputs of {source} hold no tensor; {HOW}")
    constants = {name: value for name, value in arguments.items() if name not in inputs}
    for name, value in constants.items():
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            raise DataError(
                f"example input {name} of {source} is {with_article(type(value).__name__)} of tensors; wrap the module in one whose forward takes each tensor by itself"
            )
    trained, state = _arrays(module)
    kinds = {name: tensor.dtype for name, tensor in inputs.items()}
    call = TracedModule(module, env, constants, tuple(arguments)[:placed], kinds)

    def run(batch: Named) -> dict[str, np.ndarray]:
        with mode(module, False), torch.no_grad():
            outputs = call.forward(call.tensors(batch))
        return {
            name: as_numpy(output, name)
            for name, output in outputs_of(outputs, torch.Tensor).items()
        }

    return PureFunction(
        framework=f"torch {torch.__version__}",
        trained=trained,
        state=state,
        example={name: as_numpy(value, name) for name, value in inputs.items()},
        call=call,
        source=run,
    )


class TracedModule:
    """The module as a function of its arrays; the module's own arrays are never changed."""

    def __init__(
        self,
        module: Any,
        env: Any,
        constants: Mapping[str, Any],
        placed: Sequence[str],
        kinds: Mapping[str, Any],
    ) -> None:
        self.module, self.env, self.constants, self.placed = module, env, constants, placed
        self.kinds, self._still = kinds, False
        signature = inspect.signature(module.forward)
        self.positional = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is parameter.VAR_POSITIONAL
        ]

    def tensors(self, inputs: Named) -> dict[str, Any]:
        """Inputs as tensors of PyTorch, in the dtypes of the example."""
        import torch

        return {
            name: torch.from_numpy(np.array(array)).to(self.kinds[name])
            for name, array in inputs.items()
        }

    @contextmanager
    def still(self) -> Generator[None]:
        """Calls in training without dropout."""
        self._still = True
        try:
            yield
        finally:
            self._still = False

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """The module's result."""
        if self.positional:
            return self.module(*inputs.values())
        named = {**inputs, **self.constants}
        return self.module(*[named.pop(name) for name in self.placed], **named)

    def __call__(
        self, trained: Named, state: Named, inputs: Named, train: bool, key: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`PureFunction`."""
        import torch
        from torch.nn.utils.stateless import _reparametrize_module

        env = self.env
        arrays = {**trained, **state}
        tensors, there = env.j2t_iso(jax.tree.map(jax.numpy.asarray, (dict(arrays), dict(inputs))))
        key = jax.random.key(0) if key is None else key
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                mode(self.module, train),
                _layers(self.module) as at,
                env.override_property(prng=key),
                open_functions(env),
                env,
                without_dropout() if self._still else nullcontext(),
                _reparametrize_module(self.module, tensors, tie_weights=True),
            ):
                returned = _guarded(lambda: self.forward(there), at)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        outputs = {
            name: output.jax() for name, output in outputs_of(returned, torch.Tensor).items()
        }
        return outputs, {name: tensors[name].jax() for name in state}


def _guarded(work: Callable[[], Any], at: list[tuple[str, Any]]) -> Any:
    """Runs a trace; what it can't convert is named with the innermost layer that it is in.

    Raises:
        OptionError: so.
    """
    from torchax.tensor import OperatorNotFound

    try:
        return work()
    except SystolicError:
        raise
    except OperatorNotFound as error:
        operator = str(error).removeprefix("Operator with name ").partition(" ")[0]
        raise OptionError(
            f"{_layer(at)} calls {operator}, which torchax can't convert; replace that operator in the module"
        ) from error
    except VALUE_ERRORS as error:
        raise OptionError(
            f"{_layer(at)} needs the values of its tensors while it is traced (an if, a loop or a size that depends on them); write it with torch.where, or with fixed sizes"
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise OptionError(
            f"{_layer(at)} does not trace: {type(error).__name__}: {reason}; check that it runs on the example inputs"
        ) from error


def _layer(at: list[tuple[str, Any]]) -> str:
    if not at:
        return "the module"
    name, layer = at[-1]
    return (
        f"layer {name} ({type(layer).__name__})" if name else f"the module ({type(layer).__name__})"
    )


@contextmanager
def _layers(module: Any) -> Generator[list[tuple[str, Any]]]:
    """A list of the layers, outermost first, whose forward runs."""
    running: list[tuple[str, Any]] = []
    hooks = []
    for name, layer in module.named_modules():
        hooks.append(
            layer.register_forward_pre_hook(
                lambda layer, _, name=name: running.append((name, layer)), prepend=True
            )
        )
        hooks.append(layer.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def without_dropout() -> Any:
    """A mode of torch in which dropout passes its input on, that of attention too."""
    from torch.overrides import TorchFunctionMode

    class Still(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            keywords, name = dict(kwargs or {}), func.__name__
            if "dropout" in name:
                return args[0] if args else keywords["input"]
            if name == "multi_head_attention_forward":
                keywords["training"] = False  # of its dropout only
            elif name == "scaled_dot_product_attention":
                args, keywords = (
                    (*args[:4], 0.0, *args[5:])[: len(args)],
                    {**keywords, "dropout_p": 0.0},
                )
                if len(args) > 4:
                    del keywords["dropout_p"]
            return func(*args, **keywords)

    return Still()


@contextmanager
def mode(module: Any, train: bool) -> Generator[None]:
    """The module in training or evaluation, then each layer as it was."""
    before = [(layer, layer.training) for layer in module.modules()]
    try:
        module.train(train)
    except NotImplementedError:  # a program of torch.export has one mode
        for layer, _ in before:
            layer.training = train
    try:
        yield
    finally:
        for layer, training in before:
            layer.training = training


def _arguments(module: Any, example: Any) -> dict[str, Any]:
    """Example inputs by the names that ``forward`` gives them."""
    import torch

    if isinstance(example, torch.Tensor | np.ndarray):
        example = (example,)
    signature = inspect.signature(module.forward)
    try:
        if isinstance(example, Mapping):
            bound = signature.bind(**example)
        elif isinstance(example, list | tuple):
            bound = signature.bind(*example)
        else:
            raise DataError(
                f"the example inputs are {_kind(example)}; give a tensor, or a tuple or a dict of arguments of forward"
            )
    except TypeError as error:
        raise DataError(
            f"forward of {type(module).__name__} does not take the example inputs: {error}; give what module(...) takes"
        ) from error
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {f"{name}_{number}": part for number, part in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def _arrays(module: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights that are trained, and all other tensors: frozen weights, buffers, plain attributes. Tied weights have one name."""
    parameters = dict(module.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    state = {
        name: parameter for name, parameter in parameters.items() if not parameter.requires_grad
    }
    state |= other_tensors(module)
    arrays = [
        {name: as_numpy(tensor, name) for name, tensor in group.items()}
        for group in (trained, state)
    ]
    return arrays[0], arrays[1]


def other_tensors(module: Any) -> dict[str, Any]:
    """Buffers and plain attributes that are tensors."""
    import torch

    tensors = dict(module.named_buffers())
    for prefix, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}.{name}" if prefix else name] = value
    return tensors


def as_numpy(tensor: Any, name: str) -> np.ndarray:
    """A tensor as numpy in at most 32 bits; bfloat16 is that of ml_dtypes. Raises as :func:`narrowed`."""
    import torch

    there = tensor.detach().cpu()
    if there.dtype == torch.bfloat16:
        import ml_dtypes

        return there.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return narrowed(there.numpy(), name)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(member).__name__ for member in value)})"
    return type(value).__name__
