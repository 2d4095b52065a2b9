"""A training step of a PyTorch module compared with PyTorch's own: outputs, buffers and gradients."""

import zlib
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from systolic.core.errors import OptionError, SystolicError
from systolic.models.program.function import Compared, Named, PureFunction, outputs_of
from systolic.models.program.torch_function import (
    TracedModule,
    as_numpy,
    mode,
    other_tensors,
    torch_function,
    without_dropout,
)

TOLERANCE = 1e-3
"""Largest difference of an output, a buffer or a gradient over its norm; both sides compute in float32."""
WIDE = 5e-2
"""The same with weights in 16 bits."""
NOISE = 10.0
"""Differences allowed, in those that PyTorch itself shows after a change of the weights in their last digits."""
LAST_DIGITS = 1e-6
"""That relative change, some roundings of float32; with weights in 16 bits it is 2^-8."""
NOTHING = 1e-7
"""Norm of a gradient, over the largest one, that counts as zero."""
REPEATED = 1e-4
"""Largest difference of two steps of PyTorch that draw no random numbers: threads add in any order."""

NEXT = {
    "output": "replace the layer that makes it by operators of another kind",
    "buffer": "replace the layer that keeps it, or freeze it in evaluation",
    "the gradient of": "the backward of autograd functions, .data and hooks are not followed (.detach() and torch.no_grad() are), so write it without them",
}


def trainable_function(returned: Any, source: str) -> PureFunction:
    """:func:`~systolic.models.program.torch_function.torch_function` with the comparison of a training step; raises as it."""
    function = torch_function(returned, source)
    call = function.call
    assert isinstance(call, TracedModule)

    def compare(inputs: Named) -> Compared:
        return _compared(_Both(call, function, source, call.tensors(inputs)))

    return replace(function, compare=compare)


@dataclass(frozen=True, kw_only=True)
class ModuleStep:
    """Arrays that a step makes, in float64."""

    outputs: Named
    state: Named
    gradients: Named
    """Gradients of the sum of all floating outputs times fixed random numbers, by parameter."""
    unused: tuple[str, ...] = ()
    """Parameters that no output depends on."""

    def groups(self) -> dict[str, Named]:
        """By what they are, forward first: wrong outputs have wrong gradients."""
        return dict(zip(NEXT, (self.outputs, self.state, self.gradients), strict=True))


def _compared(both: "_Both") -> Compared:
    """Compares a training step without dropout, and outputs in evaluation; a module that draws other random numbers, in evaluation."""
    notes: list[str] = []
    try:
        step, train = both.there(True), True
        if not _repeats(step, both.there(True, seed=1)):
            step, train = both.there(False), False
            if not _repeats(step, both.there(False, seed=1)):
                note = f"{both.source} draws random numbers in evaluation too, so it was not compared with PyTorch"
                return Compared(notes=(note,))
            notes.append(
                f"{both.source} draws random numbers besides dropout in training, so its gradients were compared with PyTorch's in evaluation only"
            )
        moved = both.there(train, digits=both.digits)
        plain = both.there(False, backward=False) if train else None
    except SystolicError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        note = f"PyTorch's own training step of {both.source} fails on the first batch ({type(error).__name__}: {reason}), so it was not compared"
        return Compared(notes=(note,))
    both.judge(both.here(train, step.outputs), step, moved, train)
    if plain is not None:
        both.judge(both.here(False, None), plain, plain, False)
    return Compared(notes=tuple(notes), unused=step.unused)


class _Both:
    """Steps of a module on the same inputs by PyTorch and here; its own arrays stay as they are."""

    def __init__(
        self, call: TracedModule, function: PureFunction, source: str, inputs: Mapping[str, Any]
    ) -> None:
        self.call, self.function, self.source, self.inputs = call, function, source, inputs
        narrow = any(str(weight.dtype).endswith("float16") for weight in function.trained.values())
        self.digits, self.tolerance = (2.0**-8, WIDE) if narrow else (LAST_DIGITS, TOLERANCE)

    def there(
        self, train: bool, *, seed: int = 0, digits: float = 0.0, backward: bool = True
    ) -> ModuleStep:
        """PyTorch's step without dropout.

        Args:
            train: Its mode.
            seed: Of PyTorch's random numbers.
            digits: Relative random change of the weights before it.
            backward: Whether gradients are computed.

        Raises:
            OptionError: the step changes a weight in place, or no gradient flows.
        """
        import torch
        from torch.nn.utils.stateless import _reparametrize_module

        module = self.call.module
        # The module's own parameters, so that their hooks run; copies of all other tensors.
        every = dict(module.named_parameters())
        copies = {name: tensor.detach().clone() for name, tensor in other_tensors(module).items()}
        before = {name: tensor.detach().clone() for name, tensor in every.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                if digits:
                    _shake(every, digits)
                start = {name: tensor.detach().clone() for name, tensor in every.items()}
                with mode(module, train), without_dropout(), _reparametrize_module(module, copies):
                    outputs = outputs_of(self.call.forward(self.inputs), torch.Tensor)
                    floats = {
                        name: tensor
                        for name, tensor in outputs.items()
                        if tensor.is_floating_point()
                    }
                    gradients = self._gradients(floats, every) if backward else {}
                changed = [n for n, tensor in every.items() if not torch.equal(tensor, start[n])]
            finally:
                with torch.no_grad():
                    for name, tensor in every.items():
                        tensor.copy_(before[name])
        if changed:
            raise OptionError(
                f"forward of {self.source} changes its weight {changed[0]} in place, which training here does not follow; let it compute a new tensor"
            )
        frozen = {
            name: tensor for name, tensor in start.items() if name not in self.function.trained
        }
        none = tuple(name for name, tensor in gradients.items() if tensor is None)
        zeros = {name: torch.zeros_like(every[name]) for name in none}
        return ModuleStep(
            outputs=_wide(floats),
            state=_wide({**copies, **frozen}),
            gradients=_wide({**gradients, **zeros}),
            unused=none,
        )

    def _gradients(
        self, outputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        import torch

        flows = {name: output for name, output in outputs.items() if output.requires_grad}
        if not flows:
            raise OptionError(
                f"no output of {self.source} depends on a weight that requires gradients, so PyTorch could not train it; compute one outside torch.no_grad()"
            )
        weights = {name: parameters[name] for name in self.function.trained}
        pull = [
            torch.from_numpy(_pull(n, output.shape)).to(output.dtype) for n, output in flows.items()
        ]
        gradients = torch.autograd.grad(
            list(flows.values()), list(weights.values()), pull, allow_unused=True
        )
        return dict(zip(weights, gradients, strict=True))

    def here(self, train: bool, wanted: Named | None) -> ModuleStep:
        """The step as it trains here, without dropout; ``wanted`` are PyTorch's outputs, None for no gradients."""

        def step(trained: Any, state: Any, inputs: Any) -> Any:
            def floats(weights: Any) -> Any:
                outputs, after = self.call(weights, state, inputs, train, None)
                return {
                    name: output
                    for name, output in outputs.items()
                    if jax.numpy.issubdtype(output.dtype, jax.numpy.floating)
                }, after

            if wanted is None:
                return *floats(trained), {}
            outputs, back, after = jax.vjp(floats, trained, has_aux=True)
            pull = {
                name: _pull(name, output.shape).astype(output.dtype)
                for name, output in outputs.items()
            }
            return outputs, after, back(pull)[0]

        inputs = {name: as_numpy(tensor, name) for name, tensor in self.inputs.items()}
        arrays = dict(self.function.trained), dict(self.function.state)
        with _on_cpu(), self.call.still():
            outputs, after, gradients = jax.device_get(jax.jit(step)(*arrays, inputs))
        return ModuleStep(
            outputs=_floats(outputs), state=_floats(after), gradients=_floats(gradients)
        )

    def judge(self, step: ModuleStep, wanted: ModuleStep, moved: ModuleStep, train: bool) -> None:
        """Compares a step with PyTorch's, and with the one that PyTorch makes with moved weights.

        Raises:
            OptionError: they differ.
        """
        other = moved.groups()
        for what, arrays in wanted.groups().items():
            here = step.groups()[what]
            floor = max((_norm(array) for array in arrays.values()), default=0.0) * NOTHING
            shares = {
                name: _share(here[name], array, other[what][name], floor)
                for name, array in arrays.items()
                if name in here
            }
            worst = max(shares, key=lambda name: shares[name], default=None)
            if worst is not None and shares[worst] > self.tolerance:
                how = "in training, without dropout" if train else "in evaluation"
                size = _norm(arrays[worst])
                # A gradient that PyTorch does not have has no share.
                apart = (
                    f"differs by {shares[worst]:.2g} of its norm" if size > floor else "is 0 there"
                )
                raise OptionError(
                    f"{self.source} is not the same here as in PyTorch {how}: {what} {worst} {apart} on the first batch (limit {self.tolerance:g}); {NEXT[what]}"
                )


def _share(array: np.ndarray, wanted: np.ndarray, moved: np.ndarray, floor: float) -> float:
    """Norm of a difference, less what noise explains, over the norm of what is wanted."""
    if array.shape != wanted.shape:
        return float("inf")
    apart = max(_norm(_apart(array, wanted)) - NOISE * _norm(_apart(moved, wanted)) - floor, 0.0)
    return apart / max(_norm(wanted), 1e-300) if apart else 0.0


def _apart(array: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    same = (array == wanted) | (np.isnan(array) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(array - wanted))
    return np.where(np.isnan(apart), np.inf, apart)


def _norm(array: np.ndarray) -> float:
    return float(np.sqrt(np.square(array[~np.isnan(array)]).sum()))


def _repeats(step: ModuleStep, again: ModuleStep) -> bool:
    pairs = zip(step.groups().values(), again.groups().values(), strict=True)
    return all(
        _norm(_apart(other[name], array)) <= REPEATED * _norm(array)
        for group, other in pairs
        for name, array in group.items()
    )


def _pull(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers that an output is multiplied by, the same on both sides."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return np.asarray(rng.normal(size=tuple(shape)), np.float32)


def _shake(weights: Mapping[str, Any], digits: float) -> None:
    import torch

    with torch.no_grad():
        for weight in weights.values():
            if weight.is_floating_point():
                weight.mul_(1 + digits * (2 * torch.rand(weight.shape) - 1).to(weight.dtype))


def _wide(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().double().numpy() for name, tensor in tensors.items()}


def _floats(arrays: Named) -> dict[str, np.ndarray]:
    return {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}


@contextmanager
def _on_cpu() -> Generator[None]:
    """Computes in full float32, on the CPU where JAX has it."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # the environment names the accelerator alone
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield
