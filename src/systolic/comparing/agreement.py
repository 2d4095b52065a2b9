"""Comparison of the outputs of two models on the same inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from systolic.data.audio.recordings import Recordings
from systolic.data.input_files import InputFiles
from systolic.data.text.sentences import Sentences
from systolic.data.text.text_data import TextData
from systolic.data.text.tokenizer import Tokenizer
from systolic.formats.comparison import Cosine
from systolic.formats.probe import PASSAGE, ROWS, TOKENS
from systolic.job import Job
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.whisper.config import Whisper

if TYPE_CHECKING:
    from systolic.inference.model import TrainedModel

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
        best, told = None, f"{len(texts)} lines of text"
    else:
        found = _outputs_of_both(a, b)
        if isinstance(found, str):
            return found
        best, (ours, theirs, told) = _best(a.job), found
    shapes = [{name: one.shape for name, one in side.items()} for side in (theirs, ours)]
    if shapes[0] != shapes[1]:
        return f"their outputs have different shapes, {_told(shapes[0])} and {_told(shapes[1])}"
    return _compared(ours, theirs, best, told)


def _embeddings(model: "TrainedModel", texts: Sequence[str]) -> np.ndarray:
    """Embeddings float32[texts, width], as ``predict`` returns them."""
    return np.asarray([one["embedding"] for one in model.predict(texts)], np.float32)


def _outputs_of_both(a: "TrainedModel", b: "TrainedModel") -> tuple[Named, Named, str] | str:
    """Outputs of the second and the first model and a description of the inputs; a reason if inputs differ."""
    found = shared_inputs(a.job, b.job)
    if isinstance(found, str):
        return found
    inputs, told = found
    ours, theirs = (_outputs(model, inputs) for model in (b, a))
    if _is_text(a.job):
        # A vocabulary may be padded at its end.
        size = min(ours["outputs"].shape[-1], theirs["outputs"].shape[-1])
        ours, theirs = ({"outputs": one["outputs"][..., :size]} for one in (ours, theirs))
    return ours, theirs, told


def shared_inputs(a: Job, b: Job) -> tuple[dict[str, np.ndarray], str] | str:
    """Inputs for both models and their description; a reason if the models take different inputs."""
    fields = [job.data.fields() for job in (a, b)]
    if _is_text(a) and _is_text(b):
        return _texts(a, b)
    if isinstance(a.model, Whisper) and isinstance(b.model, Whisper):
        return _speech(a.model, b.model)
    if isinstance(a.data, InputFiles) and isinstance(b.data, InputFiles):
        return _arrays(a.data, b.data)
    if all("image" in one for one in fields):
        shapes = [tuple(one["image"].shape) for one in fields]
        if shapes[0] != shapes[1]:
            return f"their images have different sizes, {list(shapes[0])} and {list(shapes[1])}"
        made = np.random.default_rng(0).integers(0, 256, (ROWS, *shapes[0])).astype(np.uint8)
        return {"image": made}, f"{ROWS} images of random bytes"
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
    if None not in tokenizers and len({one.digest() for one in tokenizers if one}) > 1:
        return "their tokenizers differ, so their outputs are for different tokens"
    models: list[Any] = [a.model, b.model]
    vocab = min(model.vocab for model in models)
    tokens = min(TOKENS, *(_positions(model) for model in models))
    first = tokenizers[0]
    ids = np.asarray(() if first is None or first.file() is None else first.encode(PASSAGE))
    told = f"{ROWS} rows of {tokens} tokens of text"
    if not ids.size or ids.max() >= vocab:
        ids = np.random.default_rng(0).integers(0, vocab, ROWS * tokens)
        told = f"{ROWS} rows of {tokens} random tokens"
    return {"tokens": np.resize(ids, (ROWS, tokens)).astype(np.int32)}, told


def _positions(model: Any) -> int:
    if isinstance(model, Encoder):
        return model.positions
    return model.learned_positions or TOKENS


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
    made = {}
    for name, field in a.inputs.items():
        shape = field.shape if name in a.repeated else (rows, *field.shape)
        kind = np.dtype(field.dtype).kind
        drawn = random.normal(size=shape) if kind == "f" else random.integers(0, 2, shape)
        made[name] = drawn.astype(field.dtype)
    return made, f"{rows} examples of random arrays"


def _outputs(model: "TrainedModel", inputs: Named) -> dict[str, np.ndarray]:
    """Outputs float32[rows, ..., n] by name."""
    steps, weights, data = model.setup.steps, model.weights, model.job.data
    if not isinstance(data, InputFiles):
        from systolic.formats.probe import outputs_of

        return {"outputs": outputs_of(steps, weights, inputs)}
    from systolic.inference.predictions import Runner

    rows = next(len(one) for name, one in inputs.items() if name not in data.repeated)
    examples = (
        {name: one if name in data.repeated else one[row] for name, one in inputs.items()}
        for row in range(rows)
    )
    each = list(Runner(steps, weights, rows, data.together)(examples))
    return {name: np.stack([np.atleast_1d(one[name]) for one in each]) for name in each[0]}


def _compared(ours: Named, theirs: Named, best: str | None, told: str) -> Agreement:
    away = {name: np.abs(ours[name] - one).astype(np.float32) for name, one in theirs.items()}
    same = [ours[name].argmax(-1) == one.argmax(-1) for name, one in theirs.items()]
    count = sum(one.size for one in away.values())
    return Agreement(
        rows=len(next(iter(theirs.values()))),
        positions=sum(one.size for one in same),
        max_abs=max(float(one.max()) for one in away.values()),
        mean_abs=sum(float(one.sum(dtype=np.float64)) for one in away.values()) / count,
        max_relative=max(
            float(one.max()) / max(float(np.abs(theirs[name]).max()), 1e-30)
            for name, one in away.items()
        ),
        same_best=None
        if best is None
        else sum(int(one.sum()) for one in same) / sum(one.size for one in same),
        best=best,
        inputs=told,
        cosine=None if best else Cosine.of(*(next(iter(one.values())) for one in (ours, theirs))),
    )


def _told(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes.values())
