"""Timed calls of a language model by the server's own programs: its step over pages and its choice of tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import jax
import numpy as np

from systolic.compiling.program_store import ProgramStore
from systolic.core.errors import OptionError
from systolic.data.text.text_data import TextData
from systolic.inference.latency import DECODE, PREFILL, CallSizes, Clock, TimedCall
from systolic.runs.weights import Weights
from systolic.serving.text.converting import serving_weights
from systolic.serving.text.opening import EngineSizes, context_of, plan_engine
from systolic.serving.text.request import SamplingParams, Stream, TextRequest
from systolic.serving.text.runner import StepInFlight, StepRunner
from systolic.serving.text.scheduler import PagePool, Scheduler, StepLimits
from systolic.serving.text.sequence import Sequence
from systolic.steps.lengths import longest_text
from systolic.steps.step_functions import StepFunctions

GREEDY = SamplingParams(temperature=0)


class ServedTexts(TimedCall):
    """Rows of equal prompts of random tokens, read and continued as an engine of ``systolic serve`` does, without its web server.

    Programs are those of an engine with the server's default sizes; of its pages there are as many as the call needs. Only programs that a
    call runs are compiled, in the first one.

    Args:
        steps: Programs of a text job on the devices that serve it.
        read: Gives the weights of the model, on any devices, in the first call.
        sizes: Of a call.
        store: Where the server keeps its programs; None compiles all.

    Raises:
        OptionError: the texts are longer than the model takes.
    """

    def __init__(
        self,
        steps: StepFunctions,
        read: Callable[[], Weights],
        sizes: CallSizes,
        store: ProgramStore | None = None,
    ) -> None:
        self._given = sizes
        engine, self._longest = _engine_sizes(steps, sizes)
        self._steps, self._read = steps, read
        self._plan = plan_engine(steps, engine, store)
        self._drawn = np.random.default_rng(0)

    @cached_property
    def _runner(self) -> StepRunner:
        """Weights and pages on the devices, from the first call on."""
        steps, plan, weights = self._steps, self._plan, self._read()
        programs = plan.programs()
        programs.make_when_run()
        arrays = jax.device_put(
            {**weights.params, **weights.model_state},
            {**steps.shardings.params, **steps.shardings.model_state},
        )
        served = serving_weights(plan.paged, arrays, plan.store)
        return StepRunner(programs, plan.buckets, served, programs.empty_pages())

    @property
    def program(self) -> str:
        """The steps that a call ran, after the first: ``decode 1, 4 pages``."""
        return "; ".join(map(str, self._runner.programs.read))

    def seconds(self, clock: Clock) -> dict[str, float]:
        """See :class:`TimedCall`; ``prefill`` ends with the first token of the last text, ``decode`` is a step that continues all of them, the mean of all."""
        count, live = _steps(self._given), self._sequences()
        limits = StepLimits(
            rows=self._plan.sizes.rows, chunk=self._plan.buckets.lengths[-1], prefills=1
        )
        pool = PagePool(
            num_pages=self._runner.programs.pages,
            page_size=self._plan.sizes.page_size,
            reuse=False,
        )
        scheduler = Scheduler(pool=pool, limits=limits)
        for sequence in live:
            scheduler.add(sequence)
        start = clock()
        while any(sequence.answered is None for sequence in live):
            self._collect(self._runner.run(scheduler.schedule()))
        read = clock()
        flight: StepInFlight | None = None
        for _ in range(count):
            following = self._runner.run(scheduler.schedule())
            if flight is not None:
                self._collect(flight)
            flight = following
        assert flight is not None
        self._collect(flight)
        return {PREFILL: read - start, DECODE: (clock() - read) / count}

    def sizes(self) -> dict[str, int]:
        """See :class:`TimedCall`."""
        return self._given.of_texts()

    def _sequences(self) -> list[Sequence]:
        """New texts."""
        sizes, plan = self._given, self._plan
        size = sizes.rows, sizes.prompt_tokens
        prompts = self._drawn.integers(0, self._runner.vocab, size)
        tokenizer, most = plan.data.get_tokenizer(), self._longest - sizes.prompt_tokens
        return [
            Sequence(
                number=number,
                request=TextRequest(
                    tokens=prompt.tolist(),
                    max_tokens=most,
                    sampling=GREEDY,
                    ignore_ends=True,
                ),
                stream=Stream(lambda _: None),
                tokenizer=tokenizer,
                ends=frozenset(),
                context=plan.context,
            )
            for number, prompt in enumerate(prompts)
        ]

    def _collect(self, flight: StepInFlight) -> None:
        for sequence, token, logprob, top, scores, _ in self._runner.collect(flight):
            sequence.push(token, logprob, top, scores)


def _steps(sizes: CallSizes) -> int:
    """Decode steps of a call: its first new token comes of the prompt."""
    return max(sizes.output_tokens - 1, 1)


def _engine_sizes(steps: StepFunctions, sizes: CallSizes) -> tuple[EngineSizes, int]:
    """The server's own sizes, with more rows and a longer context where the call needs them and as many pages as it needs; and the tokens of its longest text.

    Raises:
        OptionError: the model takes no such texts.
    """
    job, longest, own = steps.job, longest_text(steps.job), EngineSizes()
    assert isinstance(job.data, TextData)
    whole = sizes.prompt_tokens + 1 + _steps(sizes)
    if longest is not None and whole > longest:
        raise OptionError(
            f"--prompt-tokens {sizes.prompt_tokens} and --output-tokens {sizes.output_tokens} are more than the {longest} positions of {job.name}; give fewer"
        )
    # Texts that begin first go on while others begin, a part of a prompt each step.
    parts = -(-sizes.prompt_tokens // own.page_size)
    whole += sizes.rows * parts if sizes.rows > 1 else 0
    whole = whole if longest is None else min(whole, longest)
    context = max(context_of(steps, job.data, own), whole)
    pages = -(-context // own.page_size), sizes.rows * -(-whole // own.page_size)
    rows = max(own.rows, sizes.rows)
    return replace(own, rows=rows, context=context, pages=max(pages) + 1), whole
