"""Steps on the device: compiled programs, the scheduler's work as their arguments, and their tokens back.

All programs are compiled before the first request, none after.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.aot.program_store import ProgramSpec, ProgramStore, made_ready
from systolic.serving.compiles import CompileFacts
from systolic.serving.text.buckets import Buckets
from systolic.serving.text.request import Token
from systolic.serving.text.scheduler import PENDING, StepWork, Text
from systolic.serving.text.sequence import Answer, Made
from systolic.steps.choice import ChosenTokens, Cuts, Draw, choose, choose_by_all
from systolic.steps.paged import PagedSteps, ServingWeights, StepInput, StepShape
from systolic.steps.paged_sharding import for_choice, whole
from systolic.steps.programs import jit_paged

BIASES = 300
"""Tokens of a request that can have a bias, as in OpenAI's API."""
CHOSEN = ChosenTokens(0, 0, 0, 0)  # ty: ignore[invalid-argument-type]
"""Structure of what a step chose."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextProgram:
    """A program that is not compiled yet, and where it goes."""

    where: dict[Any, Any]
    key: Any
    spec: ProgramSpec
    lower: Callable[[], Any]


class _MadeWhenRun(dict[Any, Any]):
    """Programs that are made ready, and put here, when they are first asked for."""

    def __init__(self, make: Callable[[Any], None]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self._make(key)
        return self[key]


@dataclass(kw_only=True)
class Programs:
    """Compiled programs by their sizes."""

    paged: PagedSteps
    pages: int
    """Of the cache."""
    slots: int
    """Texts that run at once."""
    shapes: Sequence[StepShape]
    read: dict[StepShape, Any] = field(default_factory=dict)
    """(weights, pages, latest, packed input) -> (logits, pages)."""
    score: dict[StepShape, Any] = field(default_factory=dict)
    """(weights, pages, latest, packed input, following) -> (logits, log-probabilities of the tokens that follow, pages)."""
    choose: dict[int, Any] = field(default_factory=dict)
    """By texts of a step: (logits, latest, packed draw) -> (chosen, latest)."""
    choose_by_all: dict[int, Any] = field(default_factory=dict)
    """By texts of a step: (logits, latest, packed draw, cuts) -> (chosen, latest)."""
    told: Callable[[CompileFacts], None] = lambda _: None
    """Called after each program, from the thread that made it ready."""
    store: ProgramStore | None = None
    """Where programs are kept; None compiles all."""
    capacity_bytes: int | None = None
    """Of each device, before anything was allocated; None until it is measured."""

    @property
    def positions(self) -> int:
        """Tokens of a text that the choice by all settings can look back on."""
        return max(shape.pages for shape in self.shapes) * self.paged.page_size

    @property
    def scored(self) -> StepShape:
        """The program that also says the log-probabilities of a prompt."""
        long = max(shape.length for shape in self.shapes)
        return StepShape(0, 1, long, max(shape.pages for shape in self.shapes))

    @property
    def texts(self) -> list[int]:
        """Texts of a step, each number once and ascending."""
        return sorted({shape.texts for shape in self.shapes})

    @property
    def count(self) -> int:
        """Programs in all: steps, choices of two kinds, and the one that scores."""
        return len(self.shapes) + 2 * len(self.texts) + 1

    @property
    def all(self) -> list[TextProgram]:
        """All programs, ready or not."""
        found = [self._read(step) for step in self.shapes]
        for count in self.texts:
            found += [self._choose(count), self._choose_by_all(count)]
        return [*found, self._score(self.scored)]

    @property
    def largest(self) -> list[TextProgram]:
        """The programs that need the most memory: the largest step of each kind, that which scores a prompt, and the choice by all settings for the most texts."""
        kinds: dict[tuple[bool, bool], StepShape] = {}
        for shape in self.shapes:
            # Rows of decoding gather pages of their own, so that fewer tokens can need more.
            kinds.setdefault((shape.rows > 0, shape.chunks > 0), shape)
        steps = [self._read(shape) for shape in kinds.values()]
        return [*steps, self._score(self.scored), self._choose_by_all(self.texts[-1])]

    def compile(self, workers: int = 2) -> None:
        """Makes all programs ready that are not: from the store, or compiled.

        Args:
            workers: Programs that are made at the same time.
        """
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(self._make, self.all):
                pass

    def compile_largest(self) -> None:
        """Makes the :attr:`largest` programs ready."""
        for program in self.largest:
            self._make(program)

    def make_when_run(self) -> None:
        """Makes steps and choices by temperature ready when they are first asked for, in place of :meth:`compile`."""
        self.read = _MadeWhenRun(lambda shape: self._make(self._read(shape)))
        self.choose = _MadeWhenRun(lambda texts: self._make(self._choose(texts)))

    def _make(self, program: TextProgram) -> None:
        if program.key in program.where:
            return
        made = made_ready(self.store, program.spec, program.lower)
        program.where[program.key] = made.compiled
        places = (self.read, self.score, self.choose, self.choose_by_all)
        self.told(
            CompileFacts(
                bucket=program.spec.name,
                seconds=made.total_seconds,
                cached=made.cached,
                phases=made.seconds,
                done=sum(map(len, places)),
                programs=self.count,
            )
        )

    def empty_pages(self) -> Any:
        """The cache, of zeros."""
        pages = self._pages
        places = jax.tree.map(lambda a: a.sharding, pages)
        jitted = jax.jit(lambda: self.paged.empty_pages(self.pages), out_shardings=places)
        sizes = {"pages": self.pages}
        spec = ProgramSpec(name="empty pages", sizes=sizes, arguments=(), outputs=pages)
        return made_ready(self.store, spec, jitted.lower).compiled()

    def temporary_bytes(self) -> int:
        """Bytes a device that the compiled programs need beside weights and pages: the most of any, and logits of the most texts."""
        made = [*self.read.values(), *self.score.values(), *self.choose_by_all.values()]
        found = [one.memory_analysis() for one in made]
        # A TPU's temporaries are no peak, and a CPU's peak has no temporaries.
        own = [
            max(
                one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes,
                one.peak_memory_in_bytes - one.argument_size_in_bytes,
            )
            for one in found
        ]
        texts = max(shape.texts for shape in self.shapes)
        return int(max(own)) + texts * self.paged.vocab * 4

    def _arguments(self, shape: StepShape) -> tuple[Any, ...]:
        def ints(*size: int) -> Any:
            return jax.ShapeDtypeStruct(size, jnp.int32, sharding=self.everywhere)

        sizes = StepInput.sizes(shape, self.paged.history)
        asked = ints(sum(math.prod(size) for size in sizes))
        return self._weights, self._pages, ints(self.slots + 1), asked

    @property
    def everywhere(self) -> Any:
        """Sharding of what all devices hold whole."""
        return whole(self.paged.steps.target)

    def _logits(self, texts: int) -> Any:
        return self.paged.placed_logits(texts)

    @cached_property
    def _weights(self) -> ServingWeights:
        return self.paged.placed_weights

    @cached_property
    def _pages(self) -> Any:
        return self.paged.placed_pages(self.pages)

    def _read(self, shape: StepShape) -> TextProgram:
        arguments = self._arguments(shape)
        made = arguments, lambda: jit_paged(self.paged, shape).lower(*arguments)
        return self._program(str(shape), self.read, shape, made, (0, self._pages))

    def _score(self, shape: StepShape) -> TextProgram:
        chunk = (shape.chunks, shape.length)

        def score(weights: Any, pages: Any, latest: Any, packed: Any, following: Any) -> Any:
            asked = StepInput.unpacked(packed, shape, self.paged.history)
            return self.paged.score(weights, pages, latest, asked, chunk, following)

        following = jax.ShapeDtypeStruct((shape.tokens,), jnp.int32, sharding=self.everywhere)
        arguments = (*self._arguments(shape), following)
        made = self._lower(score, arguments, (self._logits(shape.texts), None, self._pages))
        return self._program(f"score {shape}", self.score, shape, made, (0, CHOSEN, self._pages))

    def _choose(self, texts: int) -> TextProgram:
        target = self.paged.steps.target

        def by_temperature(logits: Any, latest: Any, packed: Any) -> Any:
            return choose(for_choice(target, logits), latest, Draw.unpacked(packed))

        made = self._lower(by_temperature, self._choice(texts), (None, None))
        return self._program(f"choice of {texts}", self.choose, texts, made, (CHOSEN, 0))

    def _choose_by_all(self, texts: int) -> TextProgram:
        def some(dtype: Any, *inner: int) -> Any:
            return jax.ShapeDtypeStruct((texts, *inner), dtype, sharding=self.everywhere)

        integer, real, target = jnp.int32, jnp.float32, self.paged.steps.target
        cuts = Cuts(
            some(integer),
            *[some(real) for _ in range(5)],
            some(integer, self.positions),
            some(integer),
            some(integer, BIASES),
            some(real, BIASES),
        )

        def by_all(logits: Any, latest: Any, packed: Any, cuts: Cuts) -> Any:
            # Its cuts are found bit by bit, by 32 sums over the vocabulary.
            logits = for_choice(target, logits, always=True)
            return choose_by_all(logits, latest, Draw.unpacked(packed), cuts)

        made = self._lower(by_all, (*self._choice(texts), cuts), (None, None))
        name = f"choice of {texts} by all settings"
        return self._program(name, self.choose_by_all, texts, made, (CHOSEN, 0))

    def _choice(self, texts: int) -> tuple[Any, ...]:
        def some(dtype: Any, *size: int) -> Any:
            return jax.ShapeDtypeStruct(size, dtype, sharding=self.everywhere)

        draw = some(jnp.int32, 4, texts)
        return self._logits(texts), some(jnp.int32, self.slots + 1), draw

    def _program(
        self,
        name: str,
        where: dict[Any, Any],
        key: Any,
        made: tuple[tuple[Any, ...], Callable[[], Any]],
        outputs: tuple[Any, ...],
    ) -> TextProgram:
        sizes = {"page_size": self.paged.page_size}
        spec = ProgramSpec(name=name, sizes=sizes, arguments=made[0], outputs=outputs)
        return TextProgram(where=where, key=key, spec=spec, lower=made[1])

    def _lower(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], made: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Callable[[], Any]]:
        """Arguments of a program that replaces its second one, and what traces it.

        Args:
            function: The program.
            arguments: Abstract, with their shardings.
            made: Its results likewise; None for one that all devices hold whole.
        """
        places = tuple(
            self.everywhere if one is None else jax.tree.map(lambda a: a.sharding, one)
            for one in made
        )
        jitted = jax.jit(
            function,
            donate_argnums=1,
            out_shardings=places,
            compiler_options=self.paged.steps.target.compiler_options,
        )
        return arguments, lambda: jitted.lower(*arguments)


Part = tuple[Text, int]
"""A text and how many tokens of its prompt it reads."""


@dataclass(frozen=True, kw_only=True)
class ProgramCall:
    """One program that runs."""

    shape: StepShape
    rows: int
    """Texts that read one token."""
    prompt: int
    """Prompt tokens that are read."""
    answers: list[tuple[int, Answer]]
    """Place among the program's texts, and whose token lies there."""
    chosen: ChosenTokens
    """On the device."""
    scored: tuple[Answer, ChosenTokens, int, list[int]] | None = None
    """Log-probabilities of a prompt's tokens, the position of the first and these."""
    read: dict[int, int] = field(default_factory=dict)
    """Tokens of each text, by its number, that were read when this was."""
    unfinished: list[tuple[int, Answer]] = field(default_factory=list)
    """Place among the program's texts, and whose prompt it has not read to its end."""
    broken: list[tuple[Answer, Exception]] = field(default_factory=list)
    """Texts whose settings could not be made arguments; what is chosen for them means nothing."""


@dataclass(kw_only=True)
class StepInFlight:
    """A step whose tokens are not known yet."""

    calls: list[ProgramCall] = field(default_factory=list)
    preempted: int = 0


class StepRunner:
    """The device's side of an engine: weights, pages and the last token of each running text.

    Args:
        programs: Compiled.
        buckets: Sizes of the programs.
        weights: See :meth:`systolic.steps.paged.PagedSteps.weights`.
        pages: As many as the programs have.
    """

    def __init__(self, programs: Programs, buckets: Buckets, weights: Any, pages: Any) -> None:
        self.programs, self.buckets = programs, buckets
        self._weights, self._pages = weights, pages
        self._latest = jax.device_put(np.zeros(programs.slots + 1, np.int32), programs.everywhere)

    @property
    def vocab(self) -> int:
        """Tokens of the model."""
        return self.programs.paged.vocab

    def dispatch(self, work: StepWork, live: Mapping[int, Answer]) -> StepInFlight:
        """Starts a step."""
        flight = StepInFlight(preempted=len(work.preempted))
        decode, parts = list(work.decode), list(work.prefill)
        mixed = self._mixed(decode, parts, live)
        if mixed is not None:
            flight.calls.append(self._call(mixed, decode, parts.pop(0), live))
        elif decode:
            shape = self.buckets.shape(len(decode), 0, self._pages_of(decode, None))
            assert shape is not None
            flight.calls.append(self._call(shape, decode, None, live))
        for part in parts:
            if live[part[0].number].request.prompt_logprobs:
                shape = self.programs.scored
            else:
                shape = self.buckets.shape(0, part[1], self._pages_of([], part))
            assert shape is not None
            flight.calls.append(self._call(shape, [], part, live))
        return flight

    def collect(self, flight: StepInFlight) -> list[tuple[Answer, Made]]:
        """Waits for a step and says what it chose, in the order of its texts."""
        found: list[tuple[Answer, Made]] = []
        for call in flight.calls:
            prompt = self._scores(call)
            tokens, logprobs = np.asarray(call.chosen.tokens), np.asarray(call.chosen.logprob)
            wide = call.chosen.top.shape[1] > 0
            top = np.asarray(call.chosen.top) if wide else None
            top_logprob = np.asarray(call.chosen.top_logprob) if wide else None
            for place, answer in call.answers:
                best: tuple[tuple[int, float], ...] = ()
                if top is not None and top_logprob is not None and answer.request.logprobs:
                    pairs = zip(top[place].tolist(), top_logprob[place].tolist(), strict=True)
                    best = tuple(pairs)
                logprob, read = float(logprobs[place]), call.read[answer.text.number]
                found.append((answer, Made(int(tokens[place]), logprob, best, *prompt, read)))
            for place, answer in call.unfinished:
                logprob, read = float(logprobs[place]), call.read[answer.text.number]
                found.append((answer, Made(PENDING, logprob, (), *prompt, read, False)))
        return found

    def _mixed(
        self, decode: list[Text], parts: list[Part], live: Mapping[int, Answer]
    ) -> StepShape | None:
        if not decode or not parts or live[parts[0][0].number].request.prompt_logprobs:
            return None
        return self.buckets.shape(len(decode), parts[0][1], self._pages_of(decode, parts[0]))

    def _pages_of(self, decode: list[Text], part: Part | None) -> int:
        """Pages of the longest text of a step."""
        size = self.programs.paged.page_size
        ends = [text.read + 1 for text in decode]
        if part is not None:
            ends.append(part[0].read + part[1])
        return -(-max(ends) // size)

    def _call(
        self, shape: StepShape, decode: list[Text], part: Part | None, live: Mapping[int, Answer]
    ) -> ProgramCall:
        """Runs one program, and moves its texts on."""
        asked = self._asked(shape, decode, part)
        places = list(enumerate(decode)) + ([] if part is None else [(shape.rows, part[0])])
        scored = None
        if part is not None and live[part[0].number].request.prompt_logprobs:
            following, known = self._following(shape, part)
            logits, found, self._pages = self.programs.score[shape](
                self._weights, self._pages, self._latest, asked, following
            )
            scored = (live[part[0].number], found, part[0].read + 1, known)
        else:
            logits, self._pages = self.programs.read[shape](
                self._weights, self._pages, self._latest, asked
            )
        for text, count in [*((text, 1) for text in decode), *([] if part is None else [part])]:
            text.read += count
            answer = live[text.number]
            if answer.begun is None:
                answer.begun = monotonic()
        ended = [(place, live[text.number]) for place, text in places if text.left == 0]
        broken: list[tuple[Answer, Exception]] = []
        draw, cuts = self._choice(shape.texts, ended, broken)
        if cuts is None:
            chosen, self._latest = self.programs.choose[shape.texts](logits, self._latest, draw)
        else:
            chosen, self._latest = self.programs.choose_by_all[shape.texts](
                logits, self._latest, draw, cuts
            )
        for _, answer in ended:
            answer.text.tokens.append(PENDING)
        return ProgramCall(
            shape=shape,
            rows=len(decode),
            prompt=0 if part is None else part[1],
            answers=ended,
            chosen=chosen,
            scored=scored,
            read={text.number: text.read for _, text in places},
            unfinished=[(place, live[text.number]) for place, text in places if text.left > 0],
            broken=broken,
        )

    def _asked(self, shape: StepShape, decode: list[Text], part: Part | None) -> np.ndarray:
        """A step's input as one array; see :meth:`systolic.steps.paged.StepInput.unpacked`."""
        history = self.programs.paged.history
        tokens = np.zeros(shape.tokens, np.int32)
        slots = np.full(shape.rows, -1, np.int32)
        recent = np.full((shape.tokens, history), -1, np.int32)
        start = np.zeros(shape.texts, np.int32)
        count = np.zeros(shape.texts, np.int32)
        table = np.zeros((shape.texts, shape.pages), np.int32)
        for row, text in enumerate(decode):
            token = text.tokens[text.read]
            if token == PENDING:
                slots[row] = text.slot
            else:
                tokens[row] = token
            start[row], count[row] = text.read, 1
            self._fill(table[row], text)
            self._recall(recent[row], text, text.read)
        if part is not None:
            text, size = part
            first = shape.rows
            tokens[first : first + size] = text.tokens[text.read : text.read + size]
            start[first], count[first] = text.read, size
            self._fill(table[first], text)
            for place in range(size if history else 0):
                self._recall(recent[first + place], text, text.read + place)
        arrays = (tokens, slots, recent, start, count, table)
        return np.concatenate([array.reshape(-1) for array in arrays])

    def _fill(self, row: np.ndarray, text: Text) -> None:
        pages = text.pages[: len(row)]
        row[: len(pages)] = pages

    def _recall(self, row: np.ndarray, text: Text, position: int) -> None:
        """Tokens before a position, for n-gram lookups."""
        before = text.tokens[max(position - len(row), 0) : position]
        if before:
            row[len(row) - len(before) :] = before

    def _following(self, shape: StepShape, part: Part) -> tuple[np.ndarray, list[int]]:
        """Tokens after each that is read, and those of the prompt among them."""
        text, size = part
        known = text.tokens[text.read + 1 : min(text.read + size + 1, text.prompt)]
        following = np.zeros(shape.tokens, np.int32)
        following[: len(known)] = known
        return following, known

    def _scores(self, call: ProgramCall) -> tuple[tuple[Token, ...], int]:
        """Scored tokens of a prompt, and the position of the first."""
        if call.scored is None:
            return (), 0
        answer, chosen, first, known = call.scored
        logprob, top = np.asarray(chosen.logprob), np.asarray(chosen.top)
        values, wanted = np.asarray(chosen.top_logprob), answer.request.logprobs or 0
        scored = [
            Token(
                id=token,
                logprob=float(logprob[at]),
                top=tuple(
                    zip(top[at, :wanted].tolist(), values[at, :wanted].tolist(), strict=True)
                ),
            )
            for at, token in enumerate(known)
        ]
        return tuple(scored), first

    def _choice(
        self,
        texts: int,
        ended: list[tuple[int, Answer]],
        broken: list[tuple[Answer, Exception]],
    ) -> tuple[np.ndarray, Cuts | None]:
        """How the tokens of a step are chosen; rows of padding write to the slot of none.

        Args:
            texts: Rows.
            ended: Place and text of those that choose.
            broken: Takes texts whose settings don't fit the arrays: the other texts go on.
        """
        slots = np.full(texts, self.programs.slots, np.int32)
        temperature, seed = np.zeros(texts, np.float32), np.zeros(texts, np.uint32)
        number = np.zeros(texts, np.int32)
        for place, answer in ended:
            text = answer.text
            slots[place], seed[place] = text.slot, answer.seed
            temperature[place] = answer.request.sampling.temperature
            number[place] = len(text.tokens) - text.prompt
        draw = np.stack([slots, temperature.view(np.int32), seed.view(np.int32), number])
        if not any(answer.by_all for _, answer in ended):
            return draw, None
        return draw, _cuts(texts, self.programs.positions, ended, broken)


def _cuts(
    texts: int,
    positions: int,
    ended: list[tuple[int, Answer]],
    broken: list[tuple[Answer, Exception]],
) -> Cuts:
    top_k, prompt = np.zeros(texts, np.int32), np.zeros(texts, np.int32)
    reals = np.zeros((5, texts), np.float32)
    reals[0] = reals[4] = 1.0
    text = np.full((texts, positions), PENDING, np.int32)
    biased = np.full((texts, BIASES), PENDING, np.int32)
    bias = np.zeros((texts, BIASES), np.float32)
    for place, answer in ended:
        choice, tokens = answer.request.sampling, answer.text.tokens
        try:
            top_k[place], prompt[place] = choice.top_k, answer.text.prompt
            reals[:, place] = (
                choice.top_p,
                choice.min_p,
                choice.presence_penalty,
                choice.frequency_penalty,
                choice.repetition_penalty,
            )
            text[place, : len(tokens)] = tokens
            for at, (token, by) in enumerate(choice.logit_bias.items()):
                biased[place, at], bias[place, at] = token, by
        except Exception as error:
            broken.append((answer, error))
    arrays: Any = (top_k, *reals, text, prompt, biased, bias)
    return Cuts(*arrays)
