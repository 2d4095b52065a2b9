"""Latency of a model's calls here: the programs of ``generate`` for decoders, the predict step for all others."""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.chips.host import memory_bytes
from systolic.core.errors import OptionError, is_out_of_memory
from systolic.core.units import si
from systolic.data.audio import Recordings
from systolic.data.text.text_data import Sentences, TextData
from systolic.inference.predictor import (
    FEATURES,
    TOKENS,
    FixedForm,
    Form,
    Predictor,
    SpeechForm,
    TextForm,
)
from systolic.inference.rows import Bucket, Row
from systolic.job import Sampling
from systolic.models.decoder.config import Decoder
from systolic.runs.weights import Weights
from systolic.steps.programs import generation
from systolic.steps.step_functions import StepFunctions

PREFILL, DECODE, CALL = "prefill", "decode", "call"
"""Stages: a prompt, one token of each text, a batch."""
Clock = Callable[[], float]


class LargeCallError(OptionError):
    """A timed call that needs more memory than the device has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSizes:
    """Sizes of a timed call."""

    rows: int
    prompt_tokens: int
    """Tokens of each prompt."""
    output_tokens: int
    """New tokens of each text; of decoders only."""

    def of_texts(self) -> dict[str, int]:
        """By name, for a call that reads and writes texts."""
        return {
            "rows": self.rows,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }


class TimedCall(ABC):
    """A model's call: warm it up once, then time it again and again."""

    notes: Sequence[str] = ()
    """Notes on the program, a line each."""

    @abstractmethod
    def seconds(self, clock: Clock) -> dict[str, float]:
        """Seconds of each stage, with results ready."""

    @property
    def program(self) -> str:
        """Name of the program that a call runs, known after the first."""
        return "predict step"

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Sizes of a call: ``rows``, and of texts ``prompt_tokens`` and ``output_tokens``."""


class GeneratedText(TimedCall):
    """Greedy generation of rows of equal prompts of random tokens."""

    def __init__(self, steps: StepFunctions, weights: Weights, sizes: CallSizes) -> None:
        model: Any = steps.job.model
        self._given = sizes
        self._programs = generation(steps, Sampling(temperature=0.0), sizes.rows)
        whole = sizes.prompt_tokens + sizes.output_tokens
        most = self._programs.decode.max_positions
        if most is not None and whole > most:
            raise OptionError(
                f"--prompt-tokens {sizes.prompt_tokens} and --output-tokens {sizes.output_tokens} are more than the {most} positions of {steps.job.name}; give fewer"
            )
        self._params = self._programs.weights(weights.params, weights.model_state)
        self._rest = weights.model_state
        shape = (sizes.rows, sizes.prompt_tokens)
        self._tokens = jnp.asarray(
            np.random.default_rng(0).integers(0, model.vocab, shape), jnp.int32
        )
        self._counts = jnp.full((sizes.rows,), sizes.prompt_tokens, jnp.int32)

    @property
    def program(self) -> str:
        """See :class:`TimedCall`."""
        return "the loop of systolic generate"

    def seconds(self, clock: Clock) -> dict[str, float]:
        """See :class:`TimedCall`; ``decode`` is a token of each row, the mean of all new ones."""
        shapes, programs = self._given, self._programs
        start = clock()
        state = programs.prefill(
            self._params,
            self._rest,
            self._tokens,
            self._counts,
            jax.random.key(0),
            capacity=shapes.prompt_tokens + shapes.output_tokens,
        )
        jax.block_until_ready(state)
        read = clock()
        texts = programs.step(self._params, self._rest, state, count=shapes.output_tokens)
        jax.block_until_ready(texts)
        return {PREFILL: read - start, DECODE: (clock() - read) / shapes.output_tokens}

    def sizes(self) -> dict[str, int]:
        """See :class:`TimedCall`."""
        return self._given.of_texts()


class PredictedBatch(TimedCall):
    """The predict step over rows of made-up arrays, with their way onto the device and back."""

    def __init__(self, steps: StepFunctions, weights: Weights, sizes: CallSizes) -> None:
        form = _form(steps)
        self._predictor = Predictor(form, weights.params, weights.model_state)
        rows = self._predictor.up(sizes.rows)
        length = None if form.longest is None else min(sizes.prompt_tokens, form.longest)
        self._bucket = Bucket(rows=rows, length=length)
        self._rows = _rows(form, self._bucket, steps)

    def seconds(self, clock: Clock) -> dict[str, float]:
        """See :class:`TimedCall`."""
        start = clock()
        self._predictor(self._rows, self._bucket)
        return {CALL: clock() - start}

    def sizes(self) -> dict[str, int]:
        """See :class:`TimedCall`."""
        length = self._bucket.length
        more = {} if length is None else {"prompt_tokens": length}
        return {"rows": self._bucket.rows, **more}


def timed_call(steps: StepFunctions, weights: Weights, sizes: CallSizes) -> TimedCall:
    """The call of a job's model that its users wait for.

    Raises:
        OptionError: a text is longer than the model takes.
    """
    job = steps.job
    if isinstance(job.model, Decoder) and isinstance(job.data, TextData):
        return GeneratedText(steps, weights, sizes)
    return PredictedBatch(steps, weights, sizes)


def medians(
    calls: Sequence[TimedCall], repeats: int, clock: Clock = time.perf_counter
) -> list[dict[str, float]]:
    """Median seconds of each stage of each call, measured in turn so that all share what else the machine does.

    Args:
        calls: At least one; each is called once before, which compiles it.
        repeats: Timed rounds; the order of the calls changes with each.
        clock: Seconds.

    Raises:
        LargeCallError: a call needs more memory than there is.
    """
    for call in calls:
        try:
            call.seconds(clock)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise _too_large(call.sizes()) from error
    rounds_by_call: list[list[dict[str, float]]] = [[] for _ in calls]
    for number in range(repeats):
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for index in order:
            rounds_by_call[index].append(calls[index].seconds(clock))
    return [
        {stage: statistics.median(stages[stage] for stages in rounds) for stage in rounds[0]}
        for rounds in rounds_by_call
    ]


def _too_large(sizes: Mapping[str, int]) -> LargeCallError:
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = si(stats.get("bytes_limit") or memory_bytes(), "B")
    call = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sizes.items())
    cure = "--prompt-tokens" if "prompt_tokens" in sizes else "--rows"
    return LargeCallError(
        f"a timed call ({call}) needs more memory than is free of the {limit} here; lower {cure}"
    )


def _form(steps: StepFunctions) -> Form:
    data = steps.job.data
    if isinstance(data, Sentences):
        return TextForm(steps, data)
    return SpeechForm(steps) if isinstance(data, Recordings) else FixedForm(steps)


def _rows(form: Form, bucket: Bucket, steps: StepFunctions) -> list[Row]:
    """Rows of random numbers; of texts random tokens."""
    random = np.random.default_rng(0)
    model: Any = steps.job.model
    rows = []
    for _ in range(bucket.rows):
        arrays: dict[str, np.ndarray] = {}
        for name, (shape, dtype) in form.shapes(bucket).items():
            own = shape[1:]
            if name == TOKENS:
                arrays[name] = random.integers(0, model.vocab, own).astype(np.int32)
            elif name == FEATURES or np.dtype(dtype).kind == "f":
                arrays[name] = random.normal(size=own).astype(np.float32)
            elif dtype == "uint8":
                arrays[name] = random.integers(0, 256, own).astype(np.uint8)
        rows.append(Row(arrays=arrays, length=bucket.length or 0))
    return rows
