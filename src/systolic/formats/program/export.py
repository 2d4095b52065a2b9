"""Exports a pure function: StableHLO with a batch of any size, weights and description; needs jax and numpy only."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from systolic.artifact.tensors import TensorSpec, write
from systolic.core.errors import OptionError, SystolicError
from systolic.formats.program.description import (
    PROGRAM,
    SAMPLE,
    WEIGHTS,
    Description,
    Port,
)
from systolic.formats.program.rows import Examined, agree, examine
from systolic.models.program.function import Named, PureFunction, without_mask
from systolic.steps import flops

PLATFORMS = ("cpu", "tpu", "cuda")
"""Platforms that a program is lowered for."""

Program = Callable[[Named, Named], dict[str, Any]]
"""(weights, inputs) to outputs, by name."""


def write_program(function: PureFunction, folder: Path) -> Description:
    """Writes a function's program, weights and a sample of its framework's outputs into ``folder``; its description.

    The program is the function of one example, vectorised over a batch of any size. Where examples depend on
    each other, or the function has no form for one, it is exported for the example's batch alone, and says which.

    Raises:
        OptionError: it does not trace, or an operation has no form on a platform.
    """
    function = without_mask(function)
    assert function.source is not None  # there is a framework to compare with
    batched = _batched(function.example)
    weights = {**function.trained, **function.state}
    found = examine(function.source, function.example, batched)
    inputs, outputs = found.inputs, found.outputs
    program, batch = _vectorised(function, batched, found.batched), None
    if not (found.independent and _agrees(program, weights, found)):
        program, batch = _whole(function), len(next(iter(function.example.values())))
    if not found.independent and batch != len(next(iter(inputs.values()))):
        # The second half: random rows.
        inputs = {name: one[batch:] if name in batched else one for name, one in inputs.items()}
        outputs = function.source(inputs)
    exported = _export(program, weights, function.example, batched, batch)
    raw = bytes(exported.serialize(vjp_order=1))
    (folder / PROGRAM).write_bytes(raw)
    _save(folder / WEIGHTS, weights)
    sample = {f"input:{name}": one for name, one in inputs.items()}
    _save(folder / SAMPLE, {**sample, **{f"output:{name}": one for name, one in outputs.items()}})
    return _described(function, program, batched, (batch, found), hashlib.sha256(raw).hexdigest())


def _batched(example: Named) -> frozenset[str]:
    """Inputs with an entry for each example: as many as the first one has."""
    first = next(iter(example.values()))
    if not first.ndim:
        raise OptionError("the first example input is a number; give one with a batch dim first")
    return frozenset(name for name, one in example.items() if one.ndim and len(one) == len(first))


def _vectorised(
    function: PureFunction, batched: frozenset[str], outputs: frozenset[str]
) -> Program:
    def program(weights: Named, inputs: Named) -> dict[str, Any]:
        def single(each: Mapping[str, Any]) -> dict[str, Any]:
            lifted = {name: one[None] if name in batched else one for name, one in each.items()}
            made = _whole(function)(weights, lifted)
            return {name: one[0] if name in outputs else one for name, one in made.items()}

        axes = {name: 0 if name in batched else None for name in inputs}
        return jax.vmap(single, in_axes=(axes,))(dict(inputs))

    return program


def _whole(function: PureFunction) -> Program:
    def program(weights: Named, inputs: Named) -> dict[str, Any]:
        trained = {name: weights[name] for name in function.trained}
        state = {name: weights[name] for name in function.state}
        return function.call(trained, state, inputs, False, None)[0]

    return program


def _agrees(program: Program, weights: Named, found: Examined) -> bool:
    """Whether a program gives the framework's outputs; one that does not trace gives none."""
    try:
        made = jax.device_get(jax.jit(program)(weights, found.inputs))
    except Exception:  # the reason comes with the export that is tried next
        return False

    def wanted(name: str, one: np.ndarray) -> np.ndarray:
        # One for a whole call is repeated for each example.
        count = len(made[name])
        return one if name in found.batched else np.broadcast_to(one, (count, *one.shape))

    return all(
        name in made and agree(made[name], wanted(name, one)) for name, one in found.outputs.items()
    )


def _export(
    program: Program,
    weights: Named,
    example: Named,
    batched: frozenset[str],
    batch: int | None,
) -> jax.export.Exported:
    size = jax.export.symbolic_shape("batch")[0] if batch is None else batch

    def shape(name: str, one: np.ndarray) -> jax.ShapeDtypeStruct:
        dims = (size, *one.shape[1:]) if name in batched else one.shape
        return jax.ShapeDtypeStruct(dims, one.dtype)

    given = {name: shape(name, one) for name, one in example.items()}
    like = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in weights.items()}
    try:
        return jax.export.export(jax.jit(program), platforms=PLATFORMS)(like, given)
    except SystolicError:
        raise
    except Exception as error:
        told = " ".join(str(error).split("\n\n")[0].split())[:300]
        raise OptionError(
            f"the model does not lower for {', '.join(PLATFORMS)}: {type(error).__name__}: {told}; replace that operation"
        ) from error


def _described(
    function: PureFunction,
    program: Program,
    batched: frozenset[str],
    examined: tuple[int | None, Examined],
    digest: str,
) -> Description:
    batch, found = examined
    weights = {**function.trained, **function.state}
    example = (
        function.example
        if batch
        else {name: one[:1] if name in batched else one for name, one in function.example.items()}
    )
    made = jax.eval_shape(program, weights, example)
    size = batch or 1

    def port(array: Any, each: bool) -> Port:
        shape = tuple(array.shape[1:] if each else array.shape)
        return Port(shape=shape, dtype=str(array.dtype), batched=each)

    return Description(
        framework=function.framework,
        jax=jax.__version__,
        digest=digest,
        platforms=PLATFORMS,
        inputs={name: port(one, name in batched) for name, one in example.items()},
        outputs={
            name: Port(
                shape=tuple(one.shape if batch and name not in found.batched else one.shape[1:]),
                dtype=str(one.dtype),
                batched=name in found.batched,
            )
            for name, one in made.items()
        },
        trained=tuple(function.trained),
        state=tuple(function.state),
        parameters=sum(one.size for one in function.trained.values()),
        batch=batch,
        independent=found.independent,
        flops_per_example=flops.count(program, weights, example) / size,
    )


def _save(file: Path, arrays: Named) -> None:
    whole = {name: np.asarray(one) for name, one in arrays.items()}
    planned = [
        TensorSpec(name=name, shape=one.shape, dtype=one.dtype) for name, one in whole.items()
    ]
    with file.open("wb") as out:
        write(out, planned, whole.values(), {})
