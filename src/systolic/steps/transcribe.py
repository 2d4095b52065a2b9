"""Transcription as a pure function: spectrograms to the most likely token after token, until all texts have ended."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from systolic.data.audio.recordings import Writing
from systolic.steps.network import Arrays
from systolic.steps.steps import StepFunctions


class Written(NamedTuple):
    """Texts in the making."""

    count: jax.Array
    """int32[]: tokens in ``tokens``."""
    tokens: jax.Array
    """int32[batch, positions]: what is written, the end's token after it."""
    next: jax.Array
    """int32[batch]: the token that follows."""
    ended: jax.Array
    """bool[batch]."""
    cache: Any


class Transcribe:
    """Greedy transcription with a job's model, a speech to text one; jit :meth:`__call__`.

    Args:
        steps: Programs of the job.
        writing: Prompt, end and suppressed tokens.
        positions: Most tokens of a text, the prompt included.
    """

    def __init__(self, steps: StepFunctions, writing: Writing, positions: int) -> None:
        self.steps, self.writing, self.positions = steps, writing, positions

    def __call__(
        self, params: Arrays, model_state: Arrays, features: jax.Array, live: jax.Array
    ) -> jax.Array:
        """int32[batch, positions - prompt]: tokens of each text, then those of its end.

        Args:
            params: Weights.
            model_state: Other variables.
            features: f32[batch, frames, mels].
            live: bool[batch]: False for rows of padding, which are not waited for.
        """
        network, writing = self.steps.network, self.writing
        module: Any = network.module(network.cast(params), model_state, train=False)
        encoded = module.encode(features)
        batch, room = features.shape[0], self.positions - len(writing.prompt)
        prompt = jnp.broadcast_to(
            jnp.asarray(writing.prompt, jnp.int32), (batch, len(writing.prompt))
        )
        logits, cache = module.prefill(prompt, encoded, self.positions)
        vocab = logits.shape[-1]
        usual = _barred(vocab, writing.suppressed)
        first = usual + _barred(vocab, writing.suppressed_first)

        def going(written: Written) -> jax.Array:
            return (written.count < room) & ~written.ended.all()

        def write(written: Written) -> Written:
            ended = written.ended | (written.next == writing.end)
            token = jnp.where(ended, writing.end, written.next)
            tokens = written.tokens.at[:, written.count].set(token)
            logits, cache = module.extend(token, written.cache)
            return Written(written.count + 1, tokens, _best(logits + usual), ended, cache)

        begun = Written(
            count=jnp.zeros((), jnp.int32),
            tokens=jnp.full((batch, room), writing.end, jnp.int32),
            next=_best(logits + first),
            ended=~live,
            cache=cache,
        )
        return jax.lax.while_loop(going, write, begun).tokens


def _barred(vocab: int, tokens: tuple[int, ...]) -> np.ndarray:
    """f32[vocab]: minus infinity for some tokens, 0 for the others."""
    made = np.zeros(vocab, np.float32)
    made[list(tokens)] = -np.inf
    return made


def _best(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
