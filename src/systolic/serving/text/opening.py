"""An engine for a model's weights on this machine: sizes, memory, programs, pages."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from systolic.core.errors import OptionError
from systolic.data.text.text_data import TextData
from systolic.forecasting.serving_memory import ServingMemory
from systolic.serving.compiles import CompileFacts
from systolic.serving.text.buckets import Buckets, TextTraffic
from systolic.serving.text.engine import Bounds, Engine
from systolic.serving.text.facts import EngineWatcher
from systolic.serving.text.memory import memory_of, pages_that_fit
from systolic.serving.text.pages import PagePool
from systolic.serving.text.programs import Programs
from systolic.serving.text.runner import StepRunner
from systolic.serving.text.scheduler import Scheduler, StepLimits
from systolic.steps.paged import PagedSteps
from systolic.steps.steps import StepFunctions


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
    """Of the cache; 0 holds all texts at their longest."""
    traffic: TextTraffic | None = None
    """What the programs' sizes are chosen for; None assumes."""
    queued: int = 1024
    """Requests that may wait."""
    strict: bool = False
    """Whether a compile after the start ends the engine."""
    mixed: bool | None = None
    """Whether one program both generates and reads prompts; None: not on a CPU, where it saves nothing."""
    programs: tuple[int, int, int] = (5, 3, 3)
    """Most sizes of programs by texts that generate, by prompt tokens and by pages of a text."""


class OpeningWatcher(Protocol):
    """Whoever is told of an engine before it starts."""

    def sized(self, buckets: Buckets, programs: int) -> None:
        """Before the first of so many programs is compiled."""
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


LEAST_ROWS = 8
"""Rows of an accelerator's matmul: fewer cost as much, and on a GPU more."""
CONTEXT = 4096
"""Tokens of a text where none are asked for and the model takes more."""


def open_engine(
    steps: StepFunctions,
    params: Any,
    model_state: Any,
    sizes: EngineSizes = EngineSizes(),
    watcher: EngineWatcher | None = None,
    opening: OpeningWatcher | None = None,
) -> Engine:
    """An engine whose programs are compiled; :meth:`Engine.start` starts it.

    Args:
        steps: Programs of a text job on this machine's devices.
        params: Weights.
        model_state: Other variables.
        sizes: How many texts, how long.
        watcher: Told about steps and requests.
        opening: Told about sizes, memory and programs.

    Raises:
        OptionError: the sizes do not fit each other, or the job is not about text.
        RunError: the device has too little memory.
    """
    data = steps.job.data
    if not isinstance(data, TextData):
        raise OptionError(f"{steps.job.name} has no text; serve it as another kind of model")
    context = context_of(steps, data, sizes)
    if sizes.chunk % sizes.page_size:
        raise OptionError(
            f"chunk is {sizes.chunk}; give a multiple of the page size {sizes.page_size}"
        )
    paged = PagedSteps(steps, sizes.page_size)
    buckets = _buckets(steps, sizes, context)
    programs = _programs(paged, buckets, sizes, math.ceil(context / sizes.page_size), opening)
    pages = programs.pages
    if opening is not None:
        opening.measured(memory_of(programs, pages), context)
    programs.compile()
    begin = time.perf_counter()
    place = jax.jit(paged.weights, out_shardings=paged.shardings)
    weights = jax.block_until_ready(place(params, model_state))
    if opening is not None:
        opening.placed(time.perf_counter() - begin)
    where = jax.tree.map(lambda a: a.sharding, paged.placed_pages(pages))
    empty = jax.jit(lambda: paged.empty_pages(pages), out_shardings=where)()
    pool = PagePool(num_pages=pages, page_size=sizes.page_size)
    limits = StepLimits(rows=sizes.rows, chunk=buckets.lengths[-1], prefills=1)
    return Engine(
        StepRunner(programs, buckets, weights, empty),
        Scheduler(pool=pool, limits=limits),
        data.get_tokenizer(),
        data.ends,
        Bounds(context=context, queued=sizes.queued, strict=sizes.strict),
        watcher,
    )


def _programs(
    paged: PagedSteps,
    buckets: Buckets,
    sizes: EngineSizes,
    longest: int,
    opening: OpeningWatcher | None,
) -> Programs:
    """Programs for as many pages as there are asked for, or fit.

    Raises:
        OptionError: there are fewer than one text needs.
        RunError: as :func:`systolic.serving.text.memory.pages_that_fit`.
    """
    wanted = sizes.pages or sizes.rows * longest + 1
    if wanted <= longest:
        raise OptionError(
            f"pages is {wanted}; a text of the whole context needs {longest} and padding 1"
        )
    first = Programs(paged=paged, pages=wanted, slots=sizes.rows, shapes=buckets.shapes)
    if opening is not None:
        first.told = opening.compiled
        opening.sized(buckets, first.count)
    pages = pages_that_fit(first, wanted, longest + 1)
    if pages == wanted:
        return first
    if sizes.pages:
        raise OptionError(f"pages is {wanted} and {pages} fit; give fewer, or leave it out")
    return replace(first, pages=pages, read={}, score={}, choose={}, choose_by_all={})


def _buckets(steps: StepFunctions, sizes: EngineSizes, context: int) -> Buckets:
    alone = steps.target.platform == "cpu"
    return Buckets.of(
        sizes.traffic or TextTraffic.assumed(context),
        rows=sizes.rows,
        chunk=min(sizes.chunk, -(-context // sizes.page_size) * sizes.page_size),
        context=context,
        page_size=sizes.page_size,
        mixed=not alone if sizes.mixed is None else sizes.mixed,
        counts=sizes.programs,
        least_rows=1 if alone else LEAST_ROWS,
    )


def context_of(steps: StepFunctions, data: TextData, sizes: EngineSizes) -> int:
    """Tokens of a text.

    Raises:
        OptionError: more are asked for than the model has positions for.
    """
    most = steps.job.model.learned_positions  # ty: ignore[missing-attribute]
    if sizes.context:
        if most and sizes.context > most:
            raise OptionError(f"context is {sizes.context} and the model has {most} positions")
        return sizes.context
    return min(data.context, most or data.context, CONTEXT)
