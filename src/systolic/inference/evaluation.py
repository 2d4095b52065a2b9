"""Evaluation of a model: the task's metrics over a split of its data, or over other data."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, OptionError, nearest
from systolic.job import Job, Split

if TYPE_CHECKING:
    from systolic.steps.step_functions import StepFunctions


class HaltedError(Exception):
    """Evaluation ended early by its ``halt``."""


def never(done: int) -> bool:
    """Never halts; the default."""
    del done
    return False


def num_batches(job: Job, steps: "StepFunctions", split: Split, examples: int = 0) -> int | None:
    """Batches of an evaluation that reads at most so many ``examples`` (0: all); ``None`` where that is unknown before reading."""
    from systolic.steps.programs import evaluation_rows

    rows, size = evaluation_rows(job, steps), job.data.size(split)
    needed = -(-examples // rows)
    if size is None:
        return needed or None
    whole = -(-size // rows)
    return min(whole, needed) if needed else whole


def reads_all(job: Job, split: Split, examples: int) -> bool:
    """Whether ``examples`` (0: all) are known to be the whole split."""
    size = job.data.size(split)
    return not examples or (size is not None and size <= examples)


def evaluate(
    job: Job,
    steps: "StepFunctions",
    program: Any,
    params: Any,
    model_state: Any,
    split: Split,
    examples: int = 0,
    halt: Callable[[int], bool] = never,
) -> dict[str, float]:
    """Means over a split, weighted exactly (by token or example), name to value.

    Args:
        job: The trained job.
        steps: Its programs.
        program: ``steps.evaluate``, jitted or compiled.
        params: Weights.
        model_state: Other variables.
        split: Part of the data to evaluate.
        examples: Number of examples to read, from the first; 0 reads all.
        halt: Called before each batch with the number of batches done; ends the evaluation on True.

    Raises:
        DataError: the split is empty.
        HaltedError: ``halt`` returned True.
    """
    import jax

    from systolic.steps.programs import evaluation

    feed = evaluation(job, steps, split, examples)
    total: Any = None
    try:
        for done, batch in enumerate(feed):
            # Waits for the batch before last: the devices keep work for one batch, and an evaluation
            # that is halted ends after that one.
            if halt(max(done - 1, 0)):
                raise HaltedError
            sums = program(params, model_state, batch)
            jax.block_until_ready(total)
            total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    finally:
        feed.close()
    if total is None:
        raise DataError(
            f"the {split.value} split of {job.name} is empty; give the recipe data for it"
        )
    return {
        name: float(mean.total) / max(float(mean.weight), 1e-9)
        for name, mean in jax.device_get(total).items()
    }


def split_of(name: Any) -> Split:
    """The split of a name, which a caller in Python may give as anything.

    Raises:
        OptionError: there is no such split.
    """
    names = [split.value for split in Split]
    if name not in names:
        raise OptionError(
            f"{name!r} is no split{nearest(str(name), names)}; give {' or '.join(names)}"
        )
    return Split(name)


def check_data(split: Split | None, path: Path | str | None) -> None:
    """Refuses a split of a run's own data beside other data.

    Raises:
        OptionError: both are given.
    """
    if path is not None and split is not None:
        raise OptionError(
            f"--split {split.value} is a part of the run's own data and --path is other data; give one of them"
        )


def splits(job: Job, chosen: Split | None) -> list[Split]:
    """The splits to evaluate: the one asked for, else all that are held out and not empty.

    Raises:
        OptionError: there is none, or the one asked for is empty.
    """
    held_out = [split for split in (Split.validation, Split.test) if job.data.size(split) != 0]
    if not held_out and job.data.size(Split.train) == 0:
        raise OptionError(f"{job.name} has no data of its own; give the data with --path")
    if chosen is None and not held_out:
        raise OptionError(
            f"{job.name} has no held-out data; choose --split train, or give the recipe data for validation"
        )
    if chosen is not None and job.data.size(chosen) == 0:
        others = " or ".join(
            split.value for split in (*held_out, Split.train) if split is not chosen
        )
        raise OptionError(f"{job.name} has no {chosen.value} data; choose --split {others}")
    return held_out if chosen is None else [chosen]
