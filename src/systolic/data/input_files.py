"""New examples for models of arrays, from CSV, TSV, JSONL, .npz and .npy files, checked against the fields that the model reads; and damaged files that reading left out, counted across threads and worker processes."""

import csv
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import nearest_file
from systolic.data.text.line_files import not_json, refuse_other
from systolic.data.text.row_forms import table_rows
from systolic.job.data import Field, NoExamples

LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
ARRAYS = (".npz", ".npy")
SUFFIXES = (*TABLES, *LINES, *ARRAYS)
SHOWN = 6
"""Columns that a message names."""
WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
"""Cells that stand for numbers."""
SIDE = "skipped"
"""The entry of a batch, on its way from a worker or a thread, that holds messages: uint8[bytes] of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFiles(NoExamples):
    """``.npz`` files with an array for each input, all examples of a file first; every split is empty."""

    refusal: ClassVar[str] = (
        "an imported program brings no {split} data; train it in a recipe of your own, with systolic.data.arrays.Arrays"
    )

    inputs: Mapping[str, Field]
    """By name, without the batch dim."""
    repeated: tuple[str, ...] = ()
    """Inputs that are the same for all examples, and have no batch dim in a file."""
    together: int = 1
    """Examples that the model computes together, because they depend on each other: a file has a multiple of it."""

    unread: tuple[str, ...] = ()
    """Other arrays that a file may have, which are left out."""

    def fields(self) -> Mapping[str, Field]:
        """The inputs."""
        return dict(self.inputs)

    def load(self, path: Path) -> dict[str, Any]:
        """The one example of a file; raises as :meth:`examples`."""
        examples = list(self.examples(path))
        if len(examples) != 1:
            raise DataError(f"{path} has {len(examples)} examples; give a file with one")
        return examples[0]

    def examples(self, path: Path) -> "Iterator[dict[str, np.ndarray]]":
        """Examples of a ``.npz`` file, or of a ``.npy`` file where there is one input.

        Raises:
            NotFoundError: there is no such file.
            DataError: it is no file of numpy's, or an input is missing, unknown, or of another shape or kind.
        """
        return self.examples_of(self._loaded(path), str(path))

    def examples_of(
        self, named: "Mapping[str, Any]", where: str
    ) -> "Iterator[dict[str, np.ndarray]]":
        """Examples of arrays by name; ``where`` is what messages call their holder.

        Raises:
            DataError: an input is missing, unknown, or of another shape or kind.
        """
        arrays = self._arrays(named, where)
        count = next((len(array) for name, array in arrays.items() if name not in self.repeated), 0)
        if count % self.together:
            raise DataError(
                f"{where} has {count} examples, and the model's outputs for one depend on the others of its batch of {self.together}; give a multiple of {self.together}, or import the model again with another example batch"
            )
        for number in range(count):
            yield {
                name: array if name in self.repeated else array[number]
                for name, array in arrays.items()
            }

    def _loaded(self, path: Path) -> "dict[str, np.ndarray]":
        import numpy as np

        try:
            loaded = np.load(path, allow_pickle=False)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{path} is not a file{nearest_file(path)}; check the path"
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is no .npz file of arrays; write it with numpy.savez"
            ) from error
        if isinstance(loaded, np.ndarray):
            return dict(zip(self.inputs, [loaded], strict=False))
        with loaded:
            return {name: array for name, array in loaded.items() if name not in self.unread}

    def _arrays(self, named: "Mapping[str, Any]", where: str) -> "dict[str, np.ndarray]":
        import numpy as np

        named = {name: array for name, array in named.items() if name not in self.unread}
        unknown, missing = (
            sorted(set(named) - set(self.inputs)),
            sorted(set(self.inputs) - set(named)),
        )
        if unknown or missing:
            raise DataError(
                f"{where} has the arrays {', '.join(sorted(named)) or 'none'}, and the model takes {self._wanted()}; name them so"
            )
        arrays = {name: self._checked(where, name, np.asarray(named[name])) for name in self.inputs}
        if len({len(array) for name, array in arrays.items() if name not in self.repeated}) > 1:
            raise DataError(
                f"the arrays of {where} differ in their first dim; it is the number of examples"
            )
        return arrays

    def _checked(self, where: str, name: str, array: "np.ndarray") -> "np.ndarray":
        import numpy as np

        field = self.inputs[name]
        own = array.shape if name in self.repeated else array.shape[1:]
        if own != tuple(field.shape) or (array.ndim == 0 and name not in self.repeated):
            raise DataError(
                f"{name} in {where} is {list(array.shape)}, and the model takes {self._wanted()}; change its shape"
            )
        kinds = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
        if array.dtype.kind not in kinds.get(np.dtype(field.dtype).kind, "f"):
            raise DataError(
                f"{name} in {where} is {array.dtype}, and the model takes {field.dtype}; convert it"
            )
        return array.astype(field.dtype)

    def _wanted(self) -> str:
        def described(name: str, field: Field) -> str:
            batch = [] if name in self.repeated else ["examples"]
            return f"{name} {field.dtype}[{', '.join(map(str, [*batch, *field.shape]))}]"

        return ", ".join(described(name, field) for name, field in self.inputs.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class TableInputs:
    """Columns that rows must hold."""

    fields: Mapping[str, Field]
    """The inputs that the model reads, by name."""
    unread: tuple[str, ...] = ()
    """Other fields of its data, such as labels: a row may have them, and they are not read."""
    columns: Mapping[str, Sequence[str]] | None = None
    """Names of the columns of an input's numbers, by its name, where its data declares them."""

    def rows(self, path: Path) -> "Iterator[dict[str, np.ndarray]]":
        """Each row of a file as an example.

        Raises:
            NotFoundError: there is no such file.
            DataError: it is of another kind, or a column is missing, or a cell is no number; names the line.
        """
        if not path.is_file():
            raise NotFoundError(f"{path} is not a file{nearest_file(path)}; check the path")
        if path.suffix.lower() in ARRAYS:
            files = InputFiles(inputs=self.fields, unread=self.unread)
            yield from _finite(files.examples(path), str(path))
        elif path.suffix.lower() in LINES:
            for place, row in _lines(path):
                yield self._of_row(place, row)
        elif path.suffix.lower() in TABLES:
            plan: dict[str, list[str]] | None = None
            for place, row in table_rows(path, blanks=True):
                if isinstance(row, DataError):
                    raise row
                plan = plan or self._plan(str(path), list(row))
                yield self._cells(place, row, plan)
        else:
            refuse_other(path)
            raise DataError(
                f"{path} is no table; give rows in {', '.join(SUFFIXES)} with {self.wanted()}"
            )

    def rows_of(self, arrays: "Mapping[str, Any]", where: str) -> "Iterator[dict[str, np.ndarray]]":
        """Each row of arrays by name as an example; ``where`` is what messages call their holder.

        Raises:
            DataError: an input is missing, unknown, or of another shape or kind, or holds a number that is not finite.
        """
        files = InputFiles(inputs=self.fields, unread=self.unread)
        yield from _finite(files.examples_of(arrays, where), where)

    def wanted(self) -> str:
        """The inputs, in words: ``features float32[30]``."""
        return ", ".join(
            f"{name} {field.dtype}{list(field.shape)}" for name, field in self.fields.items()
        )

    def _of_row(self, place: str, row: Mapping[str, Any]) -> "dict[str, np.ndarray]":
        """An example of an object, whose fields are numbers or nested lists, or columns."""
        if all(name in row for name in self.fields):
            return {
                name: _array(place, name, row[name], field) for name, field in self.fields.items()
            }
        return self._cells(place, row, self._plan(place, list(row)))

    def _cells(
        self, place: str, row: Mapping[str, Any], plan: Mapping[str, Sequence[str]]
    ) -> "dict[str, np.ndarray]":
        return {
            name: _array(place, name, [_cell(place, column, row[column]) for column in columns], self.fields[name])
            for name, columns in plan.items()
        }  # fmt: skip

    def _plan(self, place: str, header: Sequence[str]) -> dict[str, list[str]]:
        """The columns of each input.

        Raises:
            DataError: some are missing, or there are others beside columns that are taken by their order.
        """
        plan = {name: self._named(name, field, header) for name, field in self.fields.items()}
        taken = {column for columns in plan.values() for column in columns or ()}
        rest = [name for name in header if name not in taken and name not in self.unread]
        lacking = [name for name, columns in plan.items() if columns is None]
        declared = self.columns or {}
        if len(lacking) == 1 and lacking[0] not in declared:
            size = math.prod(self.fields[lacking[0]].shape)
            if size == len(rest):
                plan[lacking[0]] = rest
                lacking = []
        if lacking:
            names = declared.get(lacking[0])
            missing = [name for name in names or () if name not in header]
            cure = f"it lacks {_few(missing)}" if missing else self._cure(lacking[0])
            raise DataError(
                f"{place} has {len(header)} columns ({_few(header)}), and the model takes {self.wanted()}; {cure}"
            )
        return {name: columns for name, columns in plan.items() if columns is not None}

    def _cure(self, name: str) -> str:
        size = math.prod(self.fields[name].shape)
        if not self.fields[name].shape:
            return f"add the column {name}"
        return f"name its columns {name}_0 to {name}_{size - 1}, or give its {size} columns and no others"

    def _named(self, name: str, field: Field, header: Sequence[str]) -> list[str] | None:
        """Columns of an input by their names; ``None`` where they have others."""
        size = math.prod(field.shape)
        if self.columns is not None and name in self.columns:
            forms = [list(self.columns[name])]
        elif not field.shape:
            forms = [[name]]
        else:
            forms = [
                [form.format(name, number + first) for number in range(size)]
                for form in ("{}_{}", "{}.{}", "{}[{}]", "{}{}")
                for first in (0, 1)
            ]
        return next((form for form in forms if set(form) <= set(header)), None)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            place = f"{path} line {number}"
            try:
                row = json.loads(text)
            except ValueError as error:
                raise DataError(f"{place} {not_json(error)}") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is no JSON object; give one with a value by column")
            yield place, row


def _cell(place: str, column: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            word = value.strip().lower()
            return WORDS[word] if word in WORDS else float(value)
        return float(value)
    except (TypeError, ValueError) as error:
        what = "empty" if value in ("", None) else f"{str(value)[:40]!r}, which is no number"
        raise DataError(
            f"{place}: {column} is {what}; give a number, encoded as in training"
        ) from error


def _array(place: str, name: str, value: Any, field: Field) -> "np.ndarray":
    import numpy as np

    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: {name} holds no numbers; give {field.dtype}{list(field.shape)}") from error  # fmt: skip
    if numbers.size != math.prod(field.shape):
        raise DataError(
            f"{place}: {name} has the shape {list(numbers.shape)}, and the model takes {field.dtype}{list(field.shape)}"
        )
    with np.errstate(over="ignore"):
        narrow = numbers.astype(field.dtype) if np.dtype(field.dtype).kind == "f" else numbers
    _check_finite(place, name, narrow, np.asarray(value, object))
    shaped = numbers.reshape(field.shape)
    kind = np.dtype(field.dtype).kind
    if kind in "iu" and not np.array_equal(shaped, np.round(shaped)):
        raise DataError(f"{place}: {name} is no whole number, and the model takes {field.dtype}")
    return shaped.astype(field.dtype)


def _finite(
    examples: "Iterator[dict[str, np.ndarray]]", where: str
) -> "Iterator[dict[str, np.ndarray]]":
    for number, example in enumerate(examples, 1):
        for name, array in example.items():
            _check_finite(f"{where} row {number}", name, array, array)
        yield example


def _check_finite(place: str, name: str, array: "np.ndarray", written: "np.ndarray") -> None:
    """Refuses null, nan, inf and a number that is too large for the input's type; ``written`` holds the values as they were given.

    Raises:
        DataError: names the place and the first such number.
    """
    import numpy as np

    if array.dtype.kind not in "fV" or (finite := np.isfinite(array)).all():
        return
    at = tuple(map(int, np.argwhere(~finite)[0]))
    value = written[at]
    shown = "null" if value is None else f"{float(value):g}"
    where = f"{name}{list(at)}" if at else name
    raise DataError(f"{place}: {where} is {shown}; give a finite {array.dtype}")


def _few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Answers as the content of a file: JSONL, or CSV with a column for each number of a list."""
    if path.suffix.lower() in LINES:
        return "".join(f"{json.dumps(dict(row))}\n" for row in rows).encode()
    import io

    flat = [dict(_flat(row)) for row in rows]
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(flat[0]) if flat else [], delimiter="\t" if path.suffix == ".tsv" else ",")  # fmt: skip
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().encode()


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, list):
            yield from _flat(
                {f"{name}_{number}": component for number, component in enumerate(value)}
            )
        else:
            yield name, value


class Skipped:
    """Messages about files, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, None] = {}
        self._taken = 0

    def note(self, lines: Iterable[str]) -> None:
        """Adds messages; a repeated one counts once."""
        with self._lock:
            self._lines.update(dict.fromkeys(lines))

    def take(self) -> list[str]:
        """Messages since the last call."""
        with self._lock:
            lines = list(self._lines)[self._taken :]
            self._taken = len(self._lines)
        return lines

    @property
    def count(self) -> int:
        """Number of files so far."""
        return len(self._lines)

    def clear(self) -> None:
        """Forgets all messages, for another session of the same process."""
        with self._lock:
            self._lines.clear()
            self._taken = 0


FILES = Skipped()
"""Skipped files of this process."""


def pack(lines: Iterable[str]) -> np.ndarray:
    """Encodes messages as the :data:`SIDE` entry of a batch."""
    return np.frombuffer(json.dumps(list(lines)).encode(), np.uint8)


def unload(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Removes the :data:`SIDE` entry of a batch and notes its messages."""
    if SIDE not in batch:
        return dict(batch)
    FILES.note(json.loads(batch[SIDE].tobytes()))
    return {name: array for name, array in batch.items() if name != SIDE}
