"""Streams text from a language model: one compiled loop, called for a few tokens at a time."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, OptionError
from systolic.data.text import TextData
from systolic.job import Job
from systolic.steps.decode import Decode, Sampling
from systolic.steps.steps import Steps

CHUNK = 16
"""Tokens per call of the compiled loop: long enough to hide the call, short enough to feel live."""


def tokenizer_of(job: Job) -> Any:
    """The tokenizer of a text job.

    Raises:
        DataError: the job is not about text.
    """
    if not isinstance(job.data, TextData):
        raise DataError(
            f"{job.name} reads {type(job.data).__name__}, not text; use systolic predict for its kind of data"
        )
    return job.data.get_tokenizer()


def stream(
    steps: Steps,
    params: Any,
    rest: Any,
    prompt: str,
    *,
    tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> Iterator[str]:
    """Text after ``prompt``, piece by piece, until ``tokens`` were written or the text ends.

    Args:
        steps: The programs of a text job.
        params: Weights.
        rest: Other variables.
        prompt: May be empty.
        tokens: At most so many new ones.
        sampling: How tokens are picked.
        seed: Of the picks.

    Raises:
        DataError: the job is not about text.
        OptionError: ``tokens`` is below 1.
    """
    if tokens < 1:
        raise OptionError(f"tokens is {tokens}; ask for 1 or more")
    tokenizer = tokenizer_of(steps.job)
    programs = Decode(steps, sampling)
    start = [] if tokenizer.start is None else [tokenizer.start]
    ids = start + list(tokenizer.encode(prompt)) or [0]
    padded = _round_up(len(ids), 64)
    capacity = _round_up(padded + tokens, 256)
    jit = partial(jax.jit, compiler_options=steps.target.compiler_options)
    prefill = jit(programs.prefill, static_argnames="capacity")
    decode = jit(programs.decode, static_argnames="count", donate_argnums=2)
    row = np.zeros((1, padded), np.int32)
    row[0, : len(ids)] = ids
    state = prefill(
        params,
        rest,
        jnp.asarray(row),
        jnp.asarray([len(ids)], jnp.int32),
        jax.random.key(seed),
        capacity=capacity,
    )
    text = tokenizer.stream()
    left = tokens
    while left > 0:
        state, found = decode(params, rest, state, count=CHUNK)
        for token in np.asarray(found)[0][:left].tolist():
            if token == tokenizer.end:
                left = 0
                break
            piece = text.push(token)
            if piece:
                yield piece
        left -= CHUNK
    if rest_of_text := text.flush():
        yield rest_of_text


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
