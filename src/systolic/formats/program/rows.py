"""Whether the examples of a framework's batch depend on each other, found by computing batches of several sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from systolic.core.errors import OptionError, SystolicError
from systolic.formats.program.description import TOLERANCE
from systolic.models.program.function import Named

Run = Callable[[Named], dict[str, np.ndarray]]
"""Outputs by name for inputs by name, as a framework computes them."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A batch with the framework's outputs, and what these say of its examples."""

    inputs: Named
    outputs: Named
    batched: frozenset[str]
    """Outputs with an entry for each example first; the others are one for a whole call."""
    independent: bool
    """Whether an example's outputs are the same whatever the others are and however many."""


def relative_error(made: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest magnitude of ``wanted``; infinite where only one is NaN or infinite."""
    there, here = (np.asarray(one).astype(np.float64) for one in (wanted, made))
    if not there.size:
        return 0.0
    same = (there == here) | (np.isnan(there) & np.isnan(here))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(here - there))
    if not np.isfinite(apart).all():
        return float("inf")
    finite = np.abs(there[np.isfinite(there)])
    return float(apart.max() / max(finite.max(initial=0.0), 1e-30))


def agree(made: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether arrays have one shape and differ by no more than the tolerance."""
    return made.shape == wanted.shape and relative_error(made, wanted) <= TOLERANCE


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
            name: np.concatenate([one, drawn[name]]) if name in batched else one
            for name, one in example.items()
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
        some = {name: one[start:stop] if name in batched else one for name, one in inputs.items()}
        made = _outputs(run, some)
        if made is None:
            continue
        if rows is None:
            rows = {name for name, one in made.items() if one.shape != outputs[name].shape}
            for name in rows:
                _check_first(name, outputs[name].shape, total, made[name].shape, stop - start)
        for name, one in made.items():
            whole = outputs[name][start:stop] if name in rows else outputs[name]
            independent &= agree(one, whole)
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
        if (made := _outputs(run, drawn)) is not None:
            inputs, outputs, draw = drawn, made, more
            break
    rows = frozenset(name for name, one in outputs.items() if one.ndim and len(one) == count)
    independent = True
    for kept in sorted({0, count - 1}) if count > 1 else ():
        other = _batch(example, batched, count, draw, 1)
        for name in batched:
            other[name][kept] = inputs[name][kept]
        made = _outputs(run, other)
        if made is None:
            independent = False
            continue
        for name, one in made.items():
            here = outputs[name]
            if agree(one, here) or (name in rows and agree(one[kept], here[kept])):
                continue
            _check_elsewhere(name, one, here, count, kept)
            independent = False
    return Examined(inputs=inputs, outputs=outputs, batched=rows, independent=independent)


def _check_first(
    name: str, many: tuple[int, ...], total: int, few: tuple[int, ...], count: int
) -> None:
    """Refuses an output whose shape follows the batch in another dim than the first."""
    if not (many and few and many[0] == total and few[0] == count):
        raise _misplaced(name, f"{list(many)} for {total} examples and {list(few)} for {count}")


def _check_elsewhere(name: str, made: np.ndarray, here: np.ndarray, count: int, kept: int) -> None:
    """Refuses an output of which an example has its own part in another dim, or several rows."""
    parts = []
    if here.ndim > 1 and here.shape[1] == count:
        parts.append((made[:, kept], here[:, kept]))
    if here.ndim and len(here) > count and len(here) % count == 0:
        parts.append(tuple(one.reshape(count, -1)[kept] for one in (made, here)))
    if any(agree(*pair) for pair in parts):
        raise _misplaced(name, f"{list(here.shape)} for {count} examples")


def _misplaced(name: str, what: str) -> OptionError:
    return OptionError(
        f"output {name} is {what}, and the first dim must be that of the examples; transpose or reshape it in the model"
    )


def _batch(
    example: Named, batched: frozenset[str], count: int, more: Any, turn: int
) -> dict[str, np.ndarray]:
    return {
        name: more(one, count, 2 * place + turn) if name in batched else one
        for place, (name, one) in enumerate(example.items())
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
    start, stop = (one.reshape(count, *(1,) * (array.ndim - 1)) for one in ends)
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
