"""Bundles: read as a source, written from a run, and their recorded inputs with the model's outputs.

A Bundle holds few rows of inputs, and at most :data:`COLUMNS` evenly spaced outputs of each position: a row of logits
over a large vocabulary takes more bytes than the rest of a small model.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.core.errors import DataError, OptionError, SystolicError
from systolic.core.files import digest
from systolic.data.audio import Recordings
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import Sentences, TextData
from systolic.formats.comparison import EXACT, FEW, probe_inputs
from systolic.formats.export import (
    ExportableRun,
    Exported,
    ExportSource,
    compared,
    kept_config,
    text_files,
)
from systolic.formats.hugging_face.writer import config_of, with_text
from systolic.formats.outline import positions_of
from systolic.formats.program.model import ExportedProgram
from systolic.formats.registry import in_files, known_source
from systolic.formats.source import Source, most_common, open_source
from systolic.formats.weights import weight_progress
from systolic.job import Data, Job, Quantization
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.families import Config
from systolic.runs.bundle.folder import (
    MANIFEST,
    ORIGIN,
    RECORDED,
    Bundle,
    BundleDraft,
    arrays,
    check_free,
    draft,
    model_record,
    open_bundle,
)
from systolic.runs.bundle.record import (
    EvaluationRecord,
    ImportedFrom,
    RecipeRecord,
    Recorded,
    RestoredTensor,
    finite_metrics,
    read_job,
    write_job,
)
from systolic.runs.bundle.tensors import TensorSpec, read_header, write
from systolic.runs.job_record import JobRecord, read_record
from systolic.runs.run import Run

if TYPE_CHECKING:
    import jax


ROW_BYTES = 1 << 20
"""Least size of a row of the first dim, such as a layer, that is a piece of its own."""
FILE = f"{RECORDED}outputs.safetensors"
MOST_BYTES = 1 << 24
"""Largest sample of another framework that is recorded."""
COLUMNS = 256
"""Most outputs of a position that are recorded."""
INPUT, OUTPUT, CHOSEN, BEST = "input:", "output", "columns", "largest"
"""Names of the arrays: inputs by name, outputs [rows, ..., columns], their columns, and the column of the largest output."""
PRECISION = "f32"
"""Compute dtype of outputs, with the most exact matmuls of a device."""


@dataclass(frozen=True, kw_only=True)
class BundleSource(Source):
    """The model of a Bundle."""

    bundle: Bundle
    made_from: ImportedFrom | None = None
    """The source of a Bundle that is only an intermediate step."""

    @property
    def dtype(self) -> str:
        """See :class:`Source`."""
        return self.bundle.record.dtype

    @property
    def quantization(self) -> Quantization:
        """See :class:`Source`."""
        return self.bundle.quantization

    def each(self, like: "Mapping[str, jax.ShapeDtypeStruct]") -> "Iterator[tuple[str, jax.Array]]":
        """See :class:`Source`."""
        return arrays(self.bundle, like)

    def dtypes(self) -> dict[str, np.dtype]:
        """See :class:`Source`."""
        return {path: tensor.dtype for path, tensor in self.bundle.tensors.items()}

    def pieces(self, path: str) -> Iterator[np.ndarray]:
        """See :class:`Source`."""
        tensor = self.bundle.tensors[path]
        if isinstance(tensor, RestoredTensor):
            yield from tensor.pieces()
            return
        rows = tensor.shape[0] if tensor.shape else 1
        if tensor.nbytes < ROW_BYTES * rows:
            yield tensor.read()
            return
        size, shape = tensor.nbytes // rows, tensor.shape[1:]
        for row in range(rows):
            yield replace(tensor, offset=tensor.offset + row * size, shape=shape).read()

    def files(self) -> dict[str, Path]:
        """See :class:`Source`."""
        own = [name for name in self.bundle.record.files if name != ORIGIN]
        skipped = (".safetensors", ".safetensors.index.json")
        return {name: self.path / name for name in own if not name.endswith(skipped)}

    def verify(self) -> None:
        """See :class:`Source`."""
        self.bundle.verify()

    def trained_job(self) -> Job | None:
        """See :class:`Source`."""
        job = read_job(self.bundle.record, self.model, self.path / MANIFEST)
        if job is None or self.tokenizer is None:
            return job
        data = _with_tokenizer(job.data, self.path)
        if isinstance(data, Instructions) and not data.positions:
            # A Bundle of an earlier version says it in the config.json of its base alone.
            data = replace(data, positions=positions_of(self.config, self.model, str(self.path)))
        return replace(job, data=data)

    def fingerprint(self) -> str:
        """See :class:`Source`."""
        return digest({name: about.sha256 for name, about in self.bundle.record.files.items()})


def _with_tokenizer(data: Data, folder: Path) -> Data:
    """Data that reads texts with the tokenizer in a folder; unchanged if it reads none."""
    if isinstance(data, TextData | Recordings):
        return data.with_tokenizer(folder)
    return replace(data, tokenizer=folder) if isinstance(data, Sentences) else data


def open_bundled(folder: Path) -> BundleSource:
    """A Bundle.

    Raises: as :func:`systolic.runs.bundle.folder.open_bundle`.
    """
    bundle = open_bundle(folder)
    origin, model = folder / ORIGIN, bundle.model
    if isinstance(model, ExportedProgram):
        model = replace(model, folder=folder)
    return BundleSource(
        path=folder,
        model=model,
        config=json.loads(origin.read_bytes()) if ORIGIN in bundle.record.files else {},
        kind="bundle",
        licence=bundle.record.source.licence,
        bundle=bundle,
    )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Differences of a model's outputs from the recorded ones."""

    rows: int
    positions: int
    """Vectors of outputs."""
    max_abs: float
    max_relative: float
    """Largest difference over the largest magnitude of a recorded output."""
    same_largest: float | None
    """Share of positions at which the same output is the largest; ``None`` for vectors, and for a program of another framework."""
    tolerance: float
    """Limit of ``max_relative``."""
    precision: str
    platform: str
    """Platform on which they were recorded."""

    @property
    def passed(self) -> bool:
        """Whether the largest difference is within the tolerance; not if it is no number."""
        return self.max_relative <= self.tolerance

    def line(self) -> str:
        """The figures on one line."""
        largest = (
            "" if self.same_largest is None else f", same largest output at {self.same_largest:.1%}"
        )
        return f"replayed {self.rows} recorded rows, {self.positions} positions, {self.precision}: max {self.max_abs:.2e} (relative {self.max_relative:.2e}, tolerance {self.tolerance:.0e}){largest}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "passed": self.passed}


def few_outputs(outputs: np.ndarray) -> np.ndarray:
    """Outputs of the rows of :func:`~systolic.formats.comparison.few`."""
    return outputs[:FEW]


def record(
    bundle: BundleDraft, inputs: Mapping[str, np.ndarray], outputs: np.ndarray, platform: str
) -> Recorded:
    """Adds inputs and outputs to a Bundle.

    Args:
        bundle: The Bundle.
        inputs: Arrays [rows, ...] by name.
        outputs: What the model makes of them, float32[rows, ..., n].
        platform: The devices that computed them.
    """
    size = outputs.shape[-1]
    chosen = np.unique(np.linspace(0, size - 1, min(size, COLUMNS)).astype(np.int32))
    arrays = {
        **{f"{INPUT}{name}": np.ascontiguousarray(input_) for name, input_ in inputs.items()},
        OUTPUT: np.ascontiguousarray(outputs[..., chosen], np.float32),
        CHOSEN: chosen,
        BEST: outputs.argmax(-1).astype(np.int32),
    }
    specs = [
        TensorSpec(name=n, shape=array.shape, dtype=array.dtype) for n, array in arrays.items()
    ]
    out = io.BytesIO()
    write(out, specs, arrays.values(), {"format": "systolic"})
    bundle.add(FILE, out.getvalue())
    return Recorded(file=FILE, precision=PRECISION, tolerance=EXACT, platform=platform)


def inputs_of(bundle: Bundle) -> dict[str, np.ndarray] | None:
    """Recorded inputs by name; ``None`` in a Bundle without any.

    Raises:
        DataError: the file holds something else.
    """
    if bundle.record.recorded is None:
        return None
    arrays = _arrays(bundle, bundle.record.recorded)
    return {
        name.removeprefix(INPUT): array for name, array in arrays.items() if name.startswith(INPUT)
    }


def replay(bundle: Bundle, outputs: np.ndarray) -> Replay:
    """Compares what the model makes of the recorded inputs with what it made of them.

    Args:
        bundle: The Bundle, which has recorded inputs.
        outputs: float32[rows, ..., n].

    Raises:
        DataError: the recorded outputs have another shape.
    """
    about = bundle.record.recorded
    assert about is not None
    arrays = _arrays(bundle, about)
    expected, chosen, best = arrays[OUTPUT], arrays[CHOSEN], arrays[BEST]
    if outputs.shape[:-1] != best.shape or chosen.max() >= outputs.shape[-1]:
        raise DataError(
            f"{bundle.folder / about.file} has outputs for {list(best.shape)} positions, and the model here gives {list(outputs.shape)}; export or import the model again"
        )
    away = np.abs(outputs[..., chosen] - expected)
    vectors = isinstance(bundle.model, Encoder) and not bundle.model.head
    return Replay(
        rows=len(expected),
        positions=best.size,
        max_abs=float(away.max()),
        max_relative=float(away.max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny)),
        same_largest=None if vectors else float((outputs.argmax(-1) == best).mean()),
        tolerance=about.tolerance,
        precision=about.precision,
        platform=about.platform,
    )


def _arrays(bundle: Bundle, about: Recorded) -> dict[str, np.ndarray]:
    if about.file not in bundle.record.files:
        raise DataError(f"bundle.json of {bundle.folder} does not list {about.file}; copy it again")
    arrays = {n: tensor.read() for n, tensor in read_header(bundle.folder / about.file)[0].items()}
    if not {OUTPUT, CHOSEN, BEST} < set(arrays) or not arrays[CHOSEN].size:
        raise DataError(
            f"{bundle.folder / about.file} holds no recorded outputs; export or import the model again"
        )
    return arrays


def record_answers(
    bundle: BundleDraft,
    about: Mapping[str, Any],
    answers: Callable[[Source, Mapping[str, np.ndarray]], tuple[np.ndarray, str]],
) -> Recorded | None:
    """Records the outputs of a written Bundle, opened as its user opens it; ``None`` for a class of models without probe inputs.

    Args:
        bundle: The Bundle, its weights and other files written.
        about: Fields of its bundle.json.
        answers: Computes outputs float32[rows, ..., n] of a source; returns them with the platform's name.
    """
    bundle.describe(**about)
    source = open_source(bundle.folder)
    inputs = probe_inputs(source)
    return None if inputs is None else record(bundle, inputs, *answers(source, inputs))


# Writing


def export_bundle(
    source: ExportSource, out: Path, options: None, say: Callable[[str], None]
) -> Exported:
    """Writes the model of a run as a Bundle: weights, the job they are used under, where they come from and their outputs.

    Args:
        source: The run.
        out: The Bundle's folder.
        options: The format has none.
        say: Called with each stage.

    Raises:
        OptionError: the path is a model in files already, or a part of the run is code of its recipe, or data in memory.
        TakenError: ``out`` exists.
        RunError: the disk is full, its model is of a class that no Bundle holds, or outputs differ.
    """
    del options
    path = source.path
    check_free(out)
    if (path / MANIFEST).is_file():
        raise OptionError(f"{path} is a Bundle already; copy its folder to {out}")
    if in_files(path):
        raise OptionError(
            f"{path} is a model in files already; write it as a Bundle with systolic import {path} --out {out}"
        )
    run = source.open_run()
    about = _about(run)
    weights = run.plain_weights
    specs = [TensorSpec(name=p, shape=a.shape, dtype=a.dtype) for p, a in weights.items()]
    config, files = _text(run, kept_config(run.path), text_files(run.job.data))
    with draft(out) as bundle:
        for name, content in files.items():
            bundle.add(name, content)
        if config:
            bundle.add(ORIGIN, json.dumps(dict(config), indent=2).encode())
        progress = weight_progress(sum(spec.nbytes for spec in specs), say)
        bundle.weights(specs, lambda p: iter([np.asarray(weights[p])]), progress)
        about["dtype"] = most_common(specs)
        say("recorded inputs")
        recorded = record_answers(bundle, about, source.answers)
        comparison = compared(source, bundle.folder, specs, say)
        bundle.finish(**about, recorded=recorded)
    return Exported.of(out, "bundle", specs, **comparison)


def _text(
    model: ExportableRun, origin: Config, files: dict[str, bytes]
) -> tuple[Config, dict[str, bytes]]:
    """The config.json of a language model, for what is exported further, and the files beside it; {} of any other."""
    job = model.job
    if not isinstance(job.model, Decoder) or not isinstance(job.data, TextData):
        return {}, files
    config = config_of(job.model, origin)
    return with_text(config, files, job.data) if config else ({}, files)


def run_digest(path: Path, step: int) -> str:
    """Digest of a run and a step of it, which a Bundle of it has as its origin's."""
    with Run.open(path) as run:
        return digest({"job": run.read_job(), "step": step})


def _about(model: ExportableRun) -> dict[str, Any]:
    """Fields of bundle.json about a run."""
    from systolic import __version__

    with Run.open(model.path) as run:
        record = read_record(run)
    own, types = write_job(model.job, model.path)
    return {
        "systolic": __version__,
        "model": model_record(model.job.model),
        "source": ImportedFrom(
            kind="run",
            name=model.path.resolve().name,
            digest=run_digest(model.path, model.step),
            licence=_licence(record),
        ),
        "job": own,
        "types": types,
        "recipe": None
        if record.recipe is None
        else RecipeRecord(name=record.recipe, options=dict(record.options)),
        "data": {split: asdict(contents) for split, contents in record.data.items()},
        "evaluations": evaluations_of(model.path, model.step),
    }


def _licence(record: JobRecord) -> str | None:
    """Licence of the model that a run began with; ``None`` where that is gone, or names none."""
    start = None if record.start is None else record.start.get("path")
    if start is None or not Path(start).exists() or not known_source(Path(start)):
        return None
    try:
        return open_source(start).licence
    except SystolicError:
        return None


def evaluations_of(path: Path, step: int) -> list[EvaluationRecord]:
    """The evaluation of each split that a run has on record for a step; that which read most, where there are several."""
    with Run.open(path) as run:
        records, record = list(run.records("eval")), read_record(run)
    best: dict[str, EvaluationRecord] = {}
    for entry in records:
        if entry.get("step") != step:
            continue
        split, data = str(entry["split"]), record.data.get(str(entry["split"]))
        evaluation = EvaluationRecord(
            on=split,
            metrics=finite_metrics(entry["metrics"]),
            step=step,
            batches=entry.get("batches"),
            of=entry.get("of"),
            data=None if data is None else data.digest,
        )
        if split not in best or (evaluation.batches or 0) >= (best[split].batches or 0):
            best[split] = evaluation
    return list(best.values())
