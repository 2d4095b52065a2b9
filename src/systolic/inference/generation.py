"""Text generation as a stream: one compiled loop, called for a few tokens at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import OptionError
from systolic.data.text.chat import Messages
from systolic.data.text.text_data import TextData
from systolic.inference.grammar import Grammars, Matcher, fill_masks, grammar_text, json_rule
from systolic.inference.results import Continuation, Finish, Stops
from systolic.job import Job, Sampling
from systolic.steps.decode import DecodeState
from systolic.steps.lengths import learned_text, longest_text
from systolic.steps.programs import generation
from systolic.steps.step_functions import StepFunctions

Prompt = str | Messages
"""A text to continue, or messages to answer."""
CHUNK = 16
"""Tokens per call of the compiled loop: enough to hide the call's overhead, few enough for a live stream."""
BUCKET = 128
"""Smallest bucket: prompts are padded to it, a size that a TPU's attention takes, with room for as many new tokens.

Larger buckets are powers of two, and none has more than the model's positions. All prompts of a bucket share their programs.
"""


def text_of(job: Job) -> TextData:
    """The data of a text job.

    Raises:
        OptionError: the job is not about text.
    """
    if not isinstance(job.data, TextData):
        raise OptionError(
            f"systolic generate continues text, which {job.name} was not trained on; use systolic predict RUN FILES"
        )
    return job.data


class Generator:
    """Continues prompts with one set of weights.

    All generators of the same steps and sampling share their programs, compiled once for each bucket
    of prompts and of new tokens.

    Args:
        steps: The programs of a text job.
        params: Weights.
        model_state: Other variables.
        sampling: Sampling of the next token.
        like: Another generator of the same weights, whose converted ones are taken.
        paged: Whether the text lies in pages, see :func:`systolic.steps.programs.generation`.

    Raises:
        OptionError: the job is not about text.
        RunError: its model does not generate.
    """

    def __init__(
        self,
        steps: StepFunctions,
        params: Any,
        model_state: Any,
        sampling: Sampling,
        *,
        like: "Generator | None" = None,
        paged: bool = False,
    ) -> None:
        self.job, self.model_state = steps.job, model_state
        self.data = text_of(steps.job)
        self.tokenizer = self.data.get_tokenizer()
        self._programs = generation(steps, sampling, paged=paged)
        # Cast, and reordered for the decode step, once instead of in every call.
        self.params = like.params if like else self._programs.weights(params, model_state)

    @property
    def most(self) -> int | None:
        """Tokens of the longest text, prompt and answer together; ``None`` where there is no limit."""
        return self._programs.decode.max_positions or longest_text(self.job)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, at least one: those of a text after the tokens that start one, of a chat as it is.

        Raises:
            OptionError: it is empty, and the model has no token that starts a text.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.opening(prompt)
        else:
            ids = self.tokenizer.encode(self.data.chat(prompt))
        if not ids:
            raise OptionError(
                "the prompt is empty and the model has no token that starts a text; give a prompt"
            )
        return ids

    def _leaves_out_system(self, prompt: Prompt) -> bool:
        """Whether the messages without that of the system are the same text."""
        if isinstance(prompt, str) or prompt[0]["role"] != "system" or len(prompt) < 2:
            return False
        return self.data.chat(prompt) == self.data.chat(prompt[1:])

    def stream(
        self,
        prompt: Prompt,
        *,
        tokens: int,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> Continuation:
        """Text after ``prompt``, piece by piece, until ``tokens`` were written or the text ends, at the latest with the longest text that the model takes.

        Args:
            prompt: Text to continue, which may be empty, or the messages of a chat to answer.
            tokens: Most new tokens.
            seed: Seed of the sampling.
            stop: A string, or several, before which the text ends.
            schema: JSON Schema that the text follows.
            warn: Called where the model's context ends the text, or where the text may pass the rows of training.

        Raises:
            OptionError: ``tokens`` is below 1, the prompt leaves no position for an answer, a stop
                string is empty, or the schema cannot be followed.
        """
        if tokens < 1:
            raise OptionError(f"tokens is {tokens}; ask for 1 or more")
        if self._leaves_out_system(prompt):
            warn(
                "the chat template leaves the system message out, so the model does not read it; put it into the prompt"
            )
        ids, most = self.encode(prompt), self.most
        size, ends = len(ids), Stops(stop)
        if most is not None and size >= most:
            raise OptionError(
                f"the prompt has {size} tokens and {self.job.name} takes texts of {most} with their answer; give a prompt of at most {most - 1}"
            )
        room = tokens if most is None else min(tokens, most - size)
        learned = learned_text(self.job)
        if learned is not None and size + room > learned:
            warn(
                f"{size} tokens of prompt and up to {room} new ones exceed the {learned} tokens of a row in training; text beyond these is worse: give a shorter prompt or fewer --tokens, or train with a longer --sequence"
            )
        continuation = Continuation()
        continuation.pieces = self._ended(
            self._pieces(continuation, ids, room, seed, self._matcher(schema)), continuation, ends
        )
        if room < tokens:
            continuation.at_length = lambda: warn(
                f"the text ended at the {most} tokens that {self.job.name} takes: {size} of the prompt and {room} of the {tokens} new ones; give a shorter prompt for a longer answer"
            )
        return continuation

    def _matcher(self, schema: Mapping[str, Any] | None) -> Matcher | None:
        """The beginning of a text that follows a schema."""
        if schema is None:
            return None
        rules = {"answer": json_rule(schema)}
        return self._grammars.compiled(grammar_text("start: @answer", rules)).copy()

    @cached_property
    def _grammars(self) -> Grammars:
        model: Any = self.job.model
        return Grammars(self.tokenizer, model.vocab, self.data.ends)

    def _ended(self, pieces: Iterator[str], text: Continuation, ends: Stops) -> Iterator[str]:
        """Pieces before the first stop string, with how the text ended."""
        for piece in pieces:
            if certain := ends.push(piece):
                yield certain
            if ends.met:
                text.finish = Finish.stop
                return
        if rest := ends.flush():
            yield rest
        if text.finish is None:
            text.finish = Finish.length
            text.at_length()

    def _pieces(
        self,
        answer: Continuation,
        ids: Sequence[int],
        tokens: int,
        seed: int,
        matcher: Matcher | None,
    ) -> Iterator[str]:
        size = _bucket(len(ids))
        if (most := self._programs.decode.max_positions) is not None:
            size = min(size, most)
        row = np.zeros((1, size), np.int32)
        row[0, : len(ids)] = ids
        state = self._programs.prefill(
            self.params,
            self.model_state,
            jnp.asarray(row),
            jnp.asarray([len(ids)], jnp.int32),
            jax.random.key(seed),
            capacity=size + _bucket(tokens),
            mask=self._mask(matcher),
        )
        text, ends = self.tokenizer.stream(ids), self.data.ends
        for token in self._tokens(state, tokens, matcher):
            if token in ends:
                answer.finish = Finish.stop
                break
            if piece := text.push(token):
                yield piece
            if matcher is not None and matcher.complete:
                answer.finish = Finish.stop
                break
        if rest := text.flush():
            yield rest

    def _tokens(self, state: DecodeState, left: int, matcher: Matcher | None) -> Iterator[int]:
        """New tokens: some at a time, or one by one where each depends on those before it."""
        count = CHUNK if matcher is None else 1
        while left > 0:
            if matcher is not None:
                matcher.accept(int(np.asarray(state.token)[0]))
            state, chunk = self._programs.step(
                self.params, self.model_state, state, count=count, mask=self._mask(matcher)
            )
            yield from np.asarray(chunk)[0][:left].tolist()
            left -= count

    def _mask(self, matcher: Matcher | None) -> np.ndarray | None:
        """Tokens that can follow: see :func:`systolic.steps.logits.masked`."""
        if matcher is None:
            return None
        mask = np.zeros((1, -(-self._grammars.vocab // 32)), np.uint32)
        fill_masks([(matcher, 0)], mask)
        matcher.check()
        return mask


def _bucket(size: int) -> int:
    """The smallest power of two from :data:`BUCKET` that holds ``size``."""
    return max(BUCKET, 1 << (size - 1).bit_length())
