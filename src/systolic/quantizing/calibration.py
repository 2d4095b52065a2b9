"""Calibration: data that stands for what a model will see, and the second moments or largest magnitudes of its matrices' inputs."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, called
from systolic.core.files import nearest_file
from systolic.core.reporter import reporter
from systolic.data.audio import Recordings
from systolic.data.fingerprint import of_files, shared
from systolic.data.text.text_data import Sentences, TextData, read_text
from systolic.inference.evaluation import splits
from systolic.inference.model import TrainedModel
from systolic.job import Job, MatrixFormat, Split, Task
from systolic.job.model import Mean
from systolic.models.quantized.activations import watch
from systolic.quantizing.sensitivity import CALIBRATION_BATCHES
from systolic.steps.programs import evaluation
from systolic.steps.step_functions import StepFunctions

if TYPE_CHECKING:
    from systolic.formats.matrices import Matrix


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
    magnitudes = largest_inputs(model.setup.steps, model.weights, shapes, _batches(model, data))
    if (
        path := next(
            (p for p, largest in magnitudes.items() if not np.isfinite(largest).all()), None
        )
    ) is None:
        return magnitudes
    raise DataError(
        f"inputs of {path} are not finite numbers on {data or 'the training data'}; check the data and the weights"
    )


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
    if isinstance(job.data, TextData):
        _check_tokens(
            path, sum(int((np.asarray(batch["segments"]) > 0).sum()) for batch in batches)
        )
    yield from batches


def _of_lines(data: Sentences, path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a text, each alone."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
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
        part += part[:1] * (TOGETHER - len(part))
        yield {name: np.stack([example[name] for example in part]) for name in part[0]}


def _spaced(items: Sequence[Any]) -> list[Any]:
    """At most :data:`EXAMPLES` of them, from anywhere."""
    step = max(1, len(items) // EXAMPLES)
    return list(items[::step][:EXAMPLES])


def _check_tokens(path: Path | None, tokens: int) -> None:
    if tokens < LEAST_TOKENS:
        raise DataError(
            f"--calibrate is {path}, which has {tokens} tokens; give a text of {LEAST_TOKENS} or more that stands for what the model will see"
        )


def input_moments(
    job: Job,
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    split: Split,
    batches: int,
) -> dict[str, np.ndarray]:
    """The sum of x x^T over the inputs x of each matrix, by path; float32.

    Args:
        job: With the data to read.
        steps: Its programs.
        weights: Parameters and other variables.
        shapes: Path to [inputs, inputs], after the number of layers where matrices are stacked.
        split: Part of the data.
        batches: The first so many.

    Raises:
        DataError: the split is empty.
    """
    with closing(evaluation(job, steps, split)) as feed:
        moments = watched(steps, weights, shapes, itertools.islice(feed, batches), jnp.add)
    if moments is None:
        raise DataError(f"the {split.value} split of {job.name} is empty; give other data")
    return moments


def largest_inputs(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
) -> dict[str, np.ndarray]:
    """The largest magnitude of each input of each matrix, by path; float32, zeros where there is no batch.

    Args:
        steps: Programs of a job.
        weights: Parameters and other variables.
        shapes: Path to [inputs], after the number of layers where matrices are stacked.
        batches: Examples as the job's data has them.
    """
    largest = watched(steps, weights, shapes, batches, jnp.maximum)
    return {path: np.zeros(shape) for path, shape in shapes.items()} if largest is None else largest


def watched(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> dict[str, np.ndarray] | None:
    """Statistics of several batches from :mod:`systolic.models.quantized.activations`, joined; ``None`` without batches."""
    network, task = steps.network, steps.job.task

    def read(seen: Any, params: Any, rest: Any, batch: Any) -> jax.Array:
        module = network.module(network.cast(params), rest, train=False)
        watch(module, seen)
        return _sum_of_outputs(task, module, batch)

    program = jax.jit(
        lambda total, *arguments: jax.tree.map(join, total, jax.grad(read)(total, *arguments)),
        donate_argnums=0,
        compiler_options=steps.target.compiler_options,
    )
    total = {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()}
    count = 0
    for batch in batches:
        total = program(total, weights.params, weights.model_state, batch)
        count += 1
    if not count:
        return None
    return {path: np.asarray(statistic) for path, statistic in jax.device_get(total).items()}


def _sum_of_outputs(task: Task, module: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A number that all of a model's products lead to: the sum of what it predicts, or of the loss where that is nothing."""
    predictions = [output for output in task.outputs(module, batch).values() if _is_float(output)]
    if not predictions:
        loss = task.terms(module, batch, False)["loss"]
        predictions = [loss.total if isinstance(loss, Mean) else loss]
    return sum((jnp.sum(output, dtype=jnp.float32) for output in predictions), start=jnp.zeros(()))


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
