"""Rows that calibrate a quantization and rows that a file is measured on, as inputs of one function."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, called
from systolic.data.text.sentences import Sentences
from systolic.data.text.text_data import TextData
from systolic.formats.examples import ExampleInputs, example_inputs, function_inputs
from systolic.formats.inference import ExportableModel, Inference
from systolic.formats.settings import ExportSettings
from systolic.job import Data, Job, Read, Split
from systolic.job.data import MASK
from systolic.steps.tasks.arrays import ArrayClassification
from systolic.steps.tasks.classification import Classification

CALIBRATION_ROWS = 128
"""Most representative rows of a quantization."""
READ = 64
"""Rows that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class FunctionRows:
    """Inputs of a function, with what is known of them."""

    inputs: Mapping[str, np.ndarray] = field(repr=False)
    """Name to [rows, ...]."""
    origin: str
    """``test data``, ``files`` …"""
    labels: np.ndarray | None = field(default=None, repr=False)
    """Class of each row, int[rows]; None where none are known."""
    real: bool = True
    """Whether they can stand for what the model will see."""

    @property
    def count(self) -> int:
        """Rows."""
        return len(next(iter(self.inputs.values())))

    def first(self, most: int) -> "FunctionRows":
        """The first rows."""
        return self if self.count <= most else self.only(slice(most))

    def only(self, which: slice | np.ndarray) -> "FunctionRows":
        """Some of the rows."""
        return replace(
            self,
            inputs={name: one[which] for name, one in self.inputs.items()},
            labels=None if self.labels is None else self.labels[which],
        )


def calibration_rows(
    model: ExportableModel, function: Inference, path: Path | None
) -> FunctionRows:
    """Representative rows: of the recipe's training data, of files, or the sentences that stand for a text.

    Raises:
        OptionError: there are none but random numbers.
        DataError: a file can't be read.
        NotFoundError: nothing is at the path.
    """
    if path is not None:
        # All texts are read, so that the halves are of the same rows here and for the measurement.
        most = None if _of_texts(model) else CALIBRATION_ROWS
        found = _half(model, _at(model, function, path, most), 1).first(CALIBRATION_ROWS)
    elif _has_training(model.job):
        found = _of_split(model, function, model.job.data, Split.train, CALIBRATION_ROWS)
    else:
        found = _standing(model, function, CALIBRATION_ROWS)
    if not found.real:
        raise OptionError(
            f"int8 needs rows that stand for what the model will see, and {model.job.name} brings no data of its own; give a folder of them with --data"
        )
    _check_finite(found)
    return found


def _has_training(job: Job) -> bool:
    """Whether a job has training data.

    Raises:
        NotFoundError: it has moved.
    """
    try:
        if job.data.size(Split.train) == 0:
            return False
        job.data.files(Split.train)  # of text only the files tell whether it is there
        return True
    except NotFoundError as error:
        reason = str(error).partition("; ")[0]
        raise NotFoundError(
            f"data moved: {reason}; int8 needs rows that stand for what the model will see: give them with --data"
        ) from error


def evaluation_rows(
    model: ExportableModel, function: Inference, settings: ExportSettings, examples: ExampleInputs
) -> FunctionRows:
    """Rows to measure on: files that were given, of texts those that calibrate nothing; the whole test split, else that of validation, else the examples of any export.

    Raises: as :func:`calibration_rows`.
    """
    if settings.data is not None and not settings.inputs:
        found = _half(model, _at(model, function, settings.data, None), 0)
        _check_finite(found)
        return found
    if label_of(model.job) is not None and not settings.inputs:
        with suppress(NotFoundError):  # data that has moved is no reason to refuse an export
            for split in (Split.test, Split.validation):
                if model.job.data.size(split) != 0:
                    return _of_split(model, function, model.job.data, split, None)
    return _standing(model, function, examples.rows, settings.inputs)


def label_of(job: Job) -> str | None:
    """Name of the array with the class of an example; None for a task without classes."""
    task = job.task
    if isinstance(task, Classification):
        return "label"
    return task.label if isinstance(task, ArrayClassification) else None


def _standing(
    model: ExportableModel, function: Inference, rows: int, files: Sequence[Path] = ()
) -> FunctionRows:
    found = example_inputs(model, rows, files)
    return FunctionRows(
        inputs=found.inputs[function.name],
        origin=found.origin,
        real=not found.origin.startswith("random"),
    )


def _at(model: ExportableModel, function: Inference, path: Path, most: int | None) -> FunctionRows:
    """Rows of a file, of the files of a folder, or of its folders of classes, which label them."""
    if not path.exists():
        raise NotFoundError(f"--data is {path}, which does not exist; check the path")
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"--data is {path}, which is empty; give representative files")
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(one.is_dir() for one in entries) and label_of(model.job) is not None:
        with called("--data"):
            data = model.job.data.at(path.absolute())
        return _of_split(model, function, data, Split.validation, most, f"pictures of {path.name}")
    files = [one for one in entries if one.is_file() and not one.name.startswith(".")]
    if not files:
        raise DataError(f"--data is {path}, which holds no files; give representative files")
    found = example_inputs(model, files=files[:most])
    origin = f"files of {path.name}" if path.is_dir() else path.name
    return FunctionRows(inputs=found.inputs[function.name], origin=origin)


def _half(model: ExportableModel, found: FunctionRows, first: int) -> FunctionRows:
    """Every second row of texts, from a number on: some calibrate, and the others are measured."""
    if found.count < 2 or not _of_texts(model):
        return found
    return replace(found, inputs={name: one[first::2] for name, one in found.inputs.items()})


def _of_texts(model: ExportableModel) -> bool:
    return isinstance(model.job.data, TextData | Sentences)


def uncalibrated(measured: FunctionRows, seen: FunctionRows) -> tuple[FunctionRows, int]:
    """Measured rows without those that calibrate; all of them where none is left, and how many of those calibrate too."""
    known = set(_row_digests(seen))
    kept = np.array([one not in known for one in _row_digests(measured)])
    if not kept.any():
        return measured, measured.count
    return measured.only(kept), 0


def _row_digests(rows: FunctionRows) -> list[bytes]:
    """Digest of each row over all inputs, by their names."""
    found = [hashlib.sha256() for _ in range(rows.count)]
    for name in sorted(rows.inputs):
        for digest, row in zip(found, np.ascontiguousarray(rows.inputs[name]), strict=True):
            digest.update(row.tobytes())
    return [one.digest() for one in found]


def _check_finite(rows: FunctionRows) -> None:
    """Refuses rows without a range.

    Raises:
        DataError: a number is infinite or none.
    """
    for name, array in rows.inputs.items():
        if not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            raise DataError(
                f"{name} of row {row} of the {rows.origin} has numbers that are infinite or NaN; give rows without them"
            )


def _of_split(
    model: ExportableModel,
    function: Inference,
    data: Data,
    split: Split,
    most: int | None,
    origin: str = "",
) -> FunctionRows:
    """Rows of a split, from anywhere in it where not all are asked for."""
    batches = data.open(Read(split=split, batch=READ, shuffle=most is not None, epochs=1))
    try:
        read = _gathered(batches, most)
    finally:
        batches.close()
    label = label_of(model.job)
    return FunctionRows(
        inputs=function_inputs(function, read, model.sizes),
        labels=None if label is None else read[label],
        origin=origin or f"{split.value} data",
    )


def _gathered(
    batches: Iterable[Mapping[str, np.ndarray]], most: int | None
) -> dict[str, np.ndarray]:
    """Examples of batches, without padding."""
    parts: dict[str, list[np.ndarray]] = {}
    count = 0
    for batch in batches:
        kept = batch[MASK] > 0
        count += int(kept.sum())
        for name, array in batch.items():
            if name != MASK:
                parts.setdefault(name, []).append(array[kept])
        if most is not None and count >= most:
            break
    if not count:
        raise DataError("the data holds no example; give other data")
    return {name: np.concatenate(arrays)[:most] for name, arrays in parts.items()}
