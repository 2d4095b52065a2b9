"""Steps on the device: compiled programs, the memory that they need, the scheduler's work as their arguments, and their tokens back.

All programs are compiled before the first request, none after.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.compiling.program_store import ProgramSpec, ProgramStore, made_ready
from systolic.core.errors import RunError
from systolic.inference.grammar import fill_masks
from systolic.serving.facts import CompileFacts
from systolic.serving.text.buckets import Buckets
from systolic.serving.text.request import TopLogprobs
from systolic.serving.text.scheduler import StepWork
from systolic.serving.text.sequence import PENDING, PromptScores, Sequence
from systolic.steps.logits import ChosenTokens, Cuts, Draw, choose, choose_by_all
from systolic.steps.paged import PagedSteps, ServingWeights, StepInput, StepShape, for_choice, whole
from systolic.steps.programs import jit_paged

BIASES = 300
"""Tokens of a request that can have a bias, as in OpenAI's API."""
CHOSEN = ChosenTokens(0, 0, 0, 0)  # ty: ignore[invalid-argument-type]
"""Structure of what a step chose."""
Part = tuple[Sequence, int]
"""A sequence and how many tokens of its prompt it reads."""
Choice = tuple[int, Sequence, list[int]]
"""A row of logits, its sequence, and the tokens before the one that is chosen from it."""
StepResult = tuple[Sequence, int, float, TopLogprobs, PromptScores | None, int]
"""Arguments of :meth:`~systolic.serving.text.sequence.Sequence.push` for a sequence, and its tokens that the step had read: of
those that later steps read nothing is known yet."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextProgram:
    """A program that is not compiled yet, and where it goes."""

    where: dict[Any, Any]
    key: Any
    spec: ProgramSpec
    lower: Callable[[], Any]


def verifying(shape: StepShape) -> str:
    """Name of the program that verifies proposals, such as ``verify 4 x 5, 16 pages``."""
    return str(shape).replace("prefill", "verify")


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
    """Pages of the cache."""
    slots: int
    """Texts that run at once."""
    shapes: tuple[StepShape, ...]
    read: dict[StepShape, Any] = field(default_factory=dict)
    """(weights, pages, latest, packed input) -> (logits, pages)."""
    drafted: tuple[StepShape, ...] = ()
    """Shapes of programs that verify proposals."""
    verify: dict[StepShape, Any] = field(default_factory=dict)
    """The same as ``read``, with logits after every token."""
    score: dict[StepShape, Any] = field(default_factory=dict)
    """(weights, pages, latest, packed input, following) -> (logits, log-probabilities of the tokens that follow, pages)."""
    place: dict[int, Any] = field(default_factory=dict)
    """By the number of adapters: (matrices of one, those of all, its number) -> those of all."""
    choose: dict[int, Any] = field(default_factory=dict)
    """By texts of a step: (logits, latest, packed draw, masks) -> (chosen, latest)."""
    choose_by_all: dict[int, Any] = field(default_factory=dict)
    """By texts of a step: (logits, latest, packed draw, masks, cuts) -> (chosen, latest)."""
    on_compiled: Callable[[CompileFacts], None] = lambda _: None
    """Called after each program, from the thread that made it ready."""
    store: ProgramStore | None = None
    """Store of programs; None compiles all."""
    capacity_bytes: int | None = None
    """Memory of each device before anything was allocated; None until it is measured."""

    @property
    def positions(self) -> int:
        """Tokens of a text that the choice by all settings can look back on."""
        return max(shape.pages for shape in self.shapes) * self.paged.page_size

    @property
    def words(self) -> int:
        """Words of 32 bits that have one for each token of the model."""
        return -(-self.paged.vocab // 32)

    @property
    def scored(self) -> StepShape:
        """The program that also says the log-probabilities of a prompt."""
        long = max(shape.length for shape in self.shapes)
        return StepShape(0, 1, long, max(shape.pages for shape in self.shapes))

    @property
    def texts(self) -> list[int]:
        """Rows of logits of a step, each number once and ascending."""
        drafted = (shape.tokens for shape in self.drafted)
        return sorted({*(shape.texts for shape in self.shapes), *drafted})

    @property
    def count(self) -> int:
        """Programs in all: steps, choices of two kinds, the one that scores, and that which places an adapter."""
        others = 1 + bool(self.paged.adapters)
        return len(self.shapes) + len(self.drafted) + 2 * len(self.texts) + others

    @property
    def all(self) -> list[TextProgram]:
        """All programs, ready or not."""
        programs = [self._read(step) for step in self.shapes]
        programs += [self._verify(step) for step in self.drafted]
        for count in self.texts:
            programs += [self._choose(count), self._choose_by_all(count)]
        programs += [self._place()] if self.paged.adapters else []
        return [*programs, self._score(self.scored)]

    @property
    def largest(self) -> list[TextProgram]:
        """The programs that need the most memory: the largest step of each kind, that which scores a prompt, and the choice by all settings for the most texts."""
        kinds: dict[tuple[bool, bool], StepShape] = {}
        for shape in self.shapes:
            # Rows of decoding gather pages of their own, so that fewer tokens can need more.
            kinds.setdefault((shape.rows > 0, shape.chunks > 0), shape)
        steps = [self._read(shape) for shape in kinds.values()]
        steps += [self._verify(shape) for shape in self.drafted[:1]]
        return [*steps, self._score(self.scored), self._choose_by_all(self.texts[-1])]

    def compile(self, workers: int = 2) -> None:
        """Makes all programs ready that are not: from the store, or compiled.

        Args:
            workers: Programs that are made at the same time.
        """
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(self._make, self.all):
                pass

    def compile_largest(self, workers: int = 2) -> None:
        """Makes the :attr:`largest` programs ready."""
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(self._make, self.largest):
                pass

    def make_when_run(self) -> None:
        """Makes steps and choices by temperature ready when they are first asked for, in place of :meth:`compile`."""
        self.read = _MadeWhenRun(lambda shape: self._make(self._read(shape)))
        self.choose = _MadeWhenRun(lambda texts: self._make(self._choose(texts)))

    def _make(self, program: TextProgram) -> None:
        if program.key in program.where:
            return
        ready = made_ready(self.store, program.spec, program.lower)
        program.where[program.key] = ready.compiled
        places = self.read, self.verify, self.score, self.place, self.choose, self.choose_by_all
        self.on_compiled(
            CompileFacts(
                bucket=program.spec.name,
                seconds=ready.total_seconds,
                cached=ready.cached,
                phases=ready.seconds,
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
        steps = (self.read, self.verify, self.score, self.place, self.choose_by_all)
        compiled = [program for place in steps for program in place.values()]
        analyses = [program.memory_analysis() for program in compiled]
        # A TPU's temporaries are no peak, and a CPU's peak has no temporaries.
        own = [
            max(
                memory.temp_size_in_bytes
                + memory.output_size_in_bytes
                - memory.alias_size_in_bytes,
                memory.peak_memory_in_bytes - memory.argument_size_in_bytes,
            )
            for memory in analyses
        ]
        return int(max(own)) + self.texts[-1] * self.paged.vocab * 4

    def _arguments(self, shape: StepShape) -> tuple[Any, ...]:
        def ints(*size: int) -> Any:
            return jax.ShapeDtypeStruct(size, jnp.int32, sharding=self.everywhere)

        sizes = StepInput.sizes(shape, self.paged.history, self.paged.adapters)
        packed = ints(sum(math.prod(size) for size in sizes))
        return self._weights, self._pages, ints(self.slots + 1), packed

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
        lowering = arguments, lambda: jit_paged(self.paged, shape).lower(*arguments)
        return self._program(str(shape), self.read, shape, lowering, (0, self._pages))

    def _verify(self, shape: StepShape) -> TextProgram:
        arguments = self._arguments(shape)
        jitted = jit_paged(self.paged, shape, drafts=True)
        lowering = arguments, lambda: jitted.lower(*arguments)
        return self._program(verifying(shape), self.verify, shape, lowering, (0, self._pages))

    def _score(self, shape: StepShape) -> TextProgram:
        chunk = (shape.chunks, shape.length)

        def score(weights: Any, pages: Any, latest: Any, packed: Any, following: Any) -> Any:
            inputs = StepInput.unpacked(packed, shape, self.paged.history, self.paged.adapters)
            return self.paged.score(weights, pages, latest, inputs, chunk, following)

        following = jax.ShapeDtypeStruct((shape.tokens,), jnp.int32, sharding=self.everywhere)
        arguments = (*self._arguments(shape), following)
        lowering = self._lower(score, arguments, (self._logits(shape.texts), None, self._pages))
        return self._program(
            f"score {shape}", self.score, shape, lowering, (0, CHOSEN, self._pages)
        )

    def _place(self) -> TextProgram:
        held = self.paged.placed_adapters
        new = {
            path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.everywhere)
            for path, shape in self.paged.adapter_shapes.items()
        }
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.everywhere)
        lowering = self._lower(self.paged.placed, (new, held, number), tuple(held))
        adapters, outputs = self.paged.adapters, (0,) * len(held)
        return self._program(f"place of {adapters}", self.place, adapters, lowering, outputs)

    def _choose(self, texts: int) -> TextProgram:
        target = self.paged.steps.target

        def by_temperature(logits: Any, latest: Any, packed: Any, masks: Any) -> Any:
            return choose(for_choice(target, logits), latest, Draw.unpacked(packed), masks)

        lowering = self._lower(by_temperature, self._choice(texts), (None, None))
        return self._program(f"choice of {texts}", self.choose, texts, lowering, (CHOSEN, 0))

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

        def by_all(logits: Any, latest: Any, packed: Any, masks: Any, cuts: Cuts) -> Any:
            # Its cuts are found bit by bit, by 32 sums over the vocabulary.
            logits = for_choice(target, logits, always=True)
            return choose_by_all(logits, latest, Draw.unpacked(packed), cuts, masks)

        lowering = self._lower(by_all, (*self._choice(texts), cuts), (None, None))
        name = f"choice of {texts} by all settings"
        return self._program(name, self.choose_by_all, texts, lowering, (CHOSEN, 0))

    def _choice(self, texts: int) -> tuple[Any, ...]:
        def some(dtype: Any, *size: int) -> Any:
            return jax.ShapeDtypeStruct(size, dtype, sharding=self.everywhere)

        draw, masks = some(jnp.int32, 4, texts), some(jnp.uint32, texts, self.words)
        return self._logits(texts), some(jnp.int32, self.slots + 1), draw, masks

    def _program(
        self,
        name: str,
        where: dict[Any, Any],
        key: Any,
        lowering: tuple[tuple[Any, ...], Callable[[], Any]],
        outputs: tuple[Any, ...],
    ) -> TextProgram:
        sizes = {"page_size": self.paged.page_size}
        sizes |= {"adapters": self.paged.adapters} if self.paged.adapters else {}
        spec = ProgramSpec(name=name, sizes=sizes, arguments=lowering[0], outputs=outputs)
        return TextProgram(where=where, key=key, spec=spec, lower=lowering[1])

    def _lower(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Callable[[], Any]]:
        """Arguments of a program that replaces its second one, and what traces it.

        Args:
            function: The program.
            arguments: Abstract, with their shardings.
            results: Its results likewise; None for one that all devices hold whole.
        """
        places = tuple(
            self.everywhere if array is None else jax.tree.map(lambda a: a.sharding, array)
            for array in results
        )
        jitted = jax.jit(
            function,
            donate_argnums=1,
            out_shardings=places,
            compiler_options=self.paged.steps.target.compiler_options,
        )
        return arguments, lambda: jitted.lower(*arguments)


@dataclass(frozen=True, kw_only=True)
class ProgramCall:
    """One program that runs."""

    shape: StepShape
    rows: int
    """Texts that read one token."""
    prompt: int
    """Prompt tokens that are read."""
    sequences: list[tuple[int, Sequence, int]]
    """Place among the program's texts, whose token lies there, and how many of its tokens are read then."""
    chosen: ChosenTokens
    """On the device."""
    scored: tuple[Sequence, ChosenTokens, int, list[int]] | None = None
    """Log-probabilities of a prompt's tokens, the position of the first and these."""
    unfinished: list[tuple[int, Sequence, int]] = field(default_factory=list)
    """The same of a prompt that is not read to its end."""
    drafts: Seq[list[int]] = ()
    """Proposals for each of its texts; () of a program that verifies none."""
    broken: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences whose settings could not be made arguments; what is chosen for them means nothing."""

    @property
    def bucket(self) -> str:
        """Name of the program."""
        return verifying(self.shape) if self.drafts else str(self.shape)

    @property
    def padded_tokens(self) -> int:
        """Positions that hold no token."""
        return self.shape.tokens - self.rows - self.prompt - sum(map(len, self.drafts))


@dataclass(kw_only=True)
class StepInFlight:
    """A step whose tokens are not known yet."""

    calls: list[ProgramCall] = field(default_factory=list)
    preempted: int = 0

    @property
    def verifies(self) -> bool:
        """Whether it verifies proposals: how many tokens its texts have then is not known before."""
        return any(call.drafts for call in self.calls)


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
        self._open = {
            texts: jax.device_put(self._open_masks(texts), programs.everywhere)
            for texts in programs.texts
        }
        """Masks of steps where every token can follow, on the devices."""

    @property
    def vocab(self) -> int:
        """Tokens of the model."""
        return self.programs.paged.vocab

    def place(self, number: int, matrices: Mapping[str, np.ndarray]) -> None:
        """Puts the matrices of an adapter, by :attr:`~systolic.steps.paged.PagedSteps.adapter_shapes`, in the place of a number, for the steps that begin from now on."""
        paged, (leaves, structure) = self.programs.paged, jax.tree.flatten(self._weights)
        held = [leaves[leaf] for leaf, _ in paged.adapter_leaves]
        after = self.programs.place[paged.adapters](dict(matrices), held, np.int32(number))
        for (leaf, _), array in zip(paged.adapter_leaves, after, strict=True):
            leaves[leaf] = array
        self._weights = jax.tree.unflatten(structure, leaves)

    def run(self, work: StepWork, settle: Callable[[], None] = lambda: None) -> StepInFlight:
        """Starts a step; its sequences have read their tokens, and the next of each is pending.

        Args:
            work: Of the scheduler.
            settle: Makes the tokens of the step before known. Called, while the device computes the logits, before the first
                choice that depends on them.
        """
        flight = StepInFlight(preempted=len(work.preempted))
        decode, parts = work.decode, list(work.prefill)
        mixed = None if work.drafts else self._mixed(decode, parts)
        if work.drafts:
            flight.calls.append(self._verified(decode, work.drafts))
        elif mixed is not None:
            flight.calls.append(self._call(mixed, decode, parts.pop(0), settle))
        elif decode:
            shape = self.buckets.shape(len(decode), 0, self._pages_of(decode, None))
            assert shape is not None
            flight.calls.append(self._call(shape, decode, None, settle))
        for part in parts:
            if part[0].ended:
                continue
            if part[0].request.prompt_logprobs:
                shape = self.programs.scored
            else:
                shape = self.buckets.shape(0, part[1], self._pages_of([], part))
            assert shape is not None
            flight.calls.append(self._call(shape, [], part, settle))
        return flight

    def collect(self, flight: StepInFlight) -> list[StepResult]:
        """Waits for a step; what it chose and scored, in the order of its sequences."""
        results: list[StepResult] = []
        for call in flight.calls:
            scores = self._scores(call)
            tokens = self.chosen(call)
            logprobs = np.asarray(call.chosen.logprob).tolist()
            top = _likeliest(call.chosen) if call.chosen.top.shape[1] else None
            if call.drafts:
                results += _accepted(call, tokens, logprobs, top)
                continue
            for place, sequence, read in call.sequences:
                best = top(place) if top is not None and sequence.request.logprobs else ()
                results.append((sequence, tokens[place], logprobs[place], best, scores, read))
            for place, sequence, read in call.unfinished:
                results.append((sequence, PENDING, logprobs[place], (), scores, read))
        return results

    def chosen(self, call: ProgramCall) -> list[int]:
        """Tokens of each row of logits; waits for the device."""
        return np.asarray(call.chosen.tokens).tolist()

    def _mixed(self, decode: list[Sequence], parts: list[Part]) -> StepShape | None:
        if not decode or not parts or parts[0][0].request.prompt_logprobs:
            return None
        return self.buckets.shape(len(decode), parts[0][1], self._pages_of(decode, parts[0]))

    def _pages_of(self, decode: list[Sequence], part: Part | None) -> int:
        """Pages of the longest text of a step."""
        size = self.programs.paged.page_size
        ends = [sequence.read + 1 for sequence in decode]
        if part is not None:
            ends.append(part[0].read + part[1])
        return -(-max(ends) // size)

    def _call(
        self,
        shape: StepShape,
        decode: list[Sequence],
        part: Part | None,
        settle: Callable[[], None],
    ) -> ProgramCall:
        """Runs one program, and moves its sequences on."""
        read = [] if part is None else [(part[0], part[0].tokens[: part[0].read + part[1]])]
        packed = self._packed(shape, decode, read)
        scored = None
        if part is not None and part[0].request.prompt_logprobs:
            following, known = self._following(shape, part)
            logits, scores, self._pages = self.programs.score[shape](
                self._weights, self._pages, self._latest, packed, following
            )
            scored = (part[0], scores, part[0].read + 1, known)
        else:
            logits, self._pages = self.programs.read[shape](
                self._weights, self._pages, self._latest, packed
            )
        parts: list[tuple[int, Sequence, int]] = [(row, s, 1) for row, s in enumerate(decode)]
        if part is not None:
            parts.append((shape.rows, *part))
        now = monotonic()
        for _, sequence, count in parts:
            sequence.read += count
            if sequence.started is None:
                sequence.started = now
        ended = [(row, sequence, sequence.read) for row, sequence, _ in parts if not sequence.left]
        unfinished = [(row, s, s.read) for row, s, _ in parts if s.left]
        if any(sequence.looks_back for _, sequence, _ in ended):
            settle()
        broken: list[tuple[Sequence, Exception]] = []
        choices = [(row, sequence, sequence.tokens) for row, sequence, _ in ended]
        chosen = self._choose(shape.texts, logits, choices, broken)
        for _, sequence, _ in ended:
            sequence.tokens.append(PENDING)
        return ProgramCall(
            shape=shape,
            rows=len(decode),
            prompt=0 if part is None else part[1],
            sequences=ended,
            chosen=chosen,
            scored=scored,
            unfinished=unfinished,
            broken=broken,
        )

    def _verified(self, decode: list[Sequence], drafts: Seq[list[int]]) -> ProgramCall:
        """Runs the program that verifies proposals, and moves its sequences on by the token that is certain."""
        size = self.programs.paged.page_size
        texts = [[*s.tokens, *draft] for s, draft in zip(decode, drafts, strict=True)]
        pages = -(-max(map(len, texts)) // size)
        shape = self.buckets.drafted_shape(len(decode), pages)
        packed = self._packed(shape, [], list(zip(decode, texts, strict=True)))
        logits, self._pages = self.programs.verify[shape](
            self._weights, self._pages, self._latest, packed
        )
        choices: list[Choice] = []
        for number, (sequence, text) in enumerate(zip(decode, texts, strict=True)):
            known = len(sequence.tokens)
            choices += [
                (number * shape.length + at, sequence, text[: known + at])
                for at in range(len(text) - known + 1)
            ]
        broken: list[tuple[Sequence, Exception]] = []
        chosen = self._choose(shape.tokens, logits, choices, broken)
        for sequence in decode:
            sequence.read += 1
            sequence.tokens.append(PENDING)
        return ProgramCall(
            shape=shape,
            rows=len(decode),
            prompt=0,
            sequences=[(row, sequence, sequence.read) for row, sequence in enumerate(decode)],
            chosen=chosen,
            drafts=drafts,
            broken=broken,
        )

    def _choose(
        self,
        rows: int,
        logits: Any,
        choices: list[Choice],
        broken: list[tuple[Sequence, Exception]],
    ) -> ChosenTokens:
        """Chooses tokens from logits; arguments as of :meth:`_choice`."""
        draw, cuts = self._choice(rows, choices, broken)
        masks = self._masks(rows, choices, broken)
        if cuts is None:
            chosen, self._latest = self.programs.choose[rows](logits, self._latest, draw, masks)
        else:
            chosen, self._latest = self.programs.choose_by_all[rows](
                logits, self._latest, draw, masks, cuts
            )
        return chosen

    def _open_masks(self, rows: int) -> np.ndarray:
        return np.full((rows, self.programs.words), 0xFFFFFFFF, np.uint32)

    def _masks(
        self,
        rows: int,
        choices: list[Choice],
        broken: list[tuple[Sequence, Exception]],
    ) -> Any:
        """Which tokens can follow; see :func:`systolic.steps.logits.masked`. Arguments as of :meth:`_choice`."""
        bound = []
        for place, sequence, text in choices:
            if sequence.matcher is not None and not sequence.ended:
                proposed = text[len(sequence.tokens) :]
                bound.append((sequence, sequence.matcher.after(proposed), place))
        if not bound:
            return self._open[rows]
        masks = self._open_masks(rows)
        fill_masks([(matcher, place) for _, matcher, place in bound], masks)
        for sequence, matcher, _ in bound:
            try:
                matcher.check()
            except RunError as error:
                broken.append((sequence, error))
        return masks

    def _packed(
        self, shape: StepShape, decode: list[Sequence], parts: list[tuple[Sequence, list[int]]]
    ) -> np.ndarray:
        """A step's input as one array; see :meth:`systolic.steps.paged.StepInput.unpacked`.

        Args:
            shape: Of the program.
            decode: Texts that read one token.
            parts: Texts that read more, each with its tokens up to the last that is read.
        """
        history = self.programs.paged.history
        tokens = np.zeros(shape.tokens, np.int32)
        slots = np.full(shape.rows, -1, np.int32)
        recent = np.full((shape.tokens, history), -1, np.int32)
        start = np.zeros(shape.texts, np.int32)
        count = np.zeros(shape.texts, np.int32)
        table = np.zeros((shape.texts, shape.pages), np.int32)
        adapters = np.zeros(shape.texts, np.int32)
        for row, sequence in enumerate(decode):
            token = sequence.tokens[sequence.read]
            if token == PENDING:
                slots[row] = sequence.slot
            else:
                tokens[row] = token
            start[row], count[row] = sequence.read, 1
            adapters[row] = sequence.request.adapter
            self._fill(table[row], sequence)
            if history:
                self._recall(recent[row], sequence.tokens, sequence.read)
        for number, (sequence, text) in enumerate(parts):
            first, row, read = (
                shape.rows + number * shape.length,
                shape.rows + number,
                sequence.read,
            )
            size = len(text) - read
            tokens[first : first + size] = text[read:]
            start[row], count[row] = read, size
            adapters[row] = sequence.request.adapter
            self._fill(table[row], sequence)
            for place in range(size if history else 0):
                self._recall(recent[first + place], text, read + place)
        numbers = adapters if self.programs.paged.adapters else adapters[:0]
        arrays = (tokens, slots, recent, start, count, table, numbers)
        return np.concatenate([array.reshape(-1) for array in arrays])

    def _fill(self, row: np.ndarray, sequence: Sequence) -> None:
        pages = sequence.pages[: len(row)]
        row[: len(pages)] = pages

    def _recall(self, row: np.ndarray, text: list[int], position: int) -> None:
        """Tokens before a position, for n-gram lookups."""
        before = text[max(position - len(row), 0) : position]
        if before:
            row[len(row) - len(before) :] = before

    def _following(self, shape: StepShape, part: Part) -> tuple[np.ndarray, list[int]]:
        """Tokens after each that is read, and those of the prompt among them."""
        sequence, size = part
        end = min(sequence.read + size + 1, sequence.prompt_tokens)
        known = sequence.tokens[sequence.read + 1 : end]
        following = np.zeros(shape.tokens, np.int32)
        following[: len(known)] = known
        return following, known

    def _scores(self, call: ProgramCall) -> PromptScores | None:
        """Scored tokens of a prompt."""
        if call.scored is None:
            return None
        sequence, chosen, first, known = call.scored
        logprobs, top = np.asarray(chosen.logprob).tolist(), _likeliest(chosen)
        wanted = sequence.request.logprobs or 0
        return first, known, [(logprobs[at], top(at)[:wanted]) for at in range(len(known))]

    def _choice(
        self,
        rows: int,
        choices: list[Choice],
        broken: list[tuple[Sequence, Exception]],
    ) -> tuple[np.ndarray, Cuts | None]:
        """How the tokens of a step are chosen; rows of padding write to the slot of none.

        Args:
            rows: Of the logits.
            choices: What is chosen; a slot keeps its text's token unless it is a proposal's.
            broken: Takes sequences whose settings don't fit the arrays: the others go on.
        """
        draw = np.zeros((4, rows), np.int32)
        slots, temperature, seed, number = draw
        slots[:] = self.programs.slots
        temperature, seed = temperature.view(np.float32), seed.view(np.uint32)
        for place, sequence, text in choices:
            slots[place], seed[place] = sequence.slot, sequence.seed
            temperature[place] = sequence.request.sampling.temperature
            number[place] = len(text) - sequence.prompt_tokens
        if not any(sequence.cut for _, sequence, _ in choices):
            return draw, None
        return draw, _cuts(rows, self.programs.positions, choices, broken)


def _accepted(
    call: ProgramCall,
    tokens: list[int],
    logprobs: list[float],
    top: Callable[[int], TopLogprobs] | None,
) -> list[StepResult]:
    """Results of a program that verified proposals: those that were chosen, and the token after them.

    A proposal is accepted if the token that is chosen in its place, as it would be without proposals, is the same. For tokens that
    are drawn this is rejection sampling: a proposal of the probability p is accepted with p, and what takes its place otherwise
    has the distribution of the others.
    """
    results: list[StepResult] = []
    for (number, sequence, read), drafts in zip(call.sequences, call.drafts, strict=True):
        for at in range(len(drafts) + 1):
            row = number * call.shape.length + at
            best = top(row) if top is not None and sequence.request.logprobs else ()
            results.append((sequence, tokens[row], logprobs[row], best, None, read + at))
            if at == len(drafts) or tokens[row] != drafts[at]:
                sequence.drafted(len(drafts), at)
                break
    return results


def _likeliest(chosen: ChosenTokens) -> Callable[[int], TopLogprobs]:
    """The likeliest tokens of a row of what a step chose, with their log-probabilities."""
    top, values = np.asarray(chosen.top), np.asarray(chosen.top_logprob)
    return lambda row: tuple(zip(top[row].tolist(), values[row].tolist(), strict=True))


def _cuts(
    rows: int,
    positions: int,
    choices: list[Choice],
    broken: list[tuple[Sequence, Exception]],
) -> Cuts:
    top_k, prompt = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    reals = np.zeros((5, rows), np.float32)
    reals[0] = reals[4] = 1.0
    text = np.full((rows, positions), PENDING, np.int32)
    biased = np.full((rows, BIASES), PENDING, np.int32)
    bias = np.zeros((rows, BIASES), np.float32)
    for place, sequence, tokens in choices:
        sampling = sequence.request.sampling
        try:
            top_k[place], prompt[place] = sampling.top_k, sequence.prompt_tokens
            reals[:, place] = (
                sampling.top_p,
                sampling.min_p,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty,
            )
            text[place, : len(tokens)] = tokens
            for at, (token, by) in enumerate(sequence.biases(len(tokens)).items()):
                biased[place, at], bias[place, at] = token, by
        except Exception as error:
            broken.append((sequence, error))
    arrays: Any = (top_k, *reals, text, prompt, biased, bias)
    return Cuts(*arrays)
