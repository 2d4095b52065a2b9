"""Weights of training or of files as those of serving, part by part: what was converted is freed at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core

from systolic.compiling.program_store import ProgramSpec, ProgramStore, made_ready
from systolic.job.quantization import CODES, INPUTS, SCALES
from systolic.models.quantized.codes import Quantized
from systolic.steps.paged import PagedSteps, ServingWeights

Part = tuple[list[str], list[int]]
"""Paths of arrays, and which arrays of serving are made of them."""


def serving_weights(
    paged: PagedSteps,
    arrays: dict[str, Any],
    store: ProgramStore | None = None,
) -> ServingWeights:
    """Weights as :meth:`systolic.steps.paged.PagedSteps.weights` makes them, on the mesh.

    Args:
        paged: The programs.
        arrays: Parameters and other variables by path; emptied, so that only a part lies in memory twice.
        store: Where the programs of the conversion are kept.
    """
    like: dict[str, Any] = {path: _abstract(array) for path, array in arrays.items()}
    places, structure = jax.tree.flatten(paged.shardings)
    weights: list[Any] = [None] * len(places)
    for inputs, outputs in parts_of(paged, like, store):

        def convert(part: Mapping[str, Any], own: list[int] = outputs) -> list[Any]:
            leaves = jax.tree.leaves(_converted(paged, like, part))
            return [leaves[index] for index in own]

        part = {path: arrays.pop(path) for path in inputs}
        jitted = jax.jit(convert, out_shardings=[places[index] for index in outputs])
        spec = ProgramSpec(
            name=f"weights of {', '.join(inputs)}",
            sizes={"arrays": outputs},
            arguments=({path: like[path] for path in inputs},),
            outputs=[0] * len(outputs),
        )
        program = made_ready(store, spec, lambda of=jitted, on=spec.arguments: of.lower(*on))
        for index, array in zip(outputs, program.compiled(part), strict=True):
            weights[index] = array.block_until_ready()
        del part
    return jax.tree.unflatten(structure, weights)


def parts_of(
    paged: PagedSteps, like: Mapping[str, Any], store: ProgramStore | None = None
) -> list[Part]:
    """The least parts that can be converted by themselves."""
    if store is None:
        return _traced(paged, like)
    spec = ProgramSpec(name="parts of the weights", arguments=(dict(like),))
    return store.facts(spec, lambda: _traced(paged, like))


def _traced(paged: PagedSteps, like: Mapping[str, Any]) -> list[Part]:
    names = sorted(like)
    closed = jax.make_jaxpr(
        lambda leaves: jax.tree.leaves(
            _converted(paged, like, dict(zip(names, leaves, strict=True)))
        )
    )([like[name] for name in names])
    needs: dict[Any, frozenset[str]] = {
        variable: frozenset([name])
        for name, variable in zip(names, closed.jaxpr.invars, strict=True)
    }
    for equation in closed.jaxpr.eqns:
        known = [
            needs.get(operand, frozenset())
            for operand in equation.invars
            if not isinstance(operand, jax.extend.core.Literal)
        ]
        needs.update(dict.fromkeys(equation.outvars, frozenset().union(*known)))
    parts: list[tuple[set[str], list[int]]] = []
    for index, variable in enumerate(closed.jaxpr.outvars):
        own = set() if isinstance(variable, jax.extend.core.Literal) else set(needs[variable])
        shared = [part for part in parts if part[0] & own]
        parts = [part for part in parts if part not in shared]
        merged = sorted([index, *(output for part in shared for output in part[1])])
        parts.append((own.union(*(part[0] for part in shared)), merged))
    return [(sorted(inputs), outputs) for inputs, outputs in parts]


def _converted(paged: PagedSteps, like: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
    """All weights of serving, of which those of arrays that are not given are not used."""
    whole = {
        path: part[path] if path in part else jax.numpy.zeros(array.shape, array.dtype)
        for path, array in like.items()
    }
    network = paged.steps.network
    params = {path: array for path, array in whole.items() if path in network.params}
    return paged.weights(params, {p: a for p, a in whole.items() if p not in params})


def with_floats(
    params: Mapping[str, Any], model_state: Mapping[str, Any], paths: Sequence[str], dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and other variables with the quantized matrices at some paths as parameters of a dtype."""
    params, state = dict(params), dict(model_state)
    restore = jax.jit(Quantized.restored, static_argnames="dtype")
    for path in paths:
        codes, scales, inputs = (
            state.pop(f"{path}/{name}", None) for name in (CODES, SCALES, INPUTS)
        )
        quantized: Any = Quantized(codes=codes, scales=scales, inputs=inputs)
        params[path] = restore(quantized, dtype=dtype)
    return params, state


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    """Abstract array that a program is traced for; arrays that are on no mesh go wherever it needs them."""
    placed = isinstance(array.sharding, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=array.sharding if placed else None
    )
