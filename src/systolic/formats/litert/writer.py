"""Exports of ``litert``: one .tflite file of one function, float or quantized, measured beside its source."""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError, called
from systolic.core.files import fault_of
from systolic.core.units import si
from systolic.data.text.text_data import Sentences, TextData
from systolic.formats.comparison import EXACT, ExportDifference, difference
from systolic.formats.conversion import computed, loops, plain_platform, unrolled, with_labels
from systolic.formats.examples import ExampleInputs, example_inputs, function_inputs
from systolic.formats.inference import BATCH, IMAGE, SEQUENCE, ExportableModel, Inference, run
from systolic.formats.litert import child
from systolic.formats.litert.edge_tpu import EdgeTpuReport, edge_tpu_report
from systolic.formats.litert.graph import LiteGraph, graph_of
from systolic.formats.packages import ended, last_line, package_folder, run_module
from systolic.formats.registry import ExportSettings, LiteQuantization
from systolic.job import Data, Job, Precision, Read, Split
from systolic.job.data import MASK
from systolic.runs.bundle.folder import check_free, write_file
from systolic.steps.jaxpr import FoldedProgram
from systolic.steps.tasks import ArrayClassification, Classification

CALIBRATION_ROWS = 128
"""Most representative rows of a quantization."""

READ = 64
"""Rows that are read at a time."""
LOOKUP, GELU = "odml.embedding_lookup", "aten.gelu.default"
"""Names that the converter knows."""
ROOT_HALF = float(np.sqrt(0.5))
LITERT = "litert"
"""Name of the format, and of its packages."""
CHILD = "systolic.formats.litert.child"
TOKENS = 128
"""Tokens of a text where --sequence is not given, or fewer where the model takes fewer."""
CHUNK = 32
"""Rows that the source computes at a time."""
OUTPUT_BYTES = 1 << 29
"""Most bytes of outputs of a comparison."""
AGREEING, PARALLEL = 0.95, 0.99
"""Share of rows with the same largest output, and mean cosine of vectors, below which an export says so."""
IMAGE_RANGE = (0.0, 255.0)
"""Numbers of an image, whatever the representative ones have."""


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
            inputs={name: input_[which] for name, input_ in self.inputs.items()},
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
        rows = _half(model, _at(model, function, path, most), 1).first(CALIBRATION_ROWS)
    elif _has_training(model.job):
        rows = _of_split(model, function, model.job.data, Split.train, CALIBRATION_ROWS)
    else:
        rows = _standing(model, function, CALIBRATION_ROWS)
    if not rows.real:
        raise OptionError(
            f"int8 needs rows that stand for what the model will see, and {model.job.name} brings no data of its own; give a folder of them with --data"
        )
    _check_finite(rows)
    return rows


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
        rows = _half(model, _at(model, function, settings.data, None), 0)
        _check_finite(rows)
        return rows
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
    examples = example_inputs(model, rows, files)
    return FunctionRows(
        inputs=examples.inputs[function.name],
        origin=examples.origin,
        real=not examples.origin.startswith("random"),
    )


def _at(model: ExportableModel, function: Inference, path: Path, most: int | None) -> FunctionRows:
    """Rows of a file, of the files of a folder, or of its folders of classes, which label them."""
    if not path.exists():
        raise NotFoundError(f"--data is {path}, which does not exist; check the path")
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"--data is {path}, which is empty; give representative files")
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(entry.is_dir() for entry in entries) and label_of(model.job) is not None:
        with called("--data"):
            data = model.job.data.at(path.absolute())
        return _of_split(model, function, data, Split.validation, most, f"pictures of {path.name}")
    files = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    if not files:
        raise DataError(f"--data is {path}, which holds no files; give representative files")
    examples = example_inputs(model, files=files[:most])
    origin = f"files of {path.name}" if path.is_dir() else path.name
    return FunctionRows(inputs=examples.inputs[function.name], origin=origin)


def _half(model: ExportableModel, rows: FunctionRows, first: int) -> FunctionRows:
    """Every second row of texts, from a number on: some calibrate, and the others are measured."""
    if rows.count < 2 or not _of_texts(model):
        return rows
    return replace(rows, inputs={name: input_[first::2] for name, input_ in rows.inputs.items()})


def _of_texts(model: ExportableModel) -> bool:
    return isinstance(model.job.data, TextData | Sentences)


def uncalibrated(measured: FunctionRows, seen: FunctionRows) -> tuple[FunctionRows, int]:
    """Measured rows without those that calibrate; all of them where none is left, and how many of those calibrate too."""
    known = set(_row_digests(seen))
    kept = np.array([row_digest not in known for row_digest in _row_digests(measured)])
    if not kept.any():
        return measured, measured.count
    return measured.only(kept), 0


def _row_digests(rows: FunctionRows) -> list[bytes]:
    """Digest of each row over all inputs, by their names."""
    hashes = [hashlib.sha256() for _ in range(rows.count)]
    for name in sorted(rows.inputs):
        for digest, row in zip(hashes, np.ascontiguousarray(rows.inputs[name]), strict=True):
            digest.update(row.tobytes())
    return [hashed.digest() for hashed in hashes]


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
        # Examples of batches, without padding.
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
        read = {name: np.concatenate(arrays)[:most] for name, arrays in parts.items()}
    finally:
        batches.close()
    label = label_of(model.job)
    return FunctionRows(
        inputs=function_inputs(function, read, model.sizes),
        labels=None if label is None else read[label],
        origin=origin or f"{split.value} data",
    )


class Composites:
    """Replacements for equations of one flat program, for :func:`~systolic.formats.conversion.computed`."""

    def __init__(self, program: jax.extend.core.ClosedJaxpr) -> None:
        jaxpr = program.jaxpr
        self._made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
        self._tables = set(jaxpr.constvars)
        halves = [(equation, self._halved(equation)) for equation in jaxpr.eqns]
        self._gelus = {id(last): id(half) for last, half in halves if half is not None}
        self._halves: dict[int, Any] = dict.fromkeys(self._gelus.values())

    def __call__(self, equation: Any, operands: list[Any]) -> list[Any] | None:
        """Outputs of an equation by an operation of LiteRT; None leaves it as it is."""
        if id(equation) in self._halves:
            self._halves[id(equation)] = next(operand for operand in operands if np.ndim(operand))
            return None
        if id(equation) in self._gelus:
            return [_gelu(self._halves[self._gelus[id(equation)]])]
        if equation.primitive.name == "gather" and self._looks_up(equation):
            return [_looked_up(*operands)]
        return None

    def _looks_up(self, equation: Any) -> bool:
        """Whether an equation picks whole rows of a table of weights."""
        table, indices = equation.invars
        about, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        rank = len(indices.aval.shape) - 1
        return (
            table in self._tables
            and len(table.aval.shape) == 2
            and table.aval.dtype == np.float32
            and tuple(sizes) == (1, table.aval.shape[1])
            and tuple(about.start_index_map) == tuple(about.collapsed_slice_dims) == (0,)
            and tuple(about.offset_dims) == (rank,)
            and not about.operand_batching_dims
            and indices.aval.dtype == np.int32
        )

    def _halved(self, equation: Any) -> Any:
        """The equation of x / 2, for the last product of x / 2 and erfc(-x / root of 2); None for other equations."""
        if equation.primitive.name != "mul":
            return None
        makers = [self._maker(atom) for atom in equation.invars]
        for half, tail in (makers, makers[::-1]):
            if tail is None or tail.primitive.name != "erfc" or half is None:
                continue
            scaled = self._maker(tail.invars[0])
            turned = None if scaled is None else self._maker(_factor(scaled, ROOT_HALF))
            if turned is None or turned.primitive.name != "neg":
                continue
            if _factor(half, 0.5) is turned.invars[0]:
                return half
        return None

    def _maker(self, atom: Any) -> Any:
        """The equation that a value comes from."""
        if atom is None or isinstance(atom, jax.extend.core.Literal):
            return None
        return self._made.get(atom)


def _factor(equation: Any, number: float) -> Any:
    """The operand that an equation multiplies by a number; None for other equations."""
    if equation.primitive.name != "mul":
        return None
    for factor, other in (equation.invars, equation.invars[::-1]):
        literal = isinstance(factor, jax.extend.core.Literal) and np.ndim(factor.val) == 0
        if literal and np.isclose(float(factor.val), number, rtol=1e-6):
            return other
    return None


def _gelu(x: jax.Array) -> Any:
    def decomposed(x: jax.Array, *, approximate: str) -> jax.Array:
        del approximate
        return jax.nn.gelu(x, approximate=False)

    return jax.lax.composite(decomposed, GELU)(x, approximate="none")


def _looked_up(table: Any, indices: Any) -> Any:
    def decomposed(indices: jax.Array, table: jax.Array) -> jax.Array:
        return table.at[indices].get(mode="promise_in_bounds")

    flat = indices.reshape(-1)
    rows = jax.lax.composite(decomposed, LOOKUP)(flat, jnp.asarray(table))
    return rows.reshape(*indices.shape[:-1], table.shape[1])


@dataclass(frozen=True, kw_only=True)
class LiteExport:
    """A .tflite file that was written, and how it does beside its source."""

    path: Path
    function: str
    quantization: LiteQuantization
    parameters: int
    bytes: int
    float_bytes: int
    """Size of the same model without quantization."""
    difference: ExportDifference
    compared_on: str
    accuracy: tuple[float, float] | None
    """Accuracy of the source and of the file; None without labels."""
    calibrated_on: str | None
    """Rows of the quantization of activations."""
    measured_calibrate: bool = False
    """Whether the rows of the comparison are among those of the calibration: there are no others."""
    graph: LiteGraph = field(repr=False)
    edge_tpu: EdgeTpuReport | None = None
    notes: tuple[str, ...] = ()
    """Form of quantized matrices, order of classes."""
    seconds: float = 0.0
    """Time that the export took."""

    @property
    def kind(self) -> str:
        """The format's name."""
        return LITERT

    @property
    def floating(self) -> dict[str, int]:
        """Operations that compute in floating point, by name."""
        return dict(self.graph.floating())

    @property
    def operations(self) -> int:
        """All operations, without those that only store numbers in another way."""
        return sum(self.graph.counts().values())

    @property
    def inputs(self) -> dict[str, str]:
        """Name to dtype and shape in the file."""
        return {name: str(tensor) for name, tensor in self.graph.named_inputs.items()}

    @property
    def outputs(self) -> dict[str, str]:
        """Name to dtype and shape in the file."""
        return {name: str(tensor) for name, tensor in self.graph.named_outputs.items()}

    def lines(self) -> list[str]:
        """The measurements."""
        report = [f"{self.function}: {self.difference} ({self.compared_on})"]
        if self.accuracy is not None:
            source, here = self.accuracy
            report.append(
                f"accuracy {here:.2%}, source {source:.2%} ({round(100 * (here - source), 2) + 0:+.2f} points), on {self.difference.examples} rows of {self.compared_on}"
            )
        if self.quantization is not LiteQuantization.none:
            report.append(
                f"{self.bytes / self.float_bytes:.1%} of the {si(self.float_bytes, 'B')} in float32"
            )
        if self.quantization is LiteQuantization.int8:
            left = ", ".join(f"{count} {kind}" for kind, count in self.floating.items())
            report.append(
                f"{self.operations - sum(self.floating.values())} of {self.operations} operations in whole numbers{f'; float: {left}' if left else ''}; calibrated on {self.calibrated_on}"
            )
        if self.measured_calibrate:
            report.append(
                "it was measured on rows that it was calibrated on, and looks better than it is: give more with --data"
            )
        agreed = self.difference.argmax_agreement
        if agreed is not None and agreed < AGREEING:
            report.append(
                f"the largest output is another one in {1 - agreed:.1%} of the rows; measure it on your own data (--data), or leave more in floating point"
            )
        if (cosine := self.difference.cosine) is not None and not cosine.mean >= PARALLEL:
            report.append(
                f"the vectors are turned ({cosine}); measure it on your own data (--data), or leave more in floating point"
            )
        shapes = [
            ", ".join(f"{k} {v}" for k, v in of.items()) for of in (self.inputs, self.outputs)
        ]
        report += [f"takes {shapes[0]}; returns {shapes[1]}", *self.notes]
        return report if self.edge_tpu is None else [*report, *self.edge_tpu.lines(str(self.path))]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "format": self.kind,
            "quantization": self.quantization.value,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "float_bytes": self.float_bytes,
            "compared_on": self.compared_on,
            "functions": {self.function: self.difference.to_json()},
            "accuracy": None
            if self.accuracy is None
            else {"source": self.accuracy[0], "exported": self.accuracy[1]},
            "calibrated_on": self.calibrated_on,
            "measured_on_calibration": self.measured_calibrate,
            "operations": self.operations,
            "floating_operations": self.floating,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "notes": list(self.notes),
            "edge_tpu": None if self.edge_tpu is None else self.edge_tpu.to_json(),
            "seconds": self.seconds,
        }


def check_litert(settings: ExportSettings) -> None:
    """Refuses a precision that the format does not have.

    Raises:
        OptionError: it is bf16.
    """
    if settings.precision is not Precision.f32:
        raise OptionError(
            f"--precision is {settings.precision.value}, and LiteRT has f32, dynamic and int8; choose one of them"
        )


def export_litert(
    model: ExportableModel,
    examples: ExampleInputs,
    out: Path,
    settings: ExportSettings = ExportSettings(),  # noqa: B008
    say: Callable[[str], None] = lambda _: None,
) -> LiteExport:
    """Writes one function of a model as a .tflite file of static shapes, measured beside its source.

    Args:
        model: The model; a batch that is free becomes 1.
        examples: Inputs of the comparison where there are no labels and no ``data``.
        out: The new file.
        settings: The function, quantization, representative data.
        say: Called with each stage.

    Raises:
        OptionError: an operation that LiteRT lacks, no representative data for int8, or a precision that the format lacks.
        DataError: the representative data can't be read.
        TakenError: ``out`` exists.
        RunError: outputs in float32 differ from the source, the converter died, or the disk is full; nothing is left at ``out``.
    """
    check_litert(settings)
    check_free(out)
    model, function = _fixed(model, settings.function)
    check_loops(model, function)
    packages = package_folder(LITERT, say)
    say("reading data")
    rows, seen, both = evaluation_rows(model, function, settings, examples), None, 0
    if settings.quantization is LiteQuantization.int8:
        seen = calibration_rows(model, function, settings.data)
        rows, both = uncalibrated(rows, seen)
    rows = _measurable(model, function, rows)
    say(f"lowering {function.name}")
    program, names = lowered(function, model.params, model.sizes)
    say("converting")
    request = _request(names, model, function, settings)
    content, answers, float_bytes = _converted(program, request, rows, seen, packages)
    say("comparing")
    source = _source(model, function.name, rows.inputs)
    apart = difference(source, answers)
    if settings.quantization is LiteQuantization.none:
        apart.check(f"the exported {function.name}", EXACT)
    graph = graph_of(content := with_labels(content, model.job), str(out))
    write_file(out, content)
    return LiteExport(
        path=out,
        function=function.name,
        quantization=settings.quantization,
        parameters=sum(int(np.size(array)) for array in model.params.values()),
        bytes=len(content),
        float_bytes=float_bytes,
        difference=apart,
        compared_on=rows.origin,
        accuracy=_accuracy(rows.labels, source, answers),
        calibrated_on=None if seen is None else f"{seen.count} rows of {seen.origin}",
        measured_calibrate=both > 0,
        graph=graph,
        edge_tpu=edge_tpu_report(graph) if settings.edge_tpu else None,
    )


def _fixed(model: ExportableModel, name: str = "") -> tuple[ExportableModel, Inference]:
    """The model with sizes for all dims, and a function, the first by default, on the platform that suits it."""
    chosen = model.function(name or None)
    limits = [function.limits.get(SEQUENCE, TOKENS) for function in model.functions.values()]
    tokens = min(TOKENS, *limits)
    model = replace(model, sizes={BATCH: 1, SEQUENCE: tokens, **model.sizes})
    if whole := chosen.whole:
        raise OptionError(
            f"{model.job.name} takes {', '.join(whole)} once for a whole call, which an export to LiteRT does not have; export it to stablehlo"
        )
    return model, model.functions_on(plain_platform(model))[chosen.name]


def _measurable(model: ExportableModel, function: Inference, rows: FunctionRows) -> FunctionRows:
    """The first rows, as many as memory holds outputs of: a language model has a number for each token of its vocabulary."""
    inputs = function.abstract(model.sizes)
    outputs = jax.eval_shape(function.call, dict(model.params), inputs).values()
    each = sum(output.size * output.dtype.itemsize for output in outputs) // model.sizes[BATCH]
    return rows.first(max(OUTPUT_BYTES // max(each, 1), model.sizes[BATCH]))


def check_loops(model: ExportableModel, function: Inference) -> None:
    """Refuses a function whose loop ends when its data say so: the converter has no form of it.

    Raises:
        OptionError: it has such a loop.
    """
    inputs = function.abstract(model.sizes)
    program = jax.make_jaxpr(partial(unrolled, function.call))(dict(model.params), inputs)
    if not loops(program.jaxpr):
        return
    others = [name for name in model.functions if name != function.name]
    way = f"give --function {' or '.join(others)}" if others else "export it to stablehlo"
    raise OptionError(f"{function.name} has a loop, which LiteRT's converter has no form of; {way}")


def lowered(
    function: Inference, params: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[bytes, tuple[list[str], list[str]]]:
    """A function with its weights inside as a portable StableHLO artifact, with names of its arguments and results."""
    example = function.abstract(sizes)
    own = {path: np.asarray(array) for path, array in params.items()}
    # What weights alone decide is computed here: a converter would keep it in the graph.
    folded = FoldedProgram(partial(unrolled, function.call), (own,), example)
    constants: Any = [np.asarray(constant) for constant in folded.constants((own,))]
    spelled, shape = jax.make_jaxpr(partial(folded, constants), return_shape=True)(example)
    replaced = partial(computed, spelled.jaxpr, spelled.consts, replace=Composites(spelled))
    order = jax.tree.structure(shape)
    program: Any = jax.jit(
        lambda batch: jax.tree.unflatten(order, replaced(jax.tree.leaves(batch)))
    )
    exported = jax.export.export(program, platforms=["cpu"])(example)
    names = sorted(example)
    inputs = [names[index] for index in exported.module_kept_var_idx]
    outputs = sorted(shape)
    return bytes(exported.mlir_module_serialized), (inputs, outputs)


def _request(
    names: tuple[list[str], list[str]],
    model: ExportableModel,
    function: Inference,
    settings: ExportSettings,
) -> dict[str, Any]:
    """The request for the child."""
    return {
        "inputs": names[0],
        "outputs": names[1],
        "quantization": settings.quantization.value,
        "batch": model.sizes[BATCH],
        "threads": 1,
        "one_scale": settings.edge_tpu,
        "ranges": {IMAGE: IMAGE_RANGE} if IMAGE in function.inputs else {},
    }


def _converted(
    program: bytes,
    request: Mapping[str, Any],
    rows: FunctionRows,
    seen: FunctionRows | None,
    packages: Path,
) -> tuple[bytes, dict[str, np.ndarray], int]:
    """The file's content, its outputs for the rows, and its bytes in float32: made in another process."""
    try:
        with tempfile.TemporaryDirectory(prefix="systolic-litert-") as name:
            folder = Path(name)
            (folder / child.PROGRAM).write_bytes(program)
            (folder / child.REQUEST).write_text(json.dumps(request))
            _save(folder / child.INPUTS, rows)
            if seen is not None:
                _save(folder / child.CALIBRATION, seen)
            log, answer = folder / "log.txt", folder / child.OUTCOME
            code = run_module(sys.executable, CHILD, [name], log, path=[packages])
            if not answer.is_file():
                stage = (
                    (folder / child.STAGE).read_text()
                    if (folder / child.STAGE).is_file()
                    else "starting"
                )
                raise RunError(
                    f"the conversion to LiteRT {ended(code)}, while {stage}; {_way_out(request)}; {last_line(log)}"
                )
            outcome = json.loads(answer.read_bytes())
            if "error" in outcome:
                kind = OptionError if outcome["error"] == OptionError.__name__ else RunError
                raise kind(outcome["told"])
            with np.load(folder / child.OUTPUTS) as outputs:
                results = dict(outputs)
            return (folder / child.MODEL).read_bytes(), results, int(outcome["float_bytes"])
    except OSError as error:
        raise RunError(
            f"the conversion to LiteRT could not write to {tempfile.gettempdir()} ({fault_of(error)}); free some space there, or set TMPDIR to another folder"
        ) from error


def _way_out(request: Mapping[str, Any]) -> str:
    if request["quantization"] == LiteQuantization.none.value:
        return "export it to onnx or stablehlo"
    return "leave more numbers in floating point, with --precision dynamic or f32"


def _save(file: Path, rows: FunctionRows) -> None:
    arrays: dict[str, Any] = dict(rows.inputs)
    np.savez(file, **arrays)


def _source(
    model: ExportableModel, name: str, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Outputs of the source, [rows, ...], a few rows at a time in programs of one size."""
    free = replace(model, sizes={k: v for k, v in model.sizes.items() if k != BATCH})
    call = free.functions_on("cpu")[name].call
    count = len(next(iter(inputs.values())))
    size = min(CHUNK, count)
    parts = []
    for start in range(0, count, size):
        start = min(start, count - size)  # the last call has rows of the one before it
        part = {key: input_[start : start + size] for key, input_ in inputs.items()}
        parts.append((start, run(call, model.params, part)))
    joined = {
        key: np.zeros((count, *output.shape[1:]), output.dtype)
        for key, output in parts[0][1].items()
    }
    for start, outputs in parts:
        for key, output in outputs.items():
            joined[key][start : start + size] = output
    return joined


def _accuracy(
    labels: np.ndarray | None,
    source: Mapping[str, np.ndarray],
    exported: Mapping[str, np.ndarray],
) -> tuple[float, float] | None:
    """Share of rows whose class is right, by the source and by the file."""
    if labels is None:
        return None
    name = next(iter(source))
    return (
        float((source[name].argmax(-1) == labels).mean()),
        float((exported[name].argmax(-1) == labels).mean()),
    )
