"""Every admitted text ends with what it would have alone, and all pages come back, for any load and any cancels; expected padding by hand."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.text.buckets import Buckets, TextTraffic
from systolic.serving.text.opening import EngineSizes, plan_engine
from systolic.serving.text.request import Stream, TextRequest
from systolic.serving.text.scheduler import NOWHERE, PagePool, Scheduler, StepLimits
from systolic.serving.text.sequence import PENDING, Sequence
from tests.serving.text.engine import shared

TOKENIZER = Tokenizer()


def sequence(number: int, tokens: list[int], most: int, priority: int = 0) -> Sequence:
    return Sequence(
        number=number,
        request=TextRequest(tokens=tokens, max_tokens=most - len(tokens), priority=priority),
        stream=Stream(lambda _: None),
        tokenizer=TOKENIZER,
        ends=(),
        context=most,
    )


class Device:
    """The cache as the steps fill it: a page's positions hold the text before them."""

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self.known: dict[int, list[int]] = {}

    def read(self, text: Sequence, count: int) -> None:
        """Reads ``count`` more; what lies in the pages alone decides the token after the last."""
        tokens = self.known.setdefault(text.number, text.tokens[: text.prompt_tokens])
        for at in range(text.read, text.read + count):
            page = text.pages[at // self.size]
            assert page != NOWHERE
            self.rows[page, at % self.size] = tuple(tokens[: at + 1])
        end = text.read + count
        for at in range(end):
            assert self.rows[text.pages[at // self.size], at % self.size] == tuple(tokens[: at + 1])
        if end == len(tokens):
            tokens.append(following(tokens))


def following(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 5


def alone(prompt: list[int], most: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < most:
        tokens.append(following(tokens))
    return tokens


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(4, 24),
    page_size=st.integers(1, 5),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 9),
    prefills=st.integers(1, 3),
    reuse=st.booleans(),
    ahead=st.booleans(),
)
def test_every_text_ends_as_it_would_alone(
    seed: int,
    num_pages: int,
    page_size: int,
    rows: int,
    chunk: int,
    prefills: int,
    reuse: bool,
    ahead: bool,
) -> None:
    draw = random.Random(seed)
    pool = PagePool(num_pages=num_pages, page_size=page_size, reuse=reuse)
    scheduler = Scheduler(pool=pool, limits=StepLimits(rows=rows, chunk=chunk, prefills=prefills))
    device = Device(page_size)
    texts: list[Sequence] = []
    for number in range(draw.randint(1, 12)):
        prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, 12))]
        most = len(prompt) + draw.randint(1, 10)
        if scheduler.fits(most):
            texts.append(sequence(number, prompt, most, draw.choice((-1, 0, 0, 7))))
    expected = {t.number: alone(t.tokens[: t.prompt_tokens], t.max_length) for t in texts}
    coming, ended, cancelled = list(texts), set(), set()
    flight: list[Sequence] = []
    for _ in range(3000):
        while coming and draw.random() < 0.4:
            scheduler.add(coming.pop(0))
        if draw.random() < 0.03 and scheduler.running:
            gone = draw.choice(scheduler.running)
            scheduler.remove(gone)
            cancelled.add(gone.number)
        before, flight = flight, []
        work = scheduler.schedule()
        assert len(scheduler.running) <= rows
        assert len({text.slot for text in scheduler.running}) == len(scheduler.running)
        assert len(work.prefill) <= prefills
        for text, count in [*((one, 1) for one in work.decode), *work.prefill]:
            assert 0 < count <= max(chunk, 1)
            device.read(text, count)
            text.read += count
            if text.left == 0:
                text.tokens.append(PENDING)
                flight.append(text)
            scheduler.publish(text, text.read)
        # What the step before chose becomes known only now.
        for text in before if ahead else flight:
            if text.number not in cancelled:
                place = text.tokens.index(PENDING)
                text.tokens[place] = device.known[text.number][place]
                scheduler.publish(text, text.read)
                if PENDING not in text.tokens and text.full:
                    scheduler.remove(text)
                    ended.add(text.number)
        if len(ended | cancelled) == len(texts):
            break
    assert ended | cancelled == {text.number for text in texts}
    for text in texts:
        if text.number in ended:
            assert text.tokens == expected[text.number]
    assert pool.in_use == 0
    assert pool.available == pool.total


def test_a_prompt_that_begins_the_same_reads_the_rest_only() -> None:
    pool = PagePool(num_pages=16, page_size=4)
    scheduler = Scheduler(pool=pool, limits=StepLimits(rows=4, chunk=64, prefills=4))
    first = sequence(0, list(range(10)), 12)
    scheduler.add(first)
    ((_, count),) = scheduler.schedule().prefill
    assert count == 10
    first.read += 10
    scheduler.publish(first, first.read)
    second = sequence(1, [*range(8), 99, 98], 12)
    scheduler.add(second)
    work = scheduler.schedule()
    assert [(text.number, count) for text, count in work.prefill] == [(1, 2)]
    assert second.cached_tokens == 8
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_texts_of_a_lower_priority_number_start_first_and_lose_their_pages_last() -> None:
    pool = PagePool(num_pages=6, page_size=4)
    scheduler = Scheduler(pool=pool, limits=StepLimits(rows=3, chunk=64, prefills=4))
    priorities = (0, 5, 0, -1, 5)
    texts = [
        sequence(number, [number] * 4, 12, priority) for number, priority in enumerate(priorities)
    ]
    for text in texts:
        scheduler.add(text)
    assert [text.number for text in scheduler.waiting] == [3, 0, 2, 1, 4]
    work = scheduler.schedule()
    assert [text.number for text, _ in work.prefill] == [3, 0, 2]
    for text, count in work.prefill:
        text.read += count
        text.tokens.append(9)
    # Five pages for three texts that need two each: the last by rank waits again, before those that never ran.
    work = scheduler.schedule()
    assert [text.number for text in work.decode] == [3, 0]
    assert [text.number for text in work.preempted] == [2]
    assert [text.number for text in scheduler.waiting] == [2, 1, 4]


def test_expected_padding_counts_all_that_holds_no_token():
    # Prompts of 10 and 30 tokens alike, in chunks of 16 and pages of 8: parts 10, 16 and 14.
    traffic = TextTraffic(prompts={10: 1.0, 30: 1.0}, answers={1: 1.0})
    made = Buckets.of(
        traffic,
        rows=16,
        chunk=16,
        context=64,
        page_size=8,
        mixed=False,
        counts=(2, 1, 1),
        least_rows=8,
    )
    assert tuple(made.lengths) == (16,)
    assert made.padding["prompt tokens"] == pytest.approx(1 - (10 + 16 + 14) / (3 * 16))
    # Of 1 to 16 texts, each count n weighted 1/n: n/n is useful of 8/n or 16/n.
    assert tuple(made.rows) == (8, 16)
    held = sum((8 if n <= 8 else 16) / n for n in range(1, 17))
    assert made.padding["decode rows"] == pytest.approx(1 - 16 / held)
    # All texts take programs of 8 pages; those of 11 tokens need 2, those of 31 need 4.
    assert made.padding["pages"] == pytest.approx(1 - (2 + 4) / 16)


def test_a_server_on_a_cpu_has_few_programs_and_one_of_a_text_by_itself() -> None:
    plan = plan_engine(shared().steps, EngineSizes(rows=16, context=4096))
    assert plan.buckets.rows[0] == 1
    assert plan.buckets.rows[-1] == 16
    # 3 x 2 of decode, 2 x 2 of prompts, 2 choices for each of 3 sizes, and the scores.
    assert plan.programs().count == 17
    other = plan_engine(shared().steps, EngineSizes(rows=16, context=4096, programs=(5, 3, 3)))
    assert other.programs().count > 30
