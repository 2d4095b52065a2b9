"""Calibration: data that stands for what a model will see, and the second moments or largest magnitudes of its matrices' inputs."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, called
from systolic.core.files import lines_of, nearest_file
from systolic.core.reporter import reporter
from systolic.core.units import si
from systolic.data.audio import Recordings
from systolic.data.fingerprint import of_files, shared
from systolic.data.text.text_data import Sentences, TextData, read_text
from systolic.inference.evaluation import splits
from systolic.inference.model import TrainedModel
from systolic.job import Job, MatrixFormat, Split, Task
from systolic.job.data import MASK
from systolic.job.model import Mean
from systolic.models.quantized.activations import counting, watch
from systolic.steps.step_functions import StepFunctions

if TYPE_CHECKING:
    from systolic.formats.matrices import Matrix

CALIBRATION_BATCHES = 8
"""Batches of a text or of recordings: the second moments of thousands of tokens change little with more."""
MOST_MOMENTS = 16 * 10**9
"""Bytes of moments that are held in memory."""
EXAMPLES = 64
"""Most texts or pictures."""
TOGETHER = 8
"""Texts or pictures of a batch."""
LEAST_TOKENS = 128
"""Tokens of a text: the largest inputs of fewer are no measure of what comes later."""
LEAST_PICTURES = 8


def largest_of(
    model: TrainedModel,
    matrices: "Mapping[str, Matrix]",
    formats: Mapping[str, MatrixFormat],
    data: Path | None,
) -> dict[str, np.ndarray]:
    """The largest magnitude of each input of the matrices whose activations are rounded too.

    Args:
        model: The model.
        matrices: Its matrices.
        formats: Of those that are quantized.
        data: A text, a folder of pictures, a manifest of recordings; ``None`` for a run's own training data.

    Raises:
        OptionError: the data is of another kind.
        DataError: there is too little of it, a file can't be read, or a number is not finite.
    """

    shapes = {
        path: matrices[path].largest_shape
        for path, how in formats.items()
        if how.format.activations
    }
    reporter().stage(f"activations of {len(shapes)} matrices")
    magnitudes = watched(
        model.setup.steps, model.weights, shapes, _batches(model, data), jnp.maximum
    )
    if (
        path := next(
            (p for p, largest in magnitudes.items() if not np.isfinite(largest).all()), None
        )
    ) is None:
        return magnitudes
    raise DataError(
        f"inputs of {path} are not finite numbers on {data or 'the training data'}; check the data and the weights"
    )


def moments_of(
    model: TrainedModel,
    matrices: "Mapping[str, Matrix]",
    formats: Mapping[str, MatrixFormat],
    data: Path,
) -> "dict[str, np.ndarray]":
    """Second moments of the inputs of the matrices that go to 4 bits, over calibration data.

    Raises:
        DataError: there is too little of it, or a file can't be read.
        OptionError: they would take more than :data:`MOST_MOMENTS`, or none of the matrices has inputs that are seen.
    """
    shapes = {
        path: matrices[path].moments_shape
        for path, how in formats.items()
        if how.format.bits == 4 and matrices[path].watched
    }
    if not shapes:
        raise OptionError(
            "--calibrate has no effect: convolutions and experts are fitted to their weights alone; leave it out"
        )
    size = sum(4 * math.prod(shape) for shape in shapes.values())
    if size > MOST_MOMENTS:
        raise OptionError(
            f"--calibrate holds {si(size, 'B')} of moments, and the limit is {si(MOST_MOMENTS, 'B')}; leave it out, or keep the widest matrices with --keep"
        )
    reporter().stage(f"inputs of {len(shapes)} matrices")
    return watched(model.setup.steps, model.weights, shapes, _batches(model, data), jnp.add)


def check_calibration(
    data: Path | None,
    calibration: Path | None,
    formats: Mapping[str, MatrixFormat],
    *,
    is_run: bool,
) -> None:
    """Refuses data that is missing or empty, and calibration that would have no effect.

    Raises:
        OptionError: so.
        NotFoundError: data does not exist.
        DataError: it is empty.
    """
    activations = any(how.format.activations for how in formats.values())
    _check_there("--data", data)
    if calibration is None:
        if activations and not is_run:
            raise OptionError(
                "activations in int8 have scales by what they are; give data that stands for what the model will see with --calibrate"
            )
        return
    _check_there("--calibrate", calibration)
    if not activations and all(how.format.bits != 4 for how in formats.values()):
        raise OptionError(
            "--calibrate has an effect on int4 and nf4, and with --activations; leave it out"
        )


def unreadable(job: Job, split: Split | None = None) -> str | None:
    """Why a part of a run's own data, by default the held-out one, can't be read; ``None`` where its files are there."""
    try:
        job.data.files(splits(job, split)[0])
    except (NotFoundError, DataError) as error:
        return f"data moved: {str(error).partition('; ')[0]}"
    except OptionError as error:
        return str(error).partition("; ")[0]
    return None


def check_run(
    job: Job,
    formats: Mapping[str, MatrixFormat],
    data: Path | None,
    calibration: Path | None,
    budget: float | None,
) -> str | None:
    """Refuses what a run lacks, before its weights are read.

    Returns:
        Why quality can't be measured; ``None`` where it can.

    Raises:
        OptionError: activations or a budget need data that is gone.
        NotFoundError, DataError: as :func:`check_calibration`.
    """
    check_calibration(data, calibration, formats, is_run=True)
    rounded = any(how.format.activations for how in formats.values())
    if rounded and calibration is None and (why := unreadable(job, Split.train)) is not None:
        raise OptionError(
            f"{why}; activations in int8 have scales by training data: give data that stands for what the model will see with --calibrate"
        )
    why = unreadable(job) if data is None else None
    if why is not None and budget is not None:
        raise OptionError(f"{why}; a budget needs data to measure the loss on: give it with --data")
    return why


def _check_there(option: str, path: Path | None) -> None:
    if path is None:
        return
    if not path.exists():
        raise NotFoundError(
            f"{path} does not exist{nearest_file(path)}; check the path of {option}"
        )
    if path.is_file() and not path.stat().st_size:
        raise DataError(
            f"{option} is {path}, which is empty; give data that stands for what the model will see"
        )


def check_apart(job: Job, data: Path | None, calibration: Path | None) -> None:
    """Refuses calibration by data that quality is measured on, wherever a copy of it is.

    Args:
        job: Of the model.
        data: What quality is measured on; ``None`` for the job's own held-out data.
        calibration: What codes are fitted to; ``None`` for nothing, or a run's own training data.

    Raises:
        OptionError: a file is in both.
        DataError: one can't be read.
    """
    if calibration is None:
        return
    with called("--data"):
        on = job if data is None else replace(job, data=job.data.at(data.absolute()))
        measured = on.data.files(splits(on, None)[0])
    with called("--calibrate"):
        both = shared(_files_at(job, calibration), measured)
    if both:
        what = "the held-out data of the run" if data is None else f"--data {data}"
        raise OptionError(
            f"--calibrate is {calibration}, whose {both[0].name} is in {what} too: quality on data that codes were fitted to looks better than it is; give other data"
        )


def _files_at(job: Job, path: Path) -> Sequence[Path]:
    """Files that calibrate."""
    if isinstance(job.data, TextData | Recordings):
        other = replace(job, data=job.data.at(path.absolute()))
        return other.data.files(splits(other, None)[0])
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in files if not file.name.startswith(".")]


def digests_at(job: Job, path: Path | None) -> list[str]:
    """Fingerprint of data that calibrates, where there is any."""
    if path is None:
        return []
    contents = of_files(
        Path(path.absolute().anchor), [file.absolute() for file in _files_at(job, path)]
    )
    return [] if contents is None else [contents.digest]


def _batches(model: TrainedModel, path: Path | None) -> Iterator[Mapping[str, Any]]:
    data = model.job.data
    if path is None:
        yield from _of_split(model, None)
    elif isinstance(data, Sentences):
        yield from _of_lines(data, path)
    elif isinstance(data, TextData | Recordings):
        yield from _of_split(model, path)
    else:
        yield from _of_files(model, path)


def _of_split(model: TrainedModel, path: Path | None) -> Iterator[Mapping[str, Any]]:
    """The first batches of the training data, or of data at a path as ``systolic eval --path`` takes it."""
    from systolic.steps.programs import evaluation

    job = model.job_on(path)
    split = Split.train if path is None else splits(job, None)[0]
    with closing(evaluation(job, model.setup.steps, split)) as feed:
        batches = list(itertools.islice(feed, CALIBRATION_BATCHES))
    if not batches:
        raise DataError(f"the {split.value} split of {job.name} is empty; give other data")
    if isinstance(job.data, TextData):
        _check_tokens(
            path, sum(int((np.asarray(batch["segments"]) > 0).sum()) for batch in batches)
        )
    yield from batches


def _of_lines(data: Sentences, path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a text, each alone."""
    lines = lines_of(read_text(path))
    ids = data.encode(_spaced(lines))
    _check_tokens(path, sum(map(len, ids)))
    width = max(map(len, ids))
    for start in range(0, len(ids), TOGETHER):
        rows = np.zeros((3, TOGETHER, width), np.int32)
        for row, tokens in enumerate(ids[start : start + TOGETHER]):
            rows[0, row, : len(tokens)], rows[1, row, : len(tokens)] = tokens, 1
        rows[2] = np.arange(width)
        yield dict(zip(("tokens", "segments", "positions"), rows, strict=True))


def _of_files(model: TrainedModel, path: Path) -> Iterator[Mapping[str, Any]]:
    """Files of a folder and its folders, evenly spaced, or one of arrays."""
    files = _files_at(model.job, path)
    if len(files) < LEAST_PICTURES:
        raise DataError(
            f"--calibrate is {path}, and {LEAST_PICTURES} files or more say what the model will see; give a folder of pictures"
        )
    examples = [model.job.data.load(example) for example in _spaced(files)]
    for start in range(0, len(examples), TOGETHER):
        part = examples[start : start + TOGETHER]
        mask = (np.arange(TOGETHER) < len(part)).astype(np.float32)
        part += part[:1] * (TOGETHER - len(part))
        yield {name: np.stack([example[name] for example in part]) for name in part[0]} | {
            MASK: mask
        }


def _spaced(items: Sequence[Any]) -> list[Any]:
    """At most :data:`EXAMPLES` of them, from anywhere."""
    step = max(1, len(items) // EXAMPLES)
    return list(items[::step][:EXAMPLES])


def _check_tokens(path: Path | None, tokens: int) -> None:
    if tokens < LEAST_TOKENS:
        raise DataError(
            f"--calibrate is {path}, which has {tokens} tokens; give a text of {LEAST_TOKENS} or more that stands for what the model will see"
        )


def watched(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> dict[str, np.ndarray]:
    """Second moments (``join`` adds) or largest magnitudes (``join`` takes the maximum) of the inputs of matrices over batches; float32, zeros where there is no batch.

    Args:
        steps: Programs of a job.
        weights: Parameters and other variables.
        shapes: Path to [inputs, inputs] or [inputs], after the number of layers where matrices are stacked.
        batches: Examples as the job's data has them; their padding does not count.
        join: Joins the statistics of two batches.
    """
    network, task = steps.network, steps.job.task

    def read(seen: Any, params: Any, rest: Any, batch: Any) -> jax.Array:
        module = network.module(network.cast(params), rest, train=False)
        watch(module, seen)
        with counting(_counted(batch)):
            return _sum_of_outputs(task, module, batch)

    program = jax.jit(
        lambda total, *arguments: jax.tree.map(join, total, jax.grad(read)(total, *arguments)),
        donate_argnums=0,
        compiler_options=steps.target.compiler_options,
    )
    total = {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()}
    for batch in batches:
        total = program(total, weights.params, weights.model_state, batch)
    return {path: np.asarray(statistic) for path, statistic in jax.device_get(total).items()}


def _counted(batch: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Masks of what is no padding, as :func:`~systolic.models.quantized.activations.counting` takes them: of tokens, of predictions, and of examples."""
    size = jax.tree.leaves(batch)[0].shape[0]
    rows = batch[MASK] > 0 if MASK in batch else jnp.ones(size, bool)
    masks = []
    if "segments" in batch:
        masks.append(batch["segments"] > 0)
    elif "tokens" in batch and "targets" in batch:  # a prompt has no targets, but text after it
        masks.append(jax.lax.cummax((batch["targets"] >= 0).astype(jnp.int32), 1, reverse=True) > 0)
    if "places" in batch:
        masks.append(batch["labels"] >= 0)
    return [*(mask & rows[:, None] for mask in masks), rows]


def _sum_of_outputs(task: Task, module: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A number that all of a model's products lead to: the sum of what it predicts, or of the loss where that is nothing."""
    predictions = [output for output in task.outputs(module, batch).values() if _is_float(output)]
    if not predictions:
        loss = task.terms(module, batch, False)["loss"]
        predictions = [loss.total if isinstance(loss, Mean) else loss]
    return sum((jnp.sum(output, dtype=jnp.float32) for output in predictions), start=jnp.zeros(()))


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
