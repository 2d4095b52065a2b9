"""torchax, imported beside versions of torch that lack operators which it names."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from systolic.core.errors import MissingExtraError, OptionError

LAST_WITH_NAMES = (2, 11)
"""Last version of torch with overloads for named tensors, which torchax 0.0.13 registers decompositions for."""


@cache
def environment() -> Any:
    """An own environment of torchax, whose batch norm keeps its running statistics.

    Raises:
        MissingExtraError: torch or torchax is not installed.
        OptionError: torchax does not import with the version of torch here.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("a PyTorch module", "torch") from error
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        with _removed_overloads(torch):
            import torchax.tensor  # noqa: F401

            made = _environment()
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] == "torchax":
            raise MissingExtraError("a PyTorch module", "torch") from error
        raise
    except AttributeError as error:
        raise OptionError(
            f"torchax does not import with torch {torch.__version__} ({error}); pip install torch==2.13.0 torchax==0.0.13"
        ) from error
    finally:
        # torchax turns it off for the whole process; calls here do so for themselves.
        torch.backends.mha.set_fastpath_enabled(fast)
    made.override_op_definition(torch.nn.functional.batch_norm, _batch_norm)
    return made


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
            made = super().dispatch(func, types, args, kwargs)
            if self.flows if self.flows is not None else torch.is_grad_enabled():
                return made

            given = {id(one) for one in tree_leaves((args, kwargs))}

            def constant(value: Any) -> Any:
                # An operation in place returns its argument, which the next one of a chain changes too;
                # any other that returns it (``to`` its own dtype) leaves it as it is.
                if id(value) not in given or _in_place(func):
                    value._elem = jax.lax.stop_gradient(value._elem)
                return value

            return tree_map_only(Tensor, constant, made)

    return Mixing()


def _in_place(func: Any) -> bool:
    return func.__name__.partition(".")[0].endswith("_")


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
    made = (wide - mean.reshape(shape)) * jax.lax.rsqrt(variance.reshape(shape) + eps)
    if weight is not None:
        made = made * weight.jax().reshape(shape)
    if bias is not None:
        made = made + bias.jax().reshape(shape)
    return x._env.j2t_iso(made.astype(values.dtype))
