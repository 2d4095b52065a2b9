"""The compiled programs of an engine: all of them before the first request, none after."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from systolic.aot.program_store import ProgramSpec, ProgramStore, made_ready
from systolic.serving.compiles import CompileFacts
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
