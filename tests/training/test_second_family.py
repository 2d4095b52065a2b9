"""A second family of language models needs no edit elsewhere: one that the package has never seen keeps the contracts.

A layer of single-head attention with learned positions, and a cache of another shape than the decoder's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.chips import slice
from systolic.compiling import StepKind
from systolic.compiling.tracing import trace_job
from systolic.core.errors import OptionError
from systolic.data.arrays import Arrays
from systolic.data.text.documents import StandardLibrary
from systolic.inference.generation import Generator
from systolic.job import (
    Batch,
    Evaluation,
    IncrementalDecoder,
    Job,
    Layout,
    Model,
    Optimizer,
    Sampling,
    Schedule,
    TokenScorer,
)
from systolic.setup import Setup, set_up
from systolic.steps.decode import Decode
from systolic.steps.tasks import LanguageModel, Unit
from systolic.training.rehearse import rehearse
from tests.training.sessions import evaluations, losses, records, train

SOURCE = Path(__file__).parents[2] / "src" / "systolic" / "data"
WIDTH, SEQUENCE, POSITIONS, VOCAB = 32, 32, 48, 264
GREEDY = Sampling(temperature=0.0)
TRACES: list[str] = []
"""What was traced of generation, in order."""


class LearnedModule(nnx.Module, TokenScorer, IncrementalDecoder):
    def __init__(self, config: "Learned", rngs: nnx.Rngs, target: Any) -> None:
        def matrix(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.1, out_sharding=axes)

        self.embedding = matrix(VOCAB, WIDTH, axes=("vocab", "embed"))
        self.places = matrix(config.positions, WIDTH, axes=(None, "embed"))
        self.project = matrix(WIDTH, 3, WIDTH, axes=("embed", None, None))
        self.out = matrix(WIDTH, WIDTH, axes=(None, "embed"))
        self.config, self.target = config, target

    @property
    def max_positions(self) -> int:
        return self.config.positions

    def embed(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The stream, and queries, keys and values [3, batch, n, d_model]."""
        x = self.embedding[...][tokens] + jnp.take(self.places[...], positions, axis=0)
        return x, jnp.einsum("bnd,dte->tbne", x, self.project[...])

    def attend(self, x: jax.Array, query: Any, key: Any, value: Any, seen: Any) -> jax.Array:
        scores = jnp.einsum("bqd,bkd->bqk", query, key) * WIDTH**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9).astype(jnp.float32), axis=-1)
        read = jnp.einsum("bqk,bkd->bqd", weights.astype(value.dtype), value)
        return x + jax.nn.gelu(read @ self.out[...])

    def hidden(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        x, (query, key, value) = self.embed(tokens, positions)
        earlier = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
        return self.attend(
            x, query, key, value, earlier & (segments[:, :, None] == segments[:, None])
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.embedding[...].T

    def score(self, read: Any, targets: jax.Array, inputs: Any) -> Any:
        return read(self.logits(self.hidden(*inputs)), targets)

    def empty_cache(self, batch: int, capacity: int, dtype: Any) -> dict[str, jax.Array]:
        return {
            "pairs": jnp.zeros((2, batch, capacity, WIDTH), dtype),
            "length": jnp.zeros((batch,), jnp.int32),
        }

    def cache_axes(self) -> dict[str, tuple[str | None, ...]]:
        return {"pairs": (None, "batch", None, None), "length": ("batch",)}

    def prefill(
        self, tokens: jax.Array, count: jax.Array, capacity: int, dtype: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        TRACES.append("prefill")
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        _, (_, key, value) = self.embed(tokens, positions)
        pairs = jnp.stack([key, value]).astype(dtype)
        pairs = jnp.pad(pairs, ((0, 0), (0, 0), (0, capacity - tokens.shape[1]), (0, 0)))
        hidden = self.hidden(tokens, jnp.zeros_like(tokens), positions)
        return hidden, {"pairs": pairs, "length": count}

    def extend(
        self, tokens: jax.Array, cache: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        TRACES.append("extend")
        length, rows = cache["length"], jnp.arange(len(tokens))
        x, (query, *new) = self.embed(tokens[:, None], length[:, None])
        pairs = cache["pairs"].at[:, rows, length].set(jnp.stack(new)[:, :, 0])
        seen = jnp.arange(pairs.shape[2]) <= length[:, None]
        hidden = self.attend(x, query, pairs[0], pairs[1], seen[:, None])
        return self.logits(hidden)[:, 0], {"pairs": pairs, "length": length + 1}


@dataclass(frozen=True, kw_only=True)
class Learned(Model):
    positions: int = POSITIONS

    def build(self, rngs: nnx.Rngs, target: Any) -> nnx.Module:
        return LearnedModule(self, rngs, target)


def job(**changes: Any) -> Job:
    made = Job(
        name="second",
        model=Learned(),
        task=LanguageModel(unit=Unit.byte),
        data=StandardLibrary(sequence=SEQUENCE, root=SOURCE),
        steps=12,
        batch=Batch(total=8),
        optimizer=Optimizer(learning_rate=1e-2),
        evaluation=Evaluation(batches=2, metric="bits_per_byte"),
        sample="def ",
        layout=Layout(),
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return set_up(job())


@pytest.fixture(scope="module")
def weights(setup: Setup) -> tuple[Any, Any]:
    return jax.jit(setup.steps.network.init)(jax.random.key(0))


def recomputed(setup: Setup, weights: tuple[Any, Any], ids: list[int], count: int) -> list[int]:
    """Greedy tokens after ``ids``, each from the logits of all that came before it."""

    @jax.jit
    def logits(params: Any, model_state: Any, tokens: jax.Array) -> jax.Array:
        module: Any = setup.steps.network.module(params, model_state, train=False)
        places = jnp.arange(tokens.shape[1])[None]
        return module.logits(module.hidden(tokens, jnp.zeros_like(tokens), places))

    rows, size = list(ids), min(SEQUENCE, setup.job.model.positions)
    for _ in range(count):
        tokens = jnp.asarray([rows + [0] * (size - len(rows))], jnp.int32)
        rows.append(int(logits(*weights, tokens)[0, len(rows) - 1].argmax()))
    return rows[len(ids) :]


@pytest.mark.slow
def test_it_trains_evaluates_and_writes_a_sample(setup: Setup, tmp_path: Path) -> None:
    summary = train(setup, tmp_path)
    steps = losses(tmp_path)
    assert steps[12][0] < steps[1][0] - 0.3
    (validation,) = [v for (_, split), v in evaluations(tmp_path).items() if split == "validation"]
    assert validation["bits_per_byte"] < 8
    assert summary["recompiles"] == 0
    (sample,) = records(tmp_path, "sample")
    assert 0 < len(sample["text"]) <= POSITIONS, "as many tokens as it has positions"


def test_a_cache_generates_what_recomputation_does(setup: Setup, weights: Any) -> None:
    """Rows of different lengths in one batch, padded, with room to spare."""
    decode = Decode(setup.steps, GREEDY)
    rows = [[5, 9, 200], [7, 40, 41, 42, 43, 44, 45]]
    tokens = np.zeros((2, 16), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    count = jnp.asarray([len(row) for row in rows], jnp.int32)
    state = decode.prefill(*weights, jnp.asarray(tokens), count, jax.random.key(0), capacity=32)
    _, written = decode.decode(*weights, state, count=12)
    for row, given in enumerate(rows):
        assert written[row].tolist() == recomputed(setup, weights, given, 12)


def test_a_prompt_of_another_length_compiles_nothing(setup: Setup, weights: Any) -> None:
    sampling = Sampling(temperature=0.0, top_p=0.9)
    first = Generator(setup.steps, *weights, sampling)
    TRACES.clear()
    texts = ["".join(first.stream("a", tokens=8))]
    once = list(TRACES)
    assert set(once) == {"prefill", "extend"}
    texts += ["".join(first.stream(prompt, tokens=9)) for prompt in ("some more", "x" * 30)]
    again = Generator(setup.steps, *weights, sampling)
    assert "".join(again.stream("a", tokens=8)) == texts[0]
    assert once == TRACES
    with pytest.raises(
        OptionError, match="the prompt has 49 tokens and second takes texts of 48 with"
    ):
        first.stream("x" * 48, tokens=40)


def test_no_prompt_is_padded_beyond_the_positions() -> None:
    """A lookup beyond the 24 positions is NaN, which would spread from the padding to the whole row."""
    few = set_up(job(model=Learned(positions=24), data=StandardLibrary(sequence=16, root=SOURCE)))
    weights = jax.jit(few.steps.network.init)(jax.random.key(0))
    generator = Generator(few.steps, *weights, GREEDY)
    ids = generator.encode("def f")
    expected = recomputed(few, weights, ids, 24 - len(ids))
    assert len(set(expected)) > 1
    text = few.job.data.get_tokenizer().stream()
    pieces = [text.push(token) for token in expected]
    assert (
        "".join(generator.stream("def f", tokens=24 - len(ids))) == "".join(pieces) + text.flush()
    )


def test_it_rehearses() -> None:
    """With a warm-up that is longer than the rehearsal, on data that has no validation split but a test split."""
    batch = np.tile(np.arange(SEQUENCE, dtype=np.int32), (16, 1))
    rows = dict.fromkeys(("tokens", "targets", "positions"), batch)
    data = Arrays.of(train=(rows := {**rows, "segments": np.zeros_like(batch)}), test=rows)
    said: dict[str, str] = {}
    warm = job(data=data, steps=1000, schedule=Schedule(warmup=50))
    told: Mapping[str, Any] = rehearse(warm, slice("v5e-1"), said.__setitem__)
    assert said["evaluation"].startswith("one test batch: ")
    assert len(told["rehearsed"]["losses"]) == 3
    assert told["num_parameters"] == VOCAB * WIDTH + POSITIONS * WIDTH + 4 * WIDTH * WIDTH


def test_a_warm_up_that_training_refuses_is_refused_by_a_rehearsal() -> None:
    warm = job(steps=1000, schedule=Schedule(warmup=1000))
    with pytest.raises(OptionError, match=r"schedule\.warmup is 1000 and the job has 1000 steps"):
        rehearse(warm, slice("v5e-1"), lambda *_: None)


def test_its_generation_is_traced_for_a_forecast() -> None:
    """FLOPs are counted from the program: two per product of a token of a row over 32 positions."""
    facts = trace_job(job(), StepKind.decode, slice("cpu"), jax.devices()[:1]).facts
    matmuls = 4 * WIDTH * WIDTH + 2 * SEQUENCE * WIDTH + WIDTH * VOCAB
    assert facts.model_flops == 8 * 2 * matmuls
    facts = trace_job(job(), StepKind.prefill, slice("cpu"), jax.devices()[:1]).facts
    assert (facts.units, facts.unit) == (8 * SEQUENCE, "tokens")
    assert facts.model_flops > 0
