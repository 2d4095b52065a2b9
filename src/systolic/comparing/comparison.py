"""Two models side by side: their sizes, quality and latency here, forecasts, and outputs for the same inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.text import Text

from systolic.comparing.speeds import ModelSpeeds, SpeedOptions, speeds_of
from systolic.core.errors import OptionError, called
from systolic.core.reporter import reporter
from systolic.core.units import with_article
from systolic.data.audio import Recordings
from systolic.data.input_files import InputFiles
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import Sentences, TextData
from systolic.data.text.tokenizer import Tokenizer
from systolic.formats.comparison import PASSAGE, ROWS, TOKENS, Cosine
from systolic.formats.registry import in_files
from systolic.inference.evaluation import AnswerOptions, check_answers, scores_of
from systolic.inference.model import TrainedModel, keep_programs, prepare_model
from systolic.job import Job
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.whisper.config import Whisper
from systolic.runs.bundle.folder import MANIFEST, RECORDED, open_bundle
from systolic.runs.bundle.record import EvaluationRecord
from systolic.runs.bundle.tensors import SUFFIX
from systolic.steps.lengths import longest_text

Named = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences between the outputs of two models."""

    rows: int
    positions: int
    """Number of output vectors: positions of texts, images …"""
    max_abs: float
    mean_abs: float
    max_relative: float
    """Largest difference relative to the largest magnitude of the first model's outputs."""
    same_best: float | None
    """Fraction of positions with the same argmax; ``None`` for embeddings."""
    best: str | None
    """Meaning of the argmax: ``greedy token``, ``class`` …; ``None`` for embeddings."""
    inputs: str
    """Description of the inputs."""
    cosine: Cosine | None = None
    """Cosine similarity of embeddings."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        same = str(self.cosine)
        if self.same_best is not None:
            same = f"same {self.best} at {self.same_best:.1%} of {self.positions}"
        return f"outputs on {self.inputs}: {same}, largest error {self.max_abs:.2e} (relative {self.max_relative:.2e}), mean {self.mean_abs:.2e}"


def agreement(a: "TrainedModel", b: "TrainedModel") -> Agreement | str:
    """Compares the outputs of two models on the same inputs; a one-line reason if they can't be compared."""
    if isinstance(a.job.data, Sentences) and isinstance(b.job.data, Sentences):
        texts = PASSAGE.splitlines()
        ours, theirs = ({"embedding": _embeddings(model, texts)} for model in (b, a))
        best, description = None, f"{len(texts)} lines of text"
    else:
        outputs = _outputs_of_both(a, b)
        if isinstance(outputs, str):
            return outputs
        best, (ours, theirs, description) = _best(a.job), outputs
    shapes = [{name: array.shape for name, array in side.items()} for side in (theirs, ours)]
    if shapes[0] != shapes[1]:
        return f"their outputs have different shapes, {_told(shapes[0])} and {_told(shapes[1])}"
    return _compared(ours, theirs, best, description)


def _embeddings(model: "TrainedModel", texts: Sequence[str]) -> np.ndarray:
    """Embeddings float32[texts, width], as ``predict`` returns them."""
    return np.asarray([prediction["embedding"] for prediction in model.predict(texts)], np.float32)


def _outputs_of_both(a: "TrainedModel", b: "TrainedModel") -> tuple[Named, Named, str] | str:
    """Outputs of the second and the first model and a description of the inputs; a reason if inputs differ."""
    shared = shared_inputs(a.job, b.job)
    if isinstance(shared, str):
        return shared
    inputs, description = shared
    ours, theirs = (_outputs(model, inputs) for model in (b, a))
    if _is_text(a.job):
        # A vocabulary may be padded at its end.
        size = min(ours["outputs"].shape[-1], theirs["outputs"].shape[-1])
        ours, theirs = ({"outputs": side["outputs"][..., :size]} for side in (ours, theirs))
    return ours, theirs, description


def shared_inputs(a: Job, b: Job) -> tuple[dict[str, np.ndarray], str] | str:
    """Inputs for both models and their description; a reason if the models take different inputs."""
    fields = [job.data.fields() for job in (a, b)]
    if _is_text(a) and _is_text(b):
        return _texts(a, b)
    if isinstance(a.model, Whisper) and isinstance(b.model, Whisper):
        return _speech(a.model, b.model)
    if isinstance(a.data, InputFiles) and isinstance(b.data, InputFiles):
        return _arrays(a.data, b.data)
    if all("image" in features for features in fields):
        shapes = [tuple(features["image"].shape) for features in fields]
        if shapes[0] != shapes[1]:
            return f"their images have different sizes, {list(shapes[0])} and {list(shapes[1])}"
        images = np.random.default_rng(0).integers(0, 256, (ROWS, *shapes[0])).astype(np.uint8)
        return {"image": images}, f"{ROWS} images of random bytes"
    return f"no common inputs are known for a {type(a.model).__name__} and a {type(b.model).__name__} with these tasks"


def _best(job: Job) -> str | None:
    """Meaning of the argmax; ``None`` if outputs are embeddings."""
    if isinstance(job.model, Encoder):
        return "token" if job.model.head else None
    return "greedy token" if isinstance(job.model, Decoder | Whisper) else "class"


def _is_text(job: Job) -> bool:
    return isinstance(job.model, Decoder | Encoder)


def _texts(a: Job, b: Job) -> tuple[dict[str, np.ndarray], str] | str:
    tokenizers = [_tokenizer(job) for job in (a, b)]
    if (
        None not in tokenizers
        and len({tokenizer.digest() for tokenizer in tokenizers if tokenizer}) > 1
    ):
        return "their tokenizers differ, so their outputs are for different tokens"
    models: list[Any] = [a.model, b.model]
    vocab = min(model.vocab for model in models)
    tokens = min(TOKENS, *(_positions(model) for model in models))
    first = tokenizers[0]
    ids = np.asarray(() if first is None or first.file() is None else first.encode(PASSAGE))
    description = f"{ROWS} rows of {tokens} tokens of text"
    if not ids.size or ids.max() >= vocab:
        ids = np.random.default_rng(0).integers(0, vocab, ROWS * tokens)
        description = f"{ROWS} rows of {tokens} random tokens"
    return {"tokens": np.resize(ids, (ROWS, tokens)).astype(np.int32)}, description


def _positions(model: Any) -> int:
    return model.positions if isinstance(model, Encoder) else model.learned_positions or TOKENS


def _tokenizer(job: Job) -> Tokenizer | None:
    if isinstance(job.data, TextData | Recordings):
        return job.data.get_tokenizer()
    return Tokenizer(path=job.data.tokenizer) if isinstance(job.data, Sentences) else None


def _speech(a: Whisper, b: Whisper) -> tuple[dict[str, np.ndarray], str] | str:
    if (a.frames, a.mels, a.vocab) != (b.frames, b.mels, b.vocab):
        return "their spectrogram sizes or vocabularies differ"
    random = np.random.default_rng(0)
    tokens = min(TOKENS, a.positions, b.positions)
    return {
        "features": random.normal(size=(ROWS, 2 * a.frames, a.mels)).astype(np.float32),
        "tokens": random.integers(0, a.vocab, (ROWS, tokens)).astype(np.int32),
    }, f"{ROWS} random spectrograms with {tokens} random tokens"


def _arrays(a: InputFiles, b: InputFiles) -> tuple[dict[str, np.ndarray], str] | str:
    if (a.inputs, a.repeated) != (b.inputs, b.repeated):
        return "their input arrays differ"
    rows = int(np.lcm(a.together, b.together))
    rows *= -(-ROWS // rows)
    random = np.random.default_rng(0)
    arrays = {}
    for name, array in a.inputs.items():
        shape = array.shape if name in a.repeated else (rows, *array.shape)
        kind = np.dtype(array.dtype).kind
        drawn = random.normal(size=shape) if kind == "f" else random.integers(0, 2, shape)
        arrays[name] = drawn.astype(array.dtype)
    return arrays, f"{rows} examples of random arrays"


def _outputs(model: "TrainedModel", inputs: Named) -> dict[str, np.ndarray]:
    """Outputs float32[rows, ..., n] by name."""
    steps, weights, data = model.setup.steps, model.weights, model.job.data
    if not isinstance(data, InputFiles):
        from systolic.formats.comparison import outputs_of

        return {"outputs": outputs_of(steps, weights, inputs)}
    from systolic.inference.predictions import RowPrograms, Runner

    rows = next(len(array) for name, array in inputs.items() if name not in data.repeated)
    examples = (
        {name: array if name in data.repeated else array[row] for name, array in inputs.items()}
        for row in range(rows)
    )
    each = list(Runner(RowPrograms(steps, weights), rows, data.together)(examples))
    return {name: np.stack([np.atleast_1d(outputs[name]) for outputs in each]) for name in each[0]}


def _compared(ours: Named, theirs: Named, best: str | None, description: str) -> Agreement:
    away = {name: np.abs(ours[name] - array).astype(np.float32) for name, array in theirs.items()}
    same = [ours[name].argmax(-1) == array.argmax(-1) for name, array in theirs.items()]
    count = sum(error.size for error in away.values())
    return Agreement(
        rows=len(next(iter(theirs.values()))),
        positions=sum(hits.size for hits in same),
        max_abs=max(float(error.max()) for error in away.values()),
        mean_abs=sum(float(error.sum(dtype=np.float64)) for error in away.values()) / count,
        max_relative=max(
            float(error.max()) / max(float(np.abs(theirs[name]).max()), 1e-30)
            for name, error in away.items()
        ),
        same_best=None
        if best is None
        else sum(int(hits.sum()) for hits in same) / sum(hits.size for hits in same),
        best=best,
        inputs=description,
        cosine=None if best else Cosine.of(*(next(iter(side.values())) for side in (ours, theirs))),
    )


def _told(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes.values())


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """One of the two."""

    path: Path
    kind: str
    """Class of its model."""
    task: str
    precision: str
    """Compute dtype here."""
    parameters: int
    """Elements of its weights; of a run with adapters those of its model, in which they are merged."""
    adapter_parameters: int
    """Elements of a run's adapters; 0 without."""
    bytes_by_dtype: Mapping[str, int]
    """Bytes of all weights in memory here, by dtype."""
    file_bytes: int | None
    """Bytes of the files with its weights; ``None`` for a run, whose checkpoints hold more."""
    recorded: Sequence[EvaluationRecord]
    """Evaluations that its run measured."""
    measured: Mapping[str, float] | None = None
    """Metrics on the data that both were given."""
    speeds: ModelSpeeds = field(default_factory=ModelSpeeds)

    @property
    def bytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(self.bytes_by_dtype.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "task": self.task,
            "precision": self.precision,
            "parameters": self.parameters,
            "adapter_parameters": self.adapter_parameters,
            "bytes": self.bytes,
            "bytes_by_dtype": dict(self.bytes_by_dtype),
            "file_bytes": self.file_bytes,
            "evaluations": msgspec.to_builtins(self.recorded),
            "measured": None if self.measured is None else dict(self.measured),
            **self.speeds.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of two models."""

    a: ComparedModel
    b: ComparedModel
    agreement: Agreement | None
    disagreement: str | None
    """Why their outputs were not compared; ``None`` where they were."""
    device: str
    """Device that measured them."""
    timed: Mapping[str, int]
    """Rows, tokens and repeats of the timed calls; {} without."""
    data: str | None
    """Data of the measured quality."""
    on: Sequence[str]
    """Slices of the forecasts."""

    def __repr__(self) -> str:
        """Both models and whether they agree, on one line."""
        outcome = str(self.agreement or self.disagreement)
        return f"<Comparison of {self.a.path} and {self.b.path}: {outcome}>"

    def _repr_html_(self) -> str:
        from systolic.comparing.view import lines
        from systolic.report.notebook import screen

        return screen([Text(line) for line in lines(self)])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "agreement": None if self.agreement is None else self.agreement.to_json(),
            "not_compared": self.disagreement,
            "device": self.device,
            "timed": dict(self.timed),
            "data": self.data,
            "on": list(self.on),
        }


def compared(
    paths: Sequence[Path],
    speeds: SpeedOptions,
    answers: AnswerOptions,
    *,
    data: Path | None,
    batches: int,
    trust: bool,
) -> Comparison:
    """Measures two models on the same inputs, in turn; see :func:`systolic.compare_models`."""
    warn, stage = reporter().warn, reporter().stage
    keep_programs()
    check_answers(answers, data)
    prepared = [prepare_model(path, trust=trust, warn=warn) for path in paths]
    _refuse_other_tasks(paths, [each.setup.job for each in prepared])
    stage("weights")
    models = [
        TrainedModel(path, each.setup, each.read(), warn)
        for path, each in zip(paths, prepared, strict=True)
    ]
    sides = [_described(model) for model in models]
    stage("the same inputs")
    agreed = agreement(*models)
    if data is not None:
        sequence = _common_rows(models, data)
        sides = [
            replace(side, measured=_measured(model, data, batches, sequence, answers))
            for side, model in zip(sides, models, strict=True)
        ]
    measured, timed = speeds_of(models, speeds, stage)
    sides = [replace(side, speeds=each) for side, each in zip(sides, measured, strict=True)]
    return Comparison(
        a=sides[0],
        b=sides[1],
        agreement=agreed if isinstance(agreed, Agreement) else None,
        disagreement=agreed if isinstance(agreed, str) else None,
        device=models[0].setup.machine.name,
        timed=timed,
        data=None if data is None else str(data),
        on=speeds.slices,
    )


def _refuse_other_tasks(paths: Sequence[Path], jobs: Sequence[Job]) -> None:
    """Raises OptionError for models that do different things."""
    names = [type(job.task).__name__ for job in jobs]
    if type(jobs[0].task) is not type(jobs[1].task):
        descriptions = [
            f"{path} is {with_article(type(job.model).__name__)} for {name}"
            for path, job, name in zip(paths, jobs, names, strict=True)
        ]
        raise OptionError(f"{' and '.join(descriptions)}; compare two models of one task")


def _described(model: TrainedModel) -> ComparedModel:
    from systolic.runs.weights import sizes_of

    job, weights = model.job, model.weights
    frozen = model.setup.steps.network.frozen
    held = {path: array for path, array in weights.model_state.items() if path in frozen}
    counted = held if job.adapter else weights.params | held
    return ComparedModel(
        path=model.path,
        kind=type(job.model).__name__,
        task=type(job.task).__name__,
        precision=job.precision.resolve(model.setup.machine.platform).value,
        parameters=sizes_of(counted).elements,
        adapter_parameters=sizes_of(weights.params).elements if job.adapter else 0,
        bytes_by_dtype=sizes_of({**weights.params, **weights.model_state}).bytes_by_dtype,
        file_bytes=_file_bytes(model.path),
        recorded=_recorded(model),
    )


def _file_bytes(path: Path) -> int | None:
    """Bytes of the files of a model's weights."""
    if not in_files(path):
        return None
    from systolic.formats.bundle import BundleSource
    from systolic.formats.source import TransformersSource, open_source

    source = open_source(path)
    if isinstance(source, BundleSource):
        own = source.bundle.record.files.items()
        return sum(
            file.bytes
            for name, file in own
            if name.endswith(SUFFIX) and not name.startswith(RECORDED)
        )
    if isinstance(source, TransformersSource):
        return sum(file.stat().st_size for file in source.weight_files)
    return None


def _recorded(model: TrainedModel) -> Sequence[EvaluationRecord]:
    """Evaluations of the weights that the run, or the Bundle, has on record."""
    from systolic.formats.bundle import evaluations_of

    if not in_files(model.path):
        return evaluations_of(model.path, model.step)
    if (model.path / MANIFEST).is_file():
        return open_bundle(model.path).record.evaluations
    return ()


@called("--data")
def _common_rows(models: Sequence[TrainedModel], data: Path) -> int | None:
    """Tokens of a row for both where the data is conversations, so that they are cut at the same place: the longer row, at most what both models take."""
    jobs = [model.job_on(data) for model in models]
    sizes = [job.data.sequence for job in jobs if isinstance(job.data, Instructions)]
    limits = [most for job in jobs if (most := longest_text(job)) is not None]
    return min([max(sizes), *limits]) if len(sizes) == len(jobs) else None


@called("--data")
def _measured(
    model: TrainedModel, data: Path, batches: int, sequence: int | None, answers: AnswerOptions
) -> Mapping[str, float]:
    """Metrics of a model on the data, those of its answers among them."""
    stage = reporter().stage
    stage(f"{model.path.name} on {data}")
    (metrics,) = model.evaluate(path=data, batches=batches, sequence=sequence).values()
    return metrics | scores_of(model, data, answers, stage)
