"""Weights of training or of files as those of serving, part by part; on a CPU, quantized matrices as floats; memory of devices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core

from systolic.chips.host import free_bytes
from systolic.compiling.program_store import ProgramSpec, ProgramStore, made_ready
from systolic.core.errors import RunError
from systolic.core.units import gibibytes, si
from systolic.inference.model import PreparedModel
from systolic.job import Job, Quantization, WeightFormat
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.job.serving_memory import ServingMemory
from systolic.models.decoder.config import Decoder
from systolic.models.quantized.codes import Quantized, stored_bytes
from systolic.steps.paged import PagedSteps, ServingWeights

if TYPE_CHECKING:
    from systolic.runs.weights import Weights
    from systolic.serving.text.runner import Programs
    from systolic.setup import Setup


Part = tuple[list[str], list[int]]
"""Paths of arrays, and which arrays of serving are made of them."""
MULTIPLIED = WeightFormat.int8, WeightFormat.w8a8
"""Formats whose codes are multiplied as they are, see :func:`systolic.models.linear.codes_product`."""


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
    places = jax.tree.leaves(paged.shardings)
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
    return paged.weights_of(weights)


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
    """All weights of serving before any are joined, of which those of arrays that are not given are not used."""
    whole = {
        path: part[path] if path in part else jax.numpy.zeros(array.shape, array.dtype)
        for path, array in like.items()
    }
    network = paged.steps.network
    params = {path: array for path, array in whole.items() if path in network.params}
    return paged.separate_weights(params, {p: a for p, a in whole.items() if p not in params})


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


def restored_on_cpu(
    model: PreparedModel, again: Callable[[Job], "Setup"], warn: Callable[[str], None]
) -> PreparedModel:
    """The model as a server on a CPU holds it: with floats in place of the codes that it has no product for, where there is memory for them; else as it is.

    Args:
        model: As its files have it.
        again: Sets a job up on the same devices.
        warn: Called with what was done, or why it was not: one line.
    """
    job, machine = model.setup.job, model.setup.machine
    slow = {p: how for p, how in job.quantization.matrices if not _multiplied(job, p, how.format)}
    if machine.platform != "cpu" or not slow or not isinstance(job.model, Decoder):
        return model
    kept = {p: how for p, how in job.quantization.matrices if p not in slow}
    setup = again(replace(job, quantization=Quantization.of(kept)))
    before, after = (_bytes(prepared) for prepared in (model.setup, setup))
    formats = " and ".join(sorted({how.format.value for how in slow.values()}))
    room = capacity_bytes(machine.devices) * len(machine.devices)
    what = f"{len(slow)} matrices in {formats}, whose codes this CPU has no product for"
    if 2 * after > room:
        warn(
            f"{what}, are restored in each step: as floats they need {si(after, 'B')} in place of {si(before, 'B')}, and {si(room, 'B')} are free; quantize to int8 for a CPU"
        )
        return model
    warn(
        f"{what}, are held as {setup.steps.target.dtype}: {si(after, 'B')} of weights in memory in place of {si(before, 'B')}; quantize to int8 for a CPU"
    )
    return PreparedModel(setup=setup, read=lambda: _restored(model.read(), list(slow), setup))


def _multiplied(job: Job, path: str, kind: WeightFormat) -> bool:
    """Whether a product takes the codes of a matrix as they are; those of experts are multiplied as floats."""
    experts = isinstance(job.model, Decoder) and job.model.experts > 1 and "/mlp/" in path
    return kind in MULTIPLIED and not (experts and path.startswith("blocks/"))


def _restored(weights: "Weights", paths: list[str], setup: "Setup") -> "Weights":

    params, state = with_floats(
        weights.params, weights.model_state, paths, setup.steps.target.dtype
    )
    return replace(weights, params=params, model_state=state)


def _bytes(setup: "Setup") -> int:
    from systolic.runs.weights import sizes_of

    network = setup.steps.network
    return sum(sizes_of({**network.params, **network.model_state}).bytes_by_dtype.values())


def capacity_bytes(devices: Iterable[Any]) -> int:
    """Bytes that programs may use of each device beside what lies there already, such as another model.

    On a CPU a device's share of what the machine has free, and of its container's limit.

    Args:
        devices: Local ones.
    """
    free = []
    for device in devices:
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit"):
            free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if free:
        return int(min(free))
    return free_bytes() // len(jax.local_devices())


def held_bytes(arrays: Any) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(
        stored_bytes(array.sharding.shard_shape(array.shape), array.dtype)
        for array in jax.tree.leaves(arrays)
    )


def memory_of(programs: "Programs", pages: int | None = None) -> ServingMemory:
    """Memory of an engine, whose capacity is measured once: what it allocates is no smaller capacity.

    Args:
        programs: With the largest compiled.
        pages: Of the cache; None takes all that fit.
    """
    paged = programs.paged
    if programs.capacity_bytes is None:
        mesh: Any = paged.steps.target.mesh
        programs.capacity_bytes = capacity_bytes(list(mesh.devices.flat))
    return ServingMemory(
        capacity_bytes=programs.capacity_bytes,
        weights_bytes=held_bytes(paged.placed_weights),
        adapters_bytes=held_bytes(paged.placed_adapters),
        temporary_bytes=programs.temporary_bytes(),
        page_bytes=held_bytes(paged.placed_pages(1)),
        page_size=paged.page_size,
        pages=pages,
    )


def pages_that_fit(programs: "Programs", wanted: int, least: int) -> int:
    """Pages for an engine: as many as it wants, or as there is room for.

    Compiles the largest programs, whose need beside the pages does not depend on their number.

    Args:
        programs: Not compiled yet.
        wanted: Pages that hold all texts at their longest.
        least: Pages of the longest text, and one for padding.

    Raises:
        RunError: not even the least fit.
    """
    programs.compile_largest()
    memory = memory_of(programs)
    if memory.num_pages < least:
        raise RunError(
            f"the longest text needs {least} pages of {gibibytes(memory.page_bytes)} beside {gibibytes(memory.weights_bytes)} of weights and {gibibytes(memory.temporary_bytes)} of temporaries, and the device has {gibibytes(memory.capacity_bytes)}; give a smaller context or fewer rows, or more devices"
        )
    return min(wanted, memory.num_pages)
