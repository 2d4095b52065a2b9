"""A language job small enough to compile in seconds, on random tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from systolic.job import Batch, Data, Field, Job, Layout, Optimizer, Read
from systolic.job.data import MASK
from systolic.models.decoder.config import Decoder
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from systolic.steps.tasks import LanguageModel, Unit

MODEL = Decoder(layers=4, d_model=32, d_ff=64, heads=4, kv_heads=2, head_dim=8, vocab=64)


@dataclass(frozen=True)
class Tokens(Data):
    """Shapes only; batches come from :func:`batch`."""

    sequence: int = 32

    def fields(self) -> Mapping[str, Field]:
        row = Field(shape=(self.sequence,), dtype="int32", axes=("sequence",))
        return dict.fromkeys(("tokens", "targets", "segments", "positions"), row)

    def size(self, split: Any) -> None:
        return None

    def open(self, read: Read) -> Any:
        raise NotImplementedError


def job(**changes: Any) -> Job:
    given = {
        "name": "tiny",
        "model": MODEL,
        "task": LanguageModel(unit=Unit.byte, router_loss=0.01),
        "data": Tokens(),
        "steps": 20,
        "batch": Batch(total=16),
        "optimizer": Optimizer(learning_rate=1e-2),
    }
    return Job(**{**given, **changes})


def steps(of: Job, num_devices: int = 1, dtype: str = "float32") -> StepFunctions:
    of = replace(of, layout=of.layout.on(num_devices))
    mesh = make_mesh(of.layout, jax.devices()[:num_devices])
    return StepFunctions(of, MeshTarget(platform="cpu", layout=of.layout, dtype=dtype, mesh=mesh))


def batch(of: StepFunctions, seed: int) -> dict[str, jax.Array]:
    """Learnable tokens in three documents a row."""
    rng = np.random.default_rng(seed)
    size, sequence = of.batch_size, of.job.data.fields()["tokens"].shape[0]
    raw = rng.integers(0, 64, (size, sequence + 1)).astype(np.int32)
    raw = (raw * raw // 100) % 64
    segments = np.sort(rng.integers(1, 4, (size, sequence)), axis=1).astype(np.int32)
    starts = np.array([[row.tolist().index(s) for s in row] for row in segments], np.int32)
    arrays = {
        "tokens": raw[:, :-1],
        "targets": raw[:, 1:],
        "segments": segments,
        "positions": np.arange(sequence, dtype=np.int32) - starts,
        MASK: np.ones(size, np.float32),
    }
    return {name: jax.device_put(a, of.batch_shardings[name]) for name, a in arrays.items()}


_WEIGHTS: dict[Any, Any] = {}


def weights(of: StepFunctions) -> Any:
    """Parameters and variables that a model starts with on one device, drawn once for all optimizers, layouts and dtypes."""
    key = (of.job.model, of.job.adapter, of.job.quantization)
    if key not in _WEIGHTS:
        _WEIGHTS[key] = jax.jit(of.network.init)(jax.random.key(0))
    return _WEIGHTS[key]


class Trainer:
    """The first state and the train step of a job, each compiled once; steps are taken once."""

    def __init__(self, of: StepFunctions) -> None:
        self.of = of
        if len(of.target.mesh.devices.flat) > 1:
            self.first = jax.jit(of.init, out_shardings=of.shardings)(jax.random.key(0))
        else:
            self.first = jax.jit(of._first, out_shardings=of.shardings)(*weights(of))
        train = jax.jit(
            of.train,
            in_shardings=(of.shardings, of.batch_shardings),
            out_shardings=(of.shardings, None),
        )
        self.train = train.lower(self.first, batch(of, 0)).compile()
        # On a CPU JAX (0.10.2) refuses codes of 4 bits as arguments of a program that was compiled ahead.
        codes = [one for one in self.first.model_state.values() if one.dtype == "uint4"]
        self._step = train if codes else self.train
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._states = [self.first]

    def run(self, count: int = 3) -> tuple[list[float], Any]:
        """The losses of the first steps, and the state after them."""
        for index in range(len(self.losses), count):
            state, metrics = self._step(self._states[-1], batch(self.of, index))
            self._states.append(state)
            self.losses.append(float(metrics["loss"]))
            self.norms.append(float(metrics["grad_norm"]))
        return self.losses[:count], self._states[count]

    def program(self) -> str:
        """The compiled train step."""
        return self.train.as_text() or ""

    def gradients(self) -> dict[str, list[float]]:
        """Of the first batch's loss by each parameter, as AdamW keeps them: sum and norm; and the norm of all."""
        _, state = self.run(1)
        kept = {path: np.asarray(one, np.float64) for path, one in state.optimizer[0].mu.items()}
        found = {path: [g.sum(), np.sqrt((g * g).sum())] for path, g in kept.items()}
        return {"all": [self.norms[0]], **found}


_TRAINERS: dict[Any, Trainer] = {}


def trainer(of: StepFunctions) -> Trainer:
    """Of a job on a target, the same one each time."""
    on = of.target
    formats = (on.platform, on.dtype, on.matmul_format, on.weight_format)
    key = (of.job, on.layout, formats, tuple(on.mesh.devices.flat))
    if key not in _TRAINERS:
        _TRAINERS[key] = Trainer(of)
    return _TRAINERS[key]


def run(of: StepFunctions, count: int = 3) -> tuple[list[float], Any]:
    """The losses of the first steps, and the state after them."""
    return trainer(of).run(count)


ONE_DEVICE = Layout(fsdp=1)
