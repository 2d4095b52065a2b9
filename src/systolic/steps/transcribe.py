"""Transcription as a pure function: spectrograms to the most likely token after token, until all texts have ended."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from systolic.data.audio.recordings import Writing
from systolic.steps.network import Arrays
from systolic.steps.step_functions import StepFunctions


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
    likely: jax.Array
    """f32[batch]: sum of the log probabilities of the tokens, those of the end included, but for ``next``."""
    length: jax.Array
    """int32[batch]: how many these are."""
    log_next: jax.Array
    """f32[batch]: log probability of ``next``."""
    cache: Any


class Transcribe:
    """Greedy transcription with a job's model, a speech to text one; jit :meth:`__call__`.

    Args:
        steps: Programs of the job.
        writing: End and suppressed tokens.
        positions: Most tokens of a text, the prompt included.
    """

    def __init__(self, steps: StepFunctions, writing: Writing, positions: int) -> None:
        self.steps, self.writing, self.positions = steps, writing, positions

    def __call__(
        self,
        params: Arrays,
        model_state: Arrays,
        features: jax.Array,
        prompt: jax.Array,
        live: jax.Array,
    ) -> jax.Array:
        """int32[batch, positions - prompt]: tokens of each text, then those of its end; only these where nothing is said.

        Nothing is said in digital silence, and where the token of no speech is likely and the text is not, by the thresholds of
        :class:`Writing` (Radford et al. 2022, section 4.5).

        Args:
            params: Weights.
            model_state: Other variables.
            features: f32[batch, frames, mels].
            prompt: int32[batch, prompt]: what each text starts with, of the job's length.
            live: bool[batch]: False for rows of padding, which are not waited for.
        """
        network, writing = self.steps.network, self.writing
        module: Any = network.module(network.cast(params), model_state, train=False)
        encoded = module.encode(features)
        batch, room = features.shape[0], self.positions - prompt.shape[1]
        logits, cache, silence = self._heard(module, prompt, encoded)
        vocab = logits.shape[-1]
        usual = _barred(vocab, writing.suppressed)
        first = usual + _barred(vocab, writing.suppressed_first)

        def going(written: Written) -> jax.Array:
            return (written.count < room) & ~written.ended.all()

        def write(written: Written) -> Written:
            before = written.ended
            ended = before | (written.next == writing.end)
            token = jnp.where(ended, writing.end, written.next)
            tokens = written.tokens.at[:, written.count].set(token)
            logits, cache = module.extend(token, written.cache)
            best, log_best = _best(logits + usual)
            likely = written.likely + jnp.where(before, 0.0, written.log_next)
            count, length = written.count + 1, written.length + ~before
            return Written(count, tokens, best, ended, likely, length, log_best, cache)

        start, log_start = _best(logits + first)
        begun = Written(
            count=jnp.zeros((), jnp.int32),
            tokens=jnp.full((batch, room), writing.end, jnp.int32),
            next=start,
            ended=~live,
            likely=jnp.zeros(batch),
            length=jnp.zeros(batch, jnp.int32),
            log_next=log_start,
            cache=cache,
        )
        texts = jax.lax.while_loop(going, write, begun)
        # Digital silence has one value everywhere, and a model writes a short word for it.
        empty = jnp.ptp(features, axis=(1, 2)) == 0
        unlikely = texts.likely < writing.likely * texts.length
        return jnp.where((empty | silence & unlikely)[:, None], writing.end, texts.tokens)

    def _heard(
        self, module: Any, prompt: jax.Array, encoded: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        """Logits after the prompt int32[batch, n], the cache, and whether there seems to be no speech, bool[batch]."""
        writing = self.writing
        # The first token alone: what follows it tells whether there is speech.
        logits, cache = module.prefill(prompt[:, :1], encoded, self.positions)
        silence = jnp.zeros(prompt.shape[0], bool)
        if writing.silence is not None:
            silence = jax.nn.softmax(logits)[:, writing.silence] > writing.no_speech
        for place in range(1, prompt.shape[1]):
            logits, cache = module.extend(prompt[:, place], cache)
        return logits, cache, silence


def _barred(vocab: int, tokens: tuple[int, ...]) -> np.ndarray:
    """f32[vocab]: minus infinity for some tokens, 0 for the others."""
    mask = np.zeros(vocab, np.float32)
    mask[list(tokens)] = -np.inf
    return mask


def _best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token int32[batch] and its log probability f32[batch]."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return best, jnp.take_along_axis(logs, best[:, None], axis=-1)[:, 0]
