"""Jitted programs of a job, the same for training and for forecasts; their compile in a thread, and what keeps them across processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from systolic.core.shutdown import start_native
from systolic.data.batches import Blocks, DeviceBatches, FirstExamples, ProcessShare, share_of
from systolic.job import Job, Layout, Read, Sampling, Split
from systolic.job.data import MASK, Batches
from systolic.steps.decode import Decode
from systolic.steps.paged import PagedDecode, PagedSteps, StepInput, StepShape
from systolic.steps.step_functions import StepFunctions

POLL_SECONDS = 0.1
"""Interval of checking for a signal while a thread compiles."""


def jit_train(steps: StepFunctions) -> Any:
    """The train step, jitted: (state, batch) -> (state, metrics); the state is donated."""
    return jax.jit(
        steps.train,
        donate_argnums=0,
        in_shardings=(steps.shardings, steps.batch_shardings),
        out_shardings=(steps.shardings, None),
        compiler_options=steps.target.compiler_options,
    )


def jit_evaluate(steps: StepFunctions) -> Any:
    """The eval step, jitted: (params, rest, batch) -> sums."""
    return jax.jit(steps.evaluate, compiler_options=steps.target.compiler_options)


def jit_weights(decode: Decode) -> Any:
    """The weights of generation, jitted: params of training -> params of :func:`jit_prefill` and :func:`jit_decode`."""
    return jax.jit(decode.weights, out_shardings=decode.placement)


def jit_prefill(decode: Decode, size: int) -> Any:
    """The prefill of ``size`` prompts, jitted: (params, rest, tokens, count, key, capacity) -> state."""
    return jax.jit(
        decode.prefill,
        static_argnames="capacity",
        out_shardings=_places(decode, size),
        compiler_options=decode.steps.target.compiler_options,
    )


def jit_decode(decode: Decode, size: int) -> Any:
    """The decode step of ``size`` sequences, jitted: (params, rest, state, count) -> (state, tokens); the state is donated."""
    return jax.jit(
        decode.decode,
        static_argnames="count",
        donate_argnums=2,
        out_shardings=(_places(decode, size), None),
        compiler_options=decode.steps.target.compiler_options,
    )


def jit_paged(paged: PagedSteps, shape: StepShape, *, drafts: bool = False) -> Any:
    """A step of an engine, jitted: (weights, pages, latest, packed input) -> (logits, pages); the pages are donated.

    Args:
        paged: The programs.
        shape: Of the step.
        drafts: Whether its chunks are proposals, with logits after each token.
    """

    def read(weights: Any, pages: Any, latest: Any, packed: Any) -> Any:
        step_input = StepInput.unpacked(packed, shape, paged.history, paged.adapters)
        run = paged.verify if drafts else paged.read
        return run(weights, pages, latest, step_input, (shape.chunks, shape.length))

    rows = shape.tokens if drafts else shape.texts
    outputs = (paged.placed_logits(rows), paged.placed_pages(1))
    return jax.jit(
        read,
        donate_argnums=1,
        out_shardings=jax.tree.map(lambda a: a.sharding, outputs),
        compiler_options=paged.steps.target.compiler_options,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Jitted programs of text generation, compiled once for each size of prompt and cache."""

    decode: Decode | PagedDecode
    weights: Any
    """Params and rest of training -> params of ``prefill`` and ``step``."""
    prefill: Any
    """See :func:`jit_prefill`."""
    step: Any
    """See :func:`jit_decode`."""


def generation(
    steps: StepFunctions, sampling: Sampling, rows: int = 1, *, paged: bool = False
) -> Generation:
    """Generation programs of a job, kept for each sampling and number of rows so that they are traced once.

    Args:
        steps: Of the job.
        sampling: Sampling of the next token.
        rows: Texts that are written together.
        paged: Whether one text is written over pages, as :class:`systolic.steps.paged.PagedDecode` does.

    Raises:
        RunError: the model does not generate text.
    """
    programs = steps.generations.get((sampling, rows, paged))
    if programs is None:
        if paged:
            programs = _paged_generation(steps, sampling)
        else:
            decode = Decode(steps, sampling)
            weights = jit_weights(decode)
            programs = Generation(
                decode=decode,
                weights=lambda params, _: weights(params),
                prefill=jit_prefill(decode, rows),
                step=jit_decode(decode, rows),
            )
        steps.generations[sampling, rows, paged] = programs
    return programs


def _paged_generation(steps: StepFunctions, sampling: Sampling) -> Generation:
    decode, options = PagedDecode(steps, sampling), steps.target.compiler_options
    return Generation(
        decode=decode,
        weights=jax.jit(decode.weights),
        prefill=jax.jit(decode.prefill, static_argnames="capacity", compiler_options=options),
        step=jax.jit(
            decode.decode, static_argnames="count", donate_argnums=2, compiler_options=options
        ),
    )


def _places(decode: Decode, size: int) -> Any:
    """Shardings of the state; the same for every capacity."""
    return jax.tree.map(lambda array: array.sharding, decode.abstract_state(size, 1))


def never() -> bool:
    """Never stops; the default."""
    return False


def compiled(lowered: Any, options: Mapping[str, Any] | None, stop: Callable[[], bool]) -> Any:
    """Compiles a lowered program in a thread, so that a signal is noticed; ``None`` where ``stop`` returned True first.

    An abandoned compile continues in its thread, since nothing can interrupt it.
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(lowered.compile(compiler_options=options))
        except Exception as error:  # raised again below
            outcome.append(error)

    thread = start_native("compile", work)
    while thread.is_alive():
        if stop():
            return None
        thread.join(POLL_SECONDS)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def compiler_cache(folder: str) -> None:
    """Keeps compiled programs across processes in ``folder`` (JAX's persistent compilation cache), unless the user chose another."""
    if jax.config.values["jax_compilation_cache_dir"] not in (None, folder):
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def training(
    job: Job, steps: StepFunctions, workers: int, intended: Layout | None = None
) -> DeviceBatches:
    """Endless shuffled batches of the job's size, laid out as the train step wants them.

    Where the job was intended for more devices, the batches are those that more processes like these would read.
    """

    def read(share: ProcessShare, block: int) -> Batches:
        return job.data.open(
            Read(
                split=Split.train,
                batch=share.block_rows,
                seed=job.seed,
                shard=block,
                shards=share.count,
                # ``workers`` is the number per process for any number of blocks.
                workers=-(-workers // len(share.blocks)),
            )
        )

    share = share_of(steps.batch_shardings[MASK], steps.batch_size)
    count = share.count
    if intended is not None:
        count = count * intended.batch_ways // job.layout.batch_ways
    return DeviceBatches(Blocks(job.data, share, read, count), steps.batch_shardings)


def evaluation(job: Job, steps: StepFunctions, split: Split, examples: int = 0) -> DeviceBatches:
    """One pass over a split in order, or over its first ``examples``, the last batch padded."""

    def read(share: ProcessShare, block: int) -> Batches:
        batches = job.data.open(
            Read(
                split=split,
                batch=share.block_rows,
                seed=job.seed,
                shuffle=False,
                epochs=1,
                shard=block,
                shards=share.count,
            )
        )
        return FirstExamples(batches, share, block, examples) if examples else batches

    share = share_of(steps.batch_shardings[MASK], evaluation_rows(job, steps))
    return DeviceBatches(Blocks(job.data, share, read), steps.batch_shardings)


def evaluation_rows(job: Job, steps: StepFunctions) -> int:
    """Examples of an evaluation's batch over all processes: those of one pass of a step."""
    return steps.batch_size // job.layout.accumulate
