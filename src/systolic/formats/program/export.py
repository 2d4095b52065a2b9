"""Export of a pure function: StableHLO with a batch of any size, weights and description; needs jax and numpy only."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from systolic.core.errors import OptionError, SystolicError
from systolic.formats.program.description import (
    PROGRAM,
    SAMPLE,
    TOLERANCE,
    WEIGHTS,
    Description,
    Port,
)
from systolic.models.program.function import Named, PureFunction, without_mask
from systolic.runs.bundle.tensors import TensorSpec, write
from systolic.steps import jaxpr

Run = Callable[[Named], dict[str, np.ndarray]]
"""Outputs by name for inputs by name, as a framework computes them."""
PLATFORMS = ("cpu", "tpu", "cuda")
"""Platforms that a program is lowered for."""
Program = Callable[[Named, Named], dict[str, Any]]
"""(weights, inputs) to outputs, by name."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A batch with the framework's outputs, and what these say of its examples."""

    inputs: Named
    outputs: Named
    batched: frozenset[str]
    """Outputs with an entry for each example first; the others are one for a whole call."""
    independent: bool
    """Whether an example's outputs are the same whatever the others are and however many."""


def relative_error(answer: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest magnitude of ``wanted``; infinite where only one is NaN or infinite."""
    there, here = (np.asarray(array).astype(np.float64) for array in (wanted, answer))
    if not there.size:
        return 0.0
    same = (there == here) | (np.isnan(there) & np.isnan(here))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(here - there))
    if not np.isfinite(apart).all():
        return float("inf")
    finite = np.abs(there[np.isfinite(there)])
    return float(apart.max() / max(finite.max(initial=0.0), 1e-30))


def agree(answer: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether arrays have one shape and differ by no more than the tolerance."""
    return answer.shape == wanted.shape and relative_error(answer, wanted) <= TOLERANCE


def examine(run: Run, example: Named, batched: frozenset[str]) -> Examined:
    """Runs a framework on the example's rows and on random ones, in batches of several sizes.

    Args:
        run: The framework.
        example: Inputs by name.
        batched: Inputs with an entry for each example.

    Raises:
        OptionError: an output has its examples in another dim than the first.
        SystolicError: the framework can't compute the example.
    """
    count = len(example[next(name for name in example if name in batched)])
    for more in (_drawn, _rolled):
        drawn = _batch(example, batched, count, more, 0)
        inputs = {
            name: np.concatenate([array, drawn[name]]) if name in batched else array
            for name, array in example.items()
        }
        if (outputs := _outputs(run, inputs)) is not None:
            return _of_any_size(run, inputs, outputs, batched, count)
    return _of_one_size(run, example, batched, count)


def _of_any_size(
    run: Run, inputs: Named, outputs: Named, batched: frozenset[str], count: int
) -> Examined:
    """Compares twice the example's rows with parts of them: all but one at either end, and the halves."""
    total, independent = 2 * count, True
    rows: set[str] | None = None
    for start, stop in sorted({(0, total - 1), (1, total), (0, count), (count, total)}):
        some = {
            name: input_[start:stop] if name in batched else input_
            for name, input_ in inputs.items()
        }
        answers = _outputs(run, some)
        if answers is None:
            continue
        if rows is None:
            rows = {name for name, answer in answers.items() if answer.shape != outputs[name].shape}
            for name in rows:
                _check_first(name, outputs[name].shape, total, answers[name].shape, stop - start)
        for name, answer in answers.items():
            whole = outputs[name][start:stop] if name in rows else outputs[name]
            independent &= agree(answer, whole)
    return Examined(
        inputs=inputs,
        outputs=outputs,
        batched=frozenset(rows or ()),  # the halves have the example's size
        independent=independent,
    )


def _of_one_size(run: Run, example: Named, batched: frozenset[str], count: int) -> Examined:
    """Changes all examples but one: that one's outputs stay where examples are independent."""
    inputs, outputs, draw = dict(example), run(example), _rolled
    for more in (_drawn, _rolled):
        drawn = _batch(example, batched, count, more, 0)
        if (answers := _outputs(run, drawn)) is not None:
            inputs, outputs, draw = drawn, answers, more
            break
    rows = frozenset(
        name for name, output in outputs.items() if output.ndim and len(output) == count
    )
    independent = True
    for kept in sorted({0, count - 1}) if count > 1 else ():
        other = _batch(example, batched, count, draw, 1)
        for name in batched:
            other[name][kept] = inputs[name][kept]
        answers = _outputs(run, other)
        if answers is None:
            independent = False
            continue
        for name, answer in answers.items():
            here = outputs[name]
            if agree(answer, here) or (name in rows and agree(answer[kept], here[kept])):
                continue
            # Refuses an output of which an example has its own part in another dim, or several rows.
            parts = []
            if here.ndim > 1 and here.shape[1] == count:
                parts.append((answer[:, kept], here[:, kept]))
            if here.ndim and len(here) > count and len(here) % count == 0:
                parts.append(tuple(array.reshape(count, -1)[kept] for array in (answer, here)))
            if any(agree(*pair) for pair in parts):
                raise _misplaced(name, f"{list(here.shape)} for {count} examples")
            independent = False
    return Examined(inputs=inputs, outputs=outputs, batched=rows, independent=independent)


def _check_first(
    name: str, many: tuple[int, ...], total: int, few: tuple[int, ...], count: int
) -> None:
    """Refuses an output whose shape follows the batch in another dim than the first."""
    if not (many and few and many[0] == total and few[0] == count):
        raise _misplaced(name, f"{list(many)} for {total} examples and {list(few)} for {count}")


def _misplaced(name: str, what: str) -> OptionError:
    return OptionError(
        f"output {name} is {what}, and the first dim must be that of the examples; transpose or reshape it in the model"
    )


def _batch(
    example: Named, batched: frozenset[str], count: int, more: Any, turn: int
) -> dict[str, np.ndarray]:
    return {
        name: more(array, count, 2 * place + turn) if name in batched else array
        for place, (name, array) in enumerate(example.items())
    }


def _drawn(array: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Random rows within the values of the example: each has its own range, so that no statistic of all rows is that of one."""
    rng = np.random.default_rng(seed)
    if array.dtype.kind not in "iuf" and not np.issubdtype(array.dtype, np.floating):
        return array[rng.integers(0, count, count)]
    if array.dtype.kind in "iu":
        return rng.choice(array.ravel(), array.shape) if array.size else array.copy()
    finite = array[np.isfinite(array)].astype(np.float64)
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    if low == high:
        low, high = low - 1, high + 1
    ends = np.sort(rng.uniform(low, high, (2, count)), axis=0)
    start, stop = (end.reshape(count, *(1,) * (array.ndim - 1)) for end in ends)
    return (start + (stop - start) * rng.random(array.shape)).astype(array.dtype)


def _rolled(array: np.ndarray, count: int, seed: int) -> np.ndarray:
    """The example's rows shifted along their last dim, where a model takes no random values."""
    del count
    return np.roll(array, 1 + seed % 2, axis=-1) if array.ndim > 1 else array.copy()


def _outputs(run: Run, inputs: Named) -> dict[str, np.ndarray] | None:
    """The framework's outputs, None where it can't compute these inputs."""
    try:
        return run(inputs)
    except SystolicError:
        raise
    except Exception:  # a model of a fixed batch, or one that these values are no inputs of
        return None


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
    examined = examine(function.source, function.example, batched)
    inputs, outputs = examined.inputs, examined.outputs
    program, batch = _vectorised(function, batched, examined.batched), None
    if not (examined.independent and _agrees(program, weights, examined)):
        program, batch = _whole(function), len(next(iter(function.example.values())))
    if not examined.independent and batch != len(next(iter(inputs.values()))):
        # The second half: random rows.
        inputs = {
            name: input_[batch:] if name in batched else input_ for name, input_ in inputs.items()
        }
        outputs = function.source(inputs)
    exported = _export(program, weights, function.example, batched, batch)
    raw = bytes(exported.serialize(vjp_order=1))
    (folder / PROGRAM).write_bytes(raw)
    _save(folder / WEIGHTS, weights)
    sample = {f"input:{name}": input_ for name, input_ in inputs.items()}
    _save(
        folder / SAMPLE,
        {**sample, **{f"output:{name}": output for name, output in outputs.items()}},
    )
    return _described(
        function, program, batched, (batch, examined), hashlib.sha256(raw).hexdigest()
    )


def _batched(example: Named) -> frozenset[str]:
    """Inputs with an entry for each example: as many as the first one has."""
    first = next(iter(example.values()))
    if not first.ndim:
        raise OptionError("the first example input is a number; give one with a batch dim first")
    return frozenset(
        name for name, array in example.items() if array.ndim and len(array) == len(first)
    )


def _vectorised(
    function: PureFunction, batched: frozenset[str], outputs: frozenset[str]
) -> Program:
    def program(weights: Named, inputs: Named) -> dict[str, Any]:
        def single(each: Mapping[str, Any]) -> dict[str, Any]:
            lifted = {
                name: array[None] if name in batched else array for name, array in each.items()
            }
            result = _whole(function)(weights, lifted)
            return {name: array[0] if name in outputs else array for name, array in result.items()}

        axes = {name: 0 if name in batched else None for name in inputs}
        return jax.vmap(single, in_axes=(axes,))(dict(inputs))

    return program


def _whole(function: PureFunction) -> Program:
    def program(weights: Named, inputs: Named) -> dict[str, Any]:
        trained = {name: weights[name] for name in function.trained}
        state = {name: weights[name] for name in function.state}
        return function.call(trained, state, inputs, False, None)[0]

    return program


def _agrees(program: Program, weights: Named, examined: Examined) -> bool:
    """Whether a program gives the framework's outputs; one that does not trace gives none."""
    try:
        outputs = jax.device_get(jax.jit(program)(weights, examined.inputs))
    except Exception:  # the reason comes with the export that is tried next
        return False

    def wanted(name: str, array: np.ndarray) -> np.ndarray:
        # One for a whole call is repeated for each example.
        count = len(outputs[name])
        return array if name in examined.batched else np.broadcast_to(array, (count, *array.shape))

    return all(
        name in outputs and agree(outputs[name], wanted(name, output))
        for name, output in examined.outputs.items()
    )


def _export(
    program: Program,
    weights: Named,
    example: Named,
    batched: frozenset[str],
    batch: int | None,
) -> jax.export.Exported:
    size = jax.export.symbolic_shape("batch")[0] if batch is None else batch

    def shape(name: str, array: np.ndarray) -> jax.ShapeDtypeStruct:
        dims = (size, *array.shape[1:]) if name in batched else array.shape
        return jax.ShapeDtypeStruct(dims, array.dtype)

    inputs = {name: shape(name, array) for name, array in example.items()}
    like = {
        name: jax.ShapeDtypeStruct(weight.shape, weight.dtype) for name, weight in weights.items()
    }
    try:
        return jax.export.export(jax.jit(program), platforms=PLATFORMS)(like, inputs)
    except SystolicError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[0].split())[:300]
        raise OptionError(
            f"the model does not lower for {', '.join(PLATFORMS)}: {type(error).__name__}: {reason}; replace that operation"
        ) from error


def _described(
    function: PureFunction,
    program: Program,
    batched: frozenset[str],
    examined: tuple[int | None, Examined],
    digest: str,
) -> Description:
    batch, examination = examined
    weights = {**function.trained, **function.state}
    example = (
        function.example
        if batch
        else {
            name: input_[:1] if name in batched else input_
            for name, input_ in function.example.items()
        }
    )
    outputs = jax.eval_shape(program, weights, example)
    size = batch or 1

    def port(array: Any, each: bool) -> Port:
        shape = tuple(array.shape[1:] if each else array.shape)
        return Port(shape=shape, dtype=str(array.dtype), batched=each)

    return Description(
        framework=function.framework,
        jax=jax.__version__,
        digest=digest,
        platforms=PLATFORMS,
        inputs={name: port(input_, name in batched) for name, input_ in example.items()},
        outputs={
            name: Port(
                shape=tuple(
                    output.shape if batch and name not in examination.batched else output.shape[1:]
                ),
                dtype=str(output.dtype),
                batched=name in examination.batched,
            )
            for name, output in outputs.items()
        },
        trained=tuple(function.trained),
        state=tuple(function.state),
        parameters=sum(weight.size for weight in function.trained.values()),
        batch=batch,
        independent=examination.independent,
        flops_per_example=jaxpr.count(program, weights, example) / size,
    )


def _save(file: Path, arrays: Named) -> None:
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    planned = [
        TensorSpec(name=name, shape=array.shape, dtype=array.dtype) for name, array in whole.items()
    ]
    with file.open("wb") as out:
        write(out, planned, whole.values(), {})
