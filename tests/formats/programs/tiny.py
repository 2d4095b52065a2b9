"""Models of every kind, small enough to lower and compile in seconds, every parameter random."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from systolic.data.arrays import Arrays
from systolic.data.audio import Recordings, Writing
from systolic.data.text.documents import Prompts
from systolic.data.text.text_data import Sentences
from systolic.formats.inference import ALONE, ExportableModel, exportable
from systolic.job import Batch, Job, Model, Task
from systolic.job.data import MASK
from systolic.models.encoder.config import Encoder
from systolic.recipes.digits import digits
from systolic.runs.weights import Weights
from systolic.steps.step_functions import StepFunctions
from systolic.steps.tasks import Embedding, Transcription
from tests.models import encoders, images, speech
from tests.steps import tiny


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


@dataclass(frozen=True)
class Own(Model):
    def build(self, rngs: Any, target: Any) -> Any:
        return Perceptron(rngs)


@dataclass(frozen=True)
class Scores(Task):
    """Names outputs of the model beside its loss."""

    def terms(self, model: Any, batch: Any, train: bool) -> Any:
        return {"loss": (model(batch["x"])[:, 0] - batch["y"]) ** 2}

    def outputs(self, model: Any, batch: Any) -> Any:
        return {"score": model(batch["x"]) * batch["scale"][:, None]}


@dataclass(frozen=True)
class LossOnly(Task):
    def terms(self, model: Any, batch: Any, train: bool) -> Any:
        return {"loss": model(batch["x"])[:, 0]}


def own(task: Task) -> Job:
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(5, 3)), "scale": np.arange(5.0), "y": np.zeros(5)}
    data = Arrays.of(train={name: one.astype(np.float32) for name, one in rows.items()})
    return Job(name="own", model=Own(), task=task, data=data, steps=1, batch=Batch(total=1))


SMALL = Encoder(layers=2, d_model=32, d_ff=64, heads=4, vocab=384, positions=32, head=False)
WINDOWED = replace(tiny.MODEL, window=8, global_every=2, attention_cap=20.0, logit_cap=10.0)


def embeddings() -> Job:
    return encoders.job(model=SMALL, task=Embedding(), data=Sentences(sequence=32))


def decoder(model: Any = tiny.MODEL) -> Job:
    return tiny.job(model=model, data=Prompts(sequence=32))


def whisper() -> Job:
    model, writing = speech.TINY, Writing(prompt=(100, 98), end=99, suppressed=(3,))
    data = Recordings(
        writing=writing, sequence=model.positions, frames=model.frames, mels=model.mels
    )
    batch = Batch(total=1)
    return Job(name="w", model=model, task=Transcription(), data=data, steps=1, batch=batch)


def pictures(name: str) -> Job:
    of = images.steps(images.MODELS[name])
    rows = {key: one for key, one in images.batch(of).items() if key != MASK}
    return replace(of.job, data=Arrays.of(train=rows))


JOBS: Mapping[str, Any] = {
    "digits": digits,
    "decoder": decoder,
    "windows": lambda: decoder(WINDOWED),
    "sliding": lambda: decoder(replace(tiny.MODEL, window=8, global_every=2)),
    "learned": lambda: decoder(replace(tiny.MODEL, learned_positions=32)),
    "embeddings": embeddings,
    "masked": encoders.job,
    "whisper": whisper,
    "own": lambda: own(Scores()),
    **{
        name: lambda name=name: pictures(name)
        for name in ("resnet-basic", "mobilenet", "vit-token")
    },
}


def weights(job: Job) -> Weights:
    """Random weights of a job, nothing at its start such as zero matrices."""
    steps = local(job)
    rng = np.random.default_rng(0)

    def drawn(path: str, shape: tuple[int, ...]) -> np.ndarray:
        deviation = (0.01 + (len(shape) > 1) / np.prod(shape[:-1])) ** 0.5
        return path.endswith("scale") + rng.normal(0, deviation, shape).astype(np.float32)

    params = {path: drawn(path, of.shape) for path, of in steps.network.params.items()}
    rest = {
        path: np.full(of.shape, path.endswith("var"), of.dtype)
        for path, of in steps.network.model_state.items()
    }
    return Weights(step=0, params=params, model_state=rest, skipped=[])


def begun(job: Job) -> Weights:
    """The weights that a training begins with, each moved a little, so that no matrix is zero."""
    params, rest = jax.jit(local(job).network.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    params = {
        path: np.asarray(a) + 0.1 * rng.normal(size=a.shape).astype(np.float32)
        for path, a in params.items()
    }
    rest = {path: np.asarray(array) for path, array in rest.items()}
    return Weights(step=0, params=params, model_state=rest, skipped=[])


def local(job: Job) -> StepFunctions:
    """The programs that use a job here."""
    return tiny.steps(replace(job, layout=ALONE))


def model(job: Job, weights: Callable[[Job], Weights] = weights, **sizes: int) -> ExportableModel:
    made = weights(job)
    return exportable(job, {**made.params, **made.model_state}, sizes=sizes)
