"""An engine for a model's weights on this machine: sizes, memory, programs, pages."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp

from systolic.chips.host import free_bytes
from systolic.compiling.program_store import EntryCheck, ProgramStore
from systolic.core.errors import OptionError
from systolic.core.units import si
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import TextData
from systolic.job import ServedCache
from systolic.job.serving_memory import ServingMemory
from systolic.models.linear import alone_on_cpu
from systolic.serving.facts import CompileFacts
from systolic.serving.text.buckets import Buckets, TextTraffic
from systolic.serving.text.converting import held_bytes, memory_of, pages_that_fit, serving_weights
from systolic.serving.text.engine import Bounds, Engine
from systolic.serving.text.runner import Programs, StepRunner
from systolic.serving.text.scheduler import PagePool, Scheduler, StepLimits
from systolic.serving.text.sequence import EngineWatcher
from systolic.steps.lengths import LEAST_TEXT, check_length, learned_text, longest_text
from systolic.steps.paged import PagedSteps
from systolic.steps.serving_layout import LEAST_ROWS
from systolic.steps.step_functions import StepFunctions

CONTEXT = 4096
"""Tokens of a text where none are asked for and the model takes more."""


PROGRAMS = (5, 3, 3)
"""Most sizes of programs, as :attr:`EngineSizes.programs`."""
CPU_PROGRAMS = (3, 2, 2)
"""The same on a CPU, where a step takes as long as reading the weights, whatever its padding, and a program seconds to compile."""


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Sizes of an engine."""

    rows: int = 16
    """Texts that run at once."""
    context: int = 0
    """Tokens of a text; 0 takes the model's own, at most :data:`CONTEXT`."""
    chunk: int = 256
    """Most prompt tokens of a step."""
    page_size: int = 64
    """Positions of a page."""
    pages: int = 0
    """Pages of the cache; 0 holds all texts at their longest."""
    cache: ServedCache = ServedCache.plain
    """Format of keys and values."""
    traffic: TextTraffic | None = None
    """Traffic that the programs' sizes are chosen for; None assumes one."""
    queued: int = 1024
    """Requests that may wait."""
    strict: bool = False
    """Whether a compile after the start ends the engine."""
    mixed: bool | None = None
    """Whether one program both generates and reads prompts; None: not on a CPU, where it saves nothing."""
    speculate: int = 0
    """Tokens that are proposed for a text at once, from what it says already; 0 proposes none."""
    adapters: int = 0
    """Adapters side by side in those of the job, of which each text has one or none."""
    programs: tuple[int, int, int] | None = None
    """Most sizes of programs by texts that generate, by prompt tokens and by pages of a text; None: :data:`PROGRAMS`, or on a CPU :data:`CPU_PROGRAMS`."""

    def __post_init__(self) -> None:
        if self.chunk % self.page_size:
            raise OptionError(
                f"--chunk is {self.chunk} and --page-size {self.page_size}; give a --chunk that is a multiple of --page-size"
            )


class OpeningWatcher(Protocol):
    """Whoever is told of an engine before it starts."""

    def sized(self, buckets: Buckets, programs: int, kernel: str) -> None:
        """Before the first of so many programs is compiled; with what reads the pages."""
        ...

    def compiled(self, facts: CompileFacts) -> None:
        """After each program, from the thread that compiled it."""
        ...

    def measured(self, memory: ServingMemory, context: int) -> None:
        """When the largest programs are compiled, before anything is allocated; with the tokens of the longest text."""
        ...

    def placed(self, seconds: float) -> None:
        """After the weights were laid out on the devices, which took so long."""
        ...


def open_engine(
    steps: StepFunctions,
    params: Any,
    model_state: Any,
    sizes: EngineSizes = EngineSizes(),
    watcher: EngineWatcher | None = None,
    opening: OpeningWatcher | None = None,
    store: ProgramStore | None = None,
) -> Engine:
    """An engine whose programs are compiled; :meth:`Engine.start` starts it.

    Args:
        steps: Programs of a text job on this machine's devices.
        params: Weights.
        model_state: Other variables.
        sizes: How many texts, how long.
        watcher: Told about steps and requests.
        opening: Told about sizes, memory and programs.
        store: Where programs are kept; None compiles all.

    Raises:
        OptionError: the sizes do not fit each other, or the job is not about text.
        RunError: the device has too little memory.
    """
    plan = plan_engine(steps, sizes, store)
    return engine_of(plan, lambda: {**params, **model_state}, watcher, opening)


def engine_of(
    plan: "EnginePlan",
    read: Callable[[], dict[str, Any]],
    watcher: EngineWatcher | None = None,
    opening: OpeningWatcher | None = None,
) -> Engine:
    """An engine whose weights are read while its programs are compiled, once the largest are.

    Args:
        plan: Its sizes.
        read: Reads parameters and other variables by path, which are then freed as they are converted.
        watcher: Told about steps and requests.
        opening: Told about sizes, memory and programs.

    Raises:
        OptionError: fewer pages fit than are asked for.
        RunError: the device has too little memory.
    """
    programs = plan.fitted(opening)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        programs.compile()
        arrays = reading.result()
    del reading
    begin = time.perf_counter()
    weights = serving_weights(plan.paged, arrays, plan.store)
    if opening is not None:
        opening.placed(time.perf_counter() - begin)
    empty = programs.empty_pages()
    pool = PagePool(num_pages=programs.pages, page_size=plan.sizes.page_size)
    limits = StepLimits(
        rows=plan.sizes.rows,
        chunk=plan.buckets.lengths[-1],
        prefills=1,
        drafts=plan.sizes.speculate,
        drafted_texts=max(plan.buckets.drafted_texts, default=0),
    )
    return Engine(
        StepRunner(programs, plan.buckets, weights, empty),
        Scheduler(pool=pool, limits=limits),
        plan.data.get_tokenizer(),
        plan.data.ends,
        Bounds(context=plan.context, queued=plan.sizes.queued, strict=plan.sizes.strict),
        watcher,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class EnginePlan:
    """Sizes of an engine's programs, before any is compiled."""

    data: TextData
    sizes: EngineSizes
    context: int
    """Tokens of a text."""
    paged: PagedSteps
    buckets: Buckets
    store: ProgramStore | None

    @property
    def longest(self) -> int:
        """Pages of the longest text."""
        return math.ceil(self.context / self.sizes.page_size)

    @property
    def beyond(self) -> str | None:
        """A warning where texts may be longer than those of training, or than its base was made for, which rotary positions allow."""
        trained = self.data.context
        if self.context <= trained:
            return None
        return f"context is {self.context} and the model was trained on texts of {trained} tokens, beyond which answers get worse; give {trained} or less"

    @property
    def widened(self) -> str | None:
        """A line where the weights are held in more bits than the job computes with."""
        if not self.paged.wide:
            return None
        target = self.paged.steps.target
        held = held_bytes(self.paged.placed_weights)
        narrow = held_bytes(PagedSteps(self.paged.steps, self.sizes.page_size).placed_weights)
        if held == narrow:
            return None
        return f"weights are held as float32, {si(held, 'B')} in place of {si(narrow, 'B')}: a CPU multiplies few rows of {target.dtype} more slowly"

    @property
    def origin(self) -> str:
        """Lengths that the model was made for and fine-tuned on: ``made for 8,192, --context for more; fine-tuned in rows of 256``."""
        data, learned = self.data, learned_text(self.paged.steps.job)
        if learned is not None:
            return f"trained in rows of {learned:,}"
        more = ", --context for more" if self.context < data.context else ""
        tuned = f"; fine-tuned in rows of {data.row:,}" if isinstance(data, Instructions) else ""
        return f"made for {data.context:,}{more}{tuned}"

    @property
    def wanted(self) -> int:
        """Pages that are asked for, or that hold all texts at their longest."""
        return self.sizes.pages or self.sizes.rows * self.longest + 1

    def programs(self) -> Programs:
        """Programs for all pages that are wanted, not compiled."""
        return Programs(
            paged=self.paged,
            pages=self.wanted,
            slots=self.sizes.rows,
            shapes=self.buckets.shapes,
            drafted=self.buckets.drafted,
            store=self.store,
        )

    def fitted(
        self, opening: OpeningWatcher | None = None, first: Programs | None = None
    ) -> Programs:
        """Programs for as many pages as there are asked for, or fit, of which the largest are ready.

        Args:
            opening: Told about sizes, memory and programs.
            first: Programs for all pages that are wanted, some of them ready.

        Raises:
            OptionError: fewer fit than are asked for.
            RunError: as :func:`systolic.serving.text.converting.pages_that_fit`.
        """
        first = first or self.programs()
        if opening is not None:
            first.on_compiled = opening.compiled
            opening.sized(self.buckets, first.count, self.paged.kernel)
        pages = pages_that_fit(first, self.wanted, self.longest + 1)
        if pages < self.wanted and self.sizes.pages:
            raise OptionError(
                f"pages is {self.wanted} and {pages} fit; give fewer, or leave it out"
            )
        if opening is not None:
            # Of the first programs: those for fewer pages are not compiled yet, and need as much beside them.
            opening.measured(memory_of(first, pages), self.context)
        if pages == self.wanted:
            return first
        return replace(
            first, pages=pages, read={}, verify={}, score={}, choose={}, choose_by_all={}
        )

    def kept(self) -> list[EntryCheck]:
        """Which programs are on the disk; none is compiled.

        Where the largest are not, how many pages fit is not known, and programs for all pages are looked for.
        """
        assert self.store is not None
        first = programs = self.programs()
        # Only those that can be read: reading any other one warns of a compile, and there is none.
        there = [(program, self.store.check(program.spec).hit) for program in first.largest]
        largest = [
            (program, self.store.read(program.spec) if hit else None) for program, hit in there
        ]
        for program, stored in largest:
            if stored is not None:
                program.where[program.key] = stored.compiled
        if all(stored is not None for _, stored in largest):
            programs = self.fitted(first=first)
        wanted = [program.spec for program in programs.all]
        if programs is not first:
            wanted = [*(program.spec for program, _ in largest), *wanted]
        return [self.store.check(spec) for spec in wanted]


def plan_engine(
    steps: StepFunctions, sizes: EngineSizes, store: ProgramStore | None = None
) -> EnginePlan:
    """The programs of an engine; nothing is compiled.

    Raises:
        OptionError: as :func:`open_engine`.
    """
    data = steps.job.data
    if not isinstance(data, TextData):
        raise OptionError(f"{steps.job.name} has no text; serve it as another kind of model")
    context = context_of(steps, data, sizes)
    plan = EnginePlan(
        data=data,
        sizes=sizes,
        context=context,
        paged=PagedSteps(
            steps, sizes.page_size, sizes.cache, adapters=sizes.adapters, wide=_widens(steps)
        ),
        buckets=_buckets(steps, sizes, context),
        store=store,
    )
    if plan.wanted <= plan.longest:
        raise OptionError(
            f"pages is {plan.wanted}; a text of the whole context needs {plan.longest} and padding 1"
        )
    return plan


def _widens(steps: StepFunctions) -> bool:
    """Whether weights of 16 bits are held as float32: on one CPU with memory for twice as much."""
    target, network = steps.target, steps.network
    narrow = alone_on_cpu(target) and jnp.dtype(target.dtype).itemsize == 2
    return narrow and 2 * 4 * network.num_parameters < free_bytes()


def _buckets(steps: StepFunctions, sizes: EngineSizes, context: int) -> Buckets:
    alone = steps.target.platform == "cpu"
    buckets = Buckets.of(
        sizes.traffic or TextTraffic.assumed(context),
        rows=sizes.rows,
        chunk=min(sizes.chunk, -(-context // sizes.page_size) * sizes.page_size),
        context=context,
        page_size=sizes.page_size,
        mixed=not alone if sizes.mixed is None else sizes.mixed,
        counts=sizes.programs or (CPU_PROGRAMS if alone else PROGRAMS),
        least_rows=1 if alone else LEAST_ROWS,
    )
    return replace(buckets, drafts=sizes.speculate)


def context_of(steps: StepFunctions, data: TextData, sizes: EngineSizes) -> int:
    """Tokens of a text.

    Raises:
        OptionError: more are asked for than the model has positions for, or was made for; or so few that nothing can be answered.
    """
    model: Any = steps.job.model
    most = model.learned_positions
    context = sizes.context or min(data.context, most or data.context, CONTEXT)
    if sizes.context:
        check_length(model, longest_text(steps.job), context, "--context is", "--context")
    if context < LEAST_TEXT:
        raise OptionError(
            f"the context of {steps.job.name} is {context}, which leaves no token for an answer; give --context {LEAST_TEXT} or more"
        )
    return context
