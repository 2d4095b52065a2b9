"""Steps on the device: the scheduler's work as arguments of compiled programs, and their tokens back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import jax
import numpy as np

from systolic.serving.text.answer import Answer, Made
from systolic.serving.text.buckets import Buckets
from systolic.serving.text.programs import BIASES, Programs
from systolic.serving.text.request import Token
from systolic.serving.text.scheduler import PENDING, StepWork, Text
from systolic.steps.choice import ChosenTokens, Cuts
from systolic.steps.paged import StepShape

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
            temperature[place] = answer.request.choice.temperature
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
        choice, tokens = answer.request.choice, answer.text.tokens
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
