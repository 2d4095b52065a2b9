"""A model with its matrices in fewer bits, as a Bundle, and what that costs in quality."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from systolic.core.errors import OptionError, SystolicError, called
from systolic.core.files import check_room
from systolic.core.reporter import reporter
from systolic.formats.bundle import BundleSource, few_outputs, record, record_answers
from systolic.formats.comparison import PROBES, Parity, compare, few, probe_of
from systolic.formats.exporting import export_model
from systolic.formats.jobs import job_of
from systolic.formats.source import Source, open_source
from systolic.formats.weights import weight_progress
from systolic.inference.evaluation import NO_ANSWERS, AnswerOptions, check_answers, scores_of
from systolic.inference.model import (
    Metrics,
    TrainedModel,
    answers,
    keep_programs,
    prepare_model,
    set_up_here,
)
from systolic.job import Adapter, Job, MatrixFormat
from systolic.quantizing.calibration import (
    check_apart,
    check_calibration,
    check_run,
    digests_at,
    largest_of,
    moments_of,
)
from systolic.quantizing.sensitivity import Choice, Measure, Quality, choose
from systolic.runs.bundle.folder import (
    ORIGIN,
    BundleDraft,
    check_free,
    draft,
    model_record,
)
from systolic.runs.bundle.record import ImportedFrom, Recorded, carried
from systolic.runs.run import JOB

if TYPE_CHECKING:
    from systolic.comparing.speeds import ModelSpeeds
    from systolic.formats.matrices import Matrix
    from systolic.quantizing.rounder import Rounder

MOST_LOST = {"accuracy": 0.1, "perplexity": 0.2, "loss": 0.2}
"""Loss of quality from which a model is said to have fallen far: of accuracy 10 points, else relative."""
MOST_APART = 0.5
"""The same of the outputs of a probe where there is no data: their mean difference, over the mean distance of the source's outputs from the middle
of their row."""
PLAIN = "weights before quantization"
"""Name of the model that a quantized model's outputs are compared with."""
Chosen = tuple["Rounder", Mapping[str, MatrixFormat]]
"""Rounder of a source's matrices, and the formats of those that are quantized."""


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A matrix, or a stack of those of all layers."""

    path: str
    format: str
    """``bfloat16`` and the like for one that was kept."""
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A quantized Bundle, compared with the model that it was made from."""

    path: Path
    asked: MatrixFormat
    """Format of the matrices that was asked for."""
    bytes_before: int
    """Bytes of all weights."""
    bytes_after: int
    matrices: Sequence[QuantizedMatrix]
    left: Sequence[QuantizedMatrix]
    """Parameters that are no matrices to quantize, the largest first."""
    before: Quality | None
    """``None`` where there was no data."""
    after: Quality | None
    answers_before: Mapping[str, float]
    """Means of the metrics of answers; {} without."""
    answers_after: Mapping[str, float]
    outputs: Parity | None
    """Outputs of the quantized model beside those of the other on a probe; ``None`` for a kind of model without one."""
    choice: Choice | None = None
    """Sensitivities, where the formats were chosen by a budget."""
    apart: float | None = None
    """See :data:`MOST_APART`; ``None`` for a kind of model without a probe."""
    measurable: bool = True
    """Whether quality can be measured on data that is given."""
    unmeasured: str | None = None
    """Why a run's own data was not read; ``None`` where it was, or other was given."""
    notes: tuple[str, ...] = ()
    """Notes on the weights."""
    seconds: float = 0.0
    """Time of the work."""
    speeds: "Sequence[ModelSpeeds]" = ()
    """Speeds of the model and of the Bundle; () where none were asked for."""
    timed: Mapping[str, int] = field(default_factory=dict)
    """Sizes of a timed call, and how often it was made; {} without."""
    stopped_by: SystolicError | KeyboardInterrupt | None = None
    """Interrupt or error that ended the timing of the Bundle once it was written."""

    def __repr__(self) -> str:
        """Sizes and quality on one line; the model itself has every matrix."""
        lost = "" if self.lost is None else f", {self.lost:+.2%} of quality lost"
        return f"<QuantizedModel {self.path}: {self.asked}, {self.bytes_before:,} bytes to {self.bytes_after:,}{lost}>"

    def _repr_html_(self) -> str:
        from systolic.quantizing.view import lines, title
        from systolic.report.notebook import screen

        return screen([Text(line) for line in (f"{self.path}: {title(self)}", *lines(self))])

    @property
    def lost(self) -> float | None:
        """Share of the quality that the Bundle lost; ``None`` where there was no data."""
        if self.before is None or self.after is None:
            return None
        return self.after.lost(self.before)

    @property
    def budget_met(self) -> bool | None:
        """Whether the Bundle as it was written keeps the budget; ``None`` without one."""
        if self.choice is None or self.lost is None:
            return None
        return self.lost <= self.choice.budget

    @property
    def fell(self) -> bool:
        """Whether quality fell far, or outputs where it was not measured: the model is hardly the same."""
        if self.lost is not None and self.before is not None:
            return not self.lost <= MOST_LOST[self.before.name]
        return self.apart is not None and not self.apart <= MOST_APART

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bundle": str(self.path),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "matrices": [asdict(matrix) for matrix in self.matrices],
            "left": [asdict(matrix) for matrix in self.left],
            "before": None if self.before is None else asdict(self.before),
            "after": None if self.after is None else asdict(self.after),
            "answers_before": dict(self.answers_before),
            "answers_after": dict(self.answers_after),
            "outputs": None if self.outputs is None else self.outputs.to_json(),
            "choice": None if self.choice is None else self.choice.to_json(),
            "budget_met": self.budget_met,
            "fell": self.fell,
            "unmeasured": self.unmeasured,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "speeds": [speed.to_json() for speed in self.speeds],
            "timed": dict(self.timed),
        }


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Data that quality is measured on."""

    data: Path | None = None
    """Other data than a run's own."""
    batches: int = 0
    """The first so many; 0 for all."""
    answers: AnswerOptions = NO_ANSWERS
    """How answers to the conversations of ``data`` are scored."""
    calibration: Path | None = None
    """Other data, to whose inputs of the matrices codes of 4 bits and scales of activations are fitted; ``None`` fits codes to the weights alone, and
    scales to a run's own training data."""


def quantize(
    path: Path,
    out: Path,
    *,
    to: MatrixFormat,
    keep: Sequence[str] = (),
    on: Evaluated = Evaluated(),
    budget: float | None = None,
    trust: bool = False,
) -> QuantizedModel:
    """Writes a run or a model in files as a Bundle with its matrices in fewer bits, and measures quality.

    ``to`` is the format of the matrices that the model names, ``budget`` the largest loss of quality, such as 0.005; all else is as for
    :func:`systolic.quantize_model`.

    Raises: as :func:`systolic.quantize_model`.
    """
    check_free(out)
    check_answers(on.answers, on.data)
    from systolic.formats.matrices import formats_of, matrices_in, planned_tensors

    run, unmeasured = _known(path, to, keep, on, budget, trust)
    measured = on.data is not None or (run is not None and unmeasured is None)
    with _as_source(path, out, trust) as source:
        source.verify()
        matrices = matrices_in(source)
        formats = formats_of(matrices, to, keep)
        check_room(out, sum(tensor.nbytes for tensor in planned_tensors(source, matrices, formats)))
        check_calibration(on.data, on.calibration, formats, is_run=run is not None)
        job = run or job_of(source, texts=on.data is not None or on.calibration is not None)
        _check_data(path, job, on, budget, measured=measured)
        reporter().stage("reading weights")
        model = _opened(source, job)
        rounder = _rounder(model, matrices, formats, on.calibration)
        reporter().stage("quality before")
        measure = _measure(model, on) if measured else None
        choice = None
        if budget is not None and measure is not None:
            measure.keep(source.fingerprint(), *measure.where, *digests_at(job, on.calibration))
            choice = choose(measure, rounder, formats, budget)
            formats = dict(choice.formats)
        before = _Figures.of(model, source, measure, on)
        del model, measure
        after = _write_bundle(source, out, (rounder, formats), (job, before, on))
        quantized = _result((out, to), source, (rounder, formats), (before, after), choice)
        known = measured or job.data.read_elsewhere
        return replace(quantized, measurable=known, unmeasured=unmeasured, notes=_notes(job, to))


def _known(
    path: Path,
    to: MatrixFormat,
    keep: Sequence[str],
    on: Evaluated,
    budget: float | None,
    trust: bool,
) -> tuple[Job | None, str | None]:
    """A run's job, and why its own data can't be measured on; what it lacks is refused before its weights are read. ``None`` of a model in files."""
    if not (path / JOB).is_file():
        return None, None
    from systolic.formats.matrices import formats_of, matrices_of_model

    job = prepare_model(path, trust=trust).setup.job
    matrices = matrices_of_model(job.model)
    formats = formats_of(matrices, to, keep) if matrices else {}
    return job, check_run(job, formats, on.data, on.calibration, budget)


def _notes(job: Job, to: MatrixFormat) -> tuple[str, ...]:
    """That weights of quantization-aware training go to another format than theirs."""
    kind = job.precision.weight_format
    if kind is None or to == (own := MatrixFormat(format=kind, group=kind.group)):
        return ()
    return (
        f"trained with {job.precision.value}, which rounds weights to {own}, and {to} rounds them otherwise; systolic quantize --to {kind.value} writes those that it was trained with",
    )


@called("--data")
def _measure(model: TrainedModel, on: Evaluated) -> Measure:
    return Measure(model, on.data, on.batches)


def _check_data(
    path: Path, job: Job, on: Evaluated, budget: float | None, *, measured: bool
) -> None:
    """Refuses calibration by data that quality is measured on, and a budget for a model without data.

    Raises:
        OptionError: so.
    """
    if measured:
        check_apart(job, on.data, on.calibration)
    elif budget is not None:
        cure = "leave the budget out: this kind of model has no measure of quality here"
        if job.data.read_elsewhere:
            cure = "give the text or pictures with --data"
        raise OptionError(
            f"a budget needs data to measure the loss on, and {path} brings none; {cure}"
        )


@called("--calibrate")
def _rounder(
    model: TrainedModel,
    matrices: "Mapping[str, Matrix]",
    formats: Mapping[str, MatrixFormat],
    calibration: Path | None,
) -> "Rounder":
    """Rounder whose codes are fitted to the inputs that calibration data gives the matrices."""
    from systolic.quantizing.rounder import Rounder

    if any(how.format.activations for how in formats.values()):
        return Rounder(matrices, largest_of(model, matrices, formats, calibration))
    kind = model.job.precision.weight_format
    trained = None if kind is None else MatrixFormat(format=kind, group=kind.group)
    plain = Rounder(matrices, trained=trained)
    if calibration is None:
        return plain
    narrow = {path: how for path, how in formats.items() if how.format.bits == 4}
    fitted = {path: how for path, how in narrow.items() if not plain.trained(path, how)}
    if narrow and not fitted:
        raise OptionError(
            f"the weights were trained as {trained} rounds them, and --calibrate would round them otherwise; leave it out"
        )
    return Rounder(matrices, moments_of(model, matrices, fitted, calibration), trained)


def _write_bundle(
    source: Source,
    out: Path,
    chosen: Chosen,
    known: "tuple[Job, _Figures, Evaluated]",
) -> "_Figures":
    """Writes the Bundle and opens it as a user does, before it has its name; its figures."""
    job, before, on = known
    with draft(out) as bundle:
        about = _write(source, bundle, chosen)
        reporter().stage("quality after")
        model = _opened(open_source(bundle.describe(**about).folder), job)
        measure = None if before.metrics is None else _measure(model, on)
        after = _Figures.of(model, source, measure, on)
        if measure is not None and before.metrics is not None:
            about["evaluations"] = [measure.record(before.metrics, _step(source))]
        if after.outputs is not None:
            about["recorded"] = _recorded(source, bundle, about, (model, after.outputs))
        bundle.finish(**about)
    return after


def _step(source: Source) -> int:
    """Training step of a source's weights, where it has an evaluation of them on record; else 0."""
    known = source.bundle.record.evaluations if isinstance(source, BundleSource) else []
    return max((evaluation.step for evaluation in known), default=0)


def _recorded(
    source: Source,
    bundle: BundleDraft,
    about: Mapping[str, Any],
    known: tuple[TrainedModel, Any],
) -> Recorded | None:
    """Records what the Bundle answers to the first inputs of its probe: outputs that are known, where they were made in float32."""
    model, outputs = known
    if model.setup.steps.target.dtype != "float32":
        return record_answers(bundle, about, answers)
    inputs = few(probe_of(source).ours)
    return record(bundle, inputs, few_outputs(outputs), model.setup.machine.platform)


def _result(
    written: tuple[Path, MatrixFormat],
    source: Source,
    chosen: Chosen,
    figures: "tuple[_Figures, _Figures]",
    choice: Choice | None,
) -> QuantizedModel:
    from systolic.formats.matrices import planned_tensors

    (rounder, formats), (before, after), (out, target) = chosen, figures, written
    matrices = rounder.matrices
    plain = planned_tensors(source, matrices, {})
    left = sorted(
        (tensor for tensor in plain if tensor.name not in matrices),
        key=lambda tensor: -tensor.nbytes,
    )
    after_bytes = sum(spec.nbytes for spec in planned_tensors(source, matrices, formats))
    return QuantizedModel(
        path=out,
        asked=target,
        bytes_before=sum(spec.nbytes for spec in plain),
        bytes_after=after_bytes,
        left=[
            QuantizedMatrix(
                path=tensor.name,
                format=tensor.dtype.name,
                bytes_before=tensor.nbytes,
                bytes_after=tensor.nbytes,
            )
            for tensor in left
        ],
        matrices=[_described(matrix, formats.get(matrix.path)) for matrix in matrices.values()],
        before=before.quality,
        after=after.quality,
        answers_before=before.answers,
        answers_after=after.answers,
        outputs=after.beside(before, source),
        apart=after.apart(before),
        choice=choice,
    )


@contextmanager
def _as_source(path: Path, out: Path, trust: bool) -> Generator[Source]:
    """A model in files; a run is written as a Bundle beside ``out`` for the time of the block."""
    if not (path / JOB).is_file():
        yield open_source(path)
        return
    with draft(out) as scratch:
        whole = scratch.folder / path.resolve().name
        try:
            export_model(path, whole, to="bundle", trust=trust)
        except OptionError as error:
            reason = str(error).partition("; ")[0]
            raise OptionError(
                f"a quantized model is a Bundle, and {reason}; quantize a run that has one"
            ) from error
        opened = open_source(whole)
        assert isinstance(opened, BundleSource)
        yield replace(opened, made_from=opened.bundle.record.source)


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """Quality and outputs of a model."""

    quality: Quality | None
    metrics: Metrics | None
    """All of the evaluation; ``None`` where there is no data."""
    outputs: Any
    """float32[rows, ..., n] for the probe of its kind; ``None`` where there is none."""
    answers: Mapping[str, float]
    """Scores of its answers to conversations; {} without."""

    @classmethod
    def of(
        cls, model: TrainedModel, source: Source, measure: Measure | None, on: Evaluated
    ) -> "_Figures":
        from systolic.formats.comparison import outputs_of

        outputs = None
        if type(source.model) in PROBES:
            outputs = outputs_of(model.setup.steps, model.weights, probe_of(source).ours)
        if measure is None:
            return cls(quality=None, metrics=None, outputs=outputs, answers={})
        answers = {} if on.data is None else scores_of(model, on.data, on.answers)
        return cls(
            quality=measure.before, metrics=measure.metrics, outputs=outputs, answers=answers
        )

    def beside(self, before: "_Figures", source: Source) -> Parity | None:
        """Differences from the outputs before."""
        if self.outputs is None or before.outputs is None:
            return None
        probe = probe_of(source)
        return compare(self.outputs, before.outputs, PLAIN, math.inf, probe)

    def apart(self, before: "_Figures") -> float | None:
        """Mean difference from the outputs before, over their mean distance from the middle of their row."""
        if self.outputs is None or before.outputs is None:
            return None
        with np.errstate(all="ignore"):  # No finite outputs have no finite differences.
            middle = before.outputs.mean(-1, keepdims=True)
            spread = np.abs(before.outputs - middle).mean(dtype=np.float64)
            return float(np.abs(self.outputs - before.outputs).mean(dtype=np.float64) / spread)


def _opened(source: Source, job: Job) -> TrainedModel:
    """A source's model under a job with its data; adapters of a run are merged in its files."""
    from systolic.formats.weights import weights_of
    from systolic.quantizing.rounder import check_finite

    keep_programs()
    plain = replace(job, adapter=Adapter(), start=None, quantization=source.quantization)
    setup = set_up_here(plain)
    weights = weights_of(source, setup.steps)
    check_finite(weights)
    return TrainedModel(source.path, setup, weights, None)


def _write(
    source: Source,
    bundle: BundleDraft,
    chosen: Chosen,
) -> dict[str, Any]:
    """Writes weights and other files of a draft; what its bundle.json says."""
    from systolic import __version__
    from systolic.formats.matrices import planned_tensors
    from systolic.quantizing.rounder import write_quantized

    rounder, formats = chosen
    size = sum(spec.nbytes for spec in planned_tensors(source, rounder.matrices, formats))
    progress = weight_progress(size, reporter().stage)
    records = write_quantized(source, bundle, rounder, formats, progress)
    for name, file in source.files().items():
        bundle.add(name, file.read_bytes())
    if source.config:
        bundle.add(ORIGIN, source.config_bytes())
    return {
        "systolic": __version__,
        "model": model_record(source.model),
        "source": origin_of_bundle(source),
        "dtype": source.dtype,
        "quantization": records,
        **(carried(source.bundle.record) if isinstance(source, BundleSource) else {}),
    }


def origin_of_bundle(source: Source) -> ImportedFrom:
    """Origin of a quantized Bundle: the model that it was made from."""
    if isinstance(source, BundleSource) and source.made_from is not None:
        return source.made_from
    return ImportedFrom(
        kind=source.kind,
        name=source.path.resolve().name,
        digest=source.fingerprint(),
        licence=source.licence,
    )


def _described(matrix: "Matrix", how: MatrixFormat | None) -> QuantizedMatrix:
    return QuantizedMatrix(
        path=matrix.path,
        format=matrix.dtype.name if how is None else str(how),
        bytes_before=matrix.bytes(None),
        bytes_after=matrix.bytes(how),
    )
