"""Proposals change how many steps an answer takes, and nothing else."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from systolic.job import ServedCache
from systolic.serving.text.request import Finish, SamplingParams, TextRequest
from systolic.serving.text.sequence import Lookup
from tests.serving.text.engine import SIZES, SMALL, Small, shared, with_pages

GREEDY = SamplingParams(temperature=0.0)
DRAFTED = replace(SIZES, programs=(1, 1, 1), speculate=4)
ALONE = replace(DRAFTED, rows=1)
NARROW = replace(ALONE, cache=ServedCache.int8)
FEW = dict.fromkeys((10, 11, 12, 13), 30.0)
"""Biases after which a text has four tokens alone, and so repeats itself."""


@pytest.fixture(scope="module")
def small():
    return shared()


@pytest.fixture(scope="module")
def engine(small):
    engine = small.engine(DRAFTED)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def plain(small):
    engine = small.engine(DRAFTED, speculate=0)
    yield engine
    engine.stop()


def answer(engine, tokens, most, sampling=GREEDY, **more):
    request = TextRequest(
        tokens=tokens, max_tokens=most, sampling=sampling, ignore_ends=True, **more
    )
    return list(engine.submit(request))


def ids(pieces) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def repeating(seed: int, size: int) -> list[int]:
    """A text of few tokens, in which most n-grams were before."""
    draw = random.Random(seed)
    phrase = [draw.randrange(256) for _ in range(5)]
    return [*phrase * (size // 5), *phrase[: size % 5]]


def test_what_followed_an_ending_before_is_proposed() -> None:
    lookup = Lookup()
    assert lookup.following([1, 2, 3], 4) == []
    assert lookup.following([1, 2, 3, 4, 1, 2], 4) == [3, 4, 1, 2]
    # The longest ending counts, and of several places the last.
    assert lookup.following([1, 2, 3, 4, 1, 2, 9, 3, 4, 1, 2], 2) == [9, 3]
    assert lookup.following([1, 2, 3, 4, 1, 2, 9, 3, 4, 1, 2, 3, 4], 3) == [1, 2, 9]
    # A text that repeats itself goes on so.
    assert Lookup().following([7, 7, 7], 4) == [7, 7, 7, 7]
    assert Lookup().following([5, 6, 5, 6, 5], 5) == [6, 5, 6, 5, 6]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 61])
def test_a_greedy_answer_is_that_of_reading_it_whole(small, engine, length) -> None:
    prompt = repeating(length, length)
    wanted, scores = small.greedy(prompt, 30)
    pieces = answer(engine, prompt, 30, logprobs=2)
    assert ids(pieces) == wanted
    found = [value for piece in pieces for value, _ in piece.logprobs]
    assert found == pytest.approx(scores, abs=1e-4)
    assert all(best[0][0] == token for piece in pieces for token, (_, best) in zip(piece.token_ids, piece.logprobs, strict=True))  # fmt: skip
    last = pieces[-1]
    assert (last.finish, last.completion_tokens) == (Finish.length, 30)
    assert 0 <= last.accepted_tokens <= last.drafted_tokens


def test_proposals_save_steps(small, engine) -> None:
    two = {10: 60.0, 11: 60.0}

    def few(logits, text) -> None:
        for token, by in two.items():
            logits[token] += by

    wanted, _ = small.greedy([3, 4, 5], 80, few)
    pieces = answer(engine, [3, 4, 5], 80, SamplingParams(temperature=0.0, logit_bias=two))
    assert ids(pieces) == wanted
    last = pieces[-1]
    # Each step has a token of its own beside those that were accepted.
    assert last.drafts < last.accepted_tokens < last.drafted_tokens
    assert last.accepted_tokens > 40


def test_many_at_once_with_every_setting_are_as_without_proposals(engine, plain) -> None:
    draw = random.Random(1)
    requests = []
    for number in range(24):
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 0.3, 1.0)),
            top_k=draw.choice((0, 2, 20)),
            top_p=draw.choice((1.0, 0.7)),
            repetition_penalty=draw.choice((1.0, 1.2)),
            presence_penalty=draw.choice((0.0, 0.5)),
            logit_bias=draw.choice((FEW, {9: 2.0})),
            seed=number,
        )
        request = TextRequest(
            tokens=repeating(number % 5, draw.randrange(1, 50)),
            max_tokens=draw.randrange(1, 40),
            min_tokens=0,
            sampling=sampling,
            stop=("q",) if number % 4 == 0 else (),
            stop_tokens=(7,),
            ignore_ends=True,
            logprobs=draw.choice((None, 3)),
        )
        least = min(3, request.max_tokens) if number % 3 == 0 else 0
        requests.append(replace(request, min_tokens=least))
    answers = []
    for served in (engine, plain):
        streams = [served.submit(request) for request in requests]
        answers.append([list(stream) for stream in streams])
    accepted = 0
    for ours, theirs in zip(*answers, strict=True):
        assert ids(ours) == ids(theirs)
        assert "".join(p.text for p in ours) == "".join(p.text for p in theirs)
        assert ours[-1].finish == theirs[-1].finish
        left, right = ([v for p in pieces for v, _ in p.logprobs] for pieces in (ours, theirs))
        assert left == pytest.approx(right, abs=1e-4)
        accepted += ours[-1].accepted_tokens
    assert accepted > 50


def test_tokens_that_are_drawn_have_the_distribution_of_the_model(small, engine) -> None:
    """1,000 answers with seeds of their own against the model's probabilities: chi-squared over triples of tokens.

    After each first token the prompt says what is proposed for the other two.
    """
    known = [10, 11, 12, 13]
    prompt = [part for at in range(4) for part in (200, *(known * 2)[at : at + 4])] + [200]
    number, bias = 1000, dict.fromkeys(known, 60.0)

    def shares(text: list[int]) -> np.ndarray:
        row = np.array([[*text, *[0] * (SIZES.context - len(text))]], np.int32)
        logits = np.asarray(small.whole(row))[len(text) - 1][known].astype(np.float64)
        powers = np.exp((logits - logits.max()) / 3)
        return powers / powers.sum()

    expected: dict[tuple[int, ...], float] = {(): number}
    for _ in range(3):
        expected = {
            (*text, token): count * share
            for text, count in expected.items()
            for token, share in zip(known, shares([*prompt, *text]), strict=True)
        }
    sampling = SamplingParams(temperature=3.0, logit_bias=bias)
    request = TextRequest(tokens=prompt, max_tokens=4, ignore_ends=True)
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for start in range(0, number, 250):
        streams = [
            engine.submit(replace(request, sampling=replace(sampling, seed=seed)))
            for seed in range(start, start + 250)
        ]
        for pieces in map(list, streams):
            counts[tuple(ids(pieces)[:3])] += 1
            drafted += pieces[-1].drafted_tokens
            accepted += pieces[-1].accepted_tokens
    assert set(counts) <= set(expected)
    assert drafted >= number
    assert drafted / 10 < accepted < drafted * 9 / 10
    cells = [(counts[text], count) for text, count in expected.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    large.append((sum(seen for seen, _ in rest), max(sum(count for _, count in rest), 1e-9)))
    statistic = sum((seen - count) ** 2 / count for seen, count in large)
    freedom = len(large) - 1
    # Four standard deviations above the mean of chi-squared.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_over_pages_in_int8_a_text_is_the_same(small) -> None:
    prompt = repeating(8, 20)
    answers = []
    for drafts in (4, 0):
        engine = small.engine(NARROW, speculate=drafts)
        sampling = SamplingParams(temperature=0.0, logit_bias=FEW)
        answers.append(ids(answer(engine, prompt, 60, sampling)))
        engine.stop()
    assert answers[0] == answers[1]


def test_with_too_few_pages_texts_are_read_again(small, plain) -> None:
    engine = with_pages(small.opened(DRAFTED), 17)
    engine.start()
    sampling = SamplingParams(temperature=0.0, logit_bias=FEW)
    requests = [
        TextRequest(tokens=repeating(n, 10 + n), max_tokens=60, sampling=sampling, ignore_ends=True)
        for n in range(10)
    ]
    streams = [engine.submit(request) for request in requests]
    cancelled = streams.pop(3)
    cancelled.cancel()
    found = [ids(stream) for stream in streams]
    list(cancelled)
    del requests[3]
    theirs = [plain.submit(request) for request in requests]
    assert found == [ids(stream) for stream in theirs]
    assert engine.scheduler.pool.in_use == 0
    engine.stop()


def test_proposals_under_a_window() -> None:
    model = replace(SMALL, window=16)
    small = Small(model)
    prompt = repeating(4, 30)
    engine = small.engine(ALONE)
    assert ids(answer(engine, prompt, 40)) == small.greedy(prompt, 40)[0]
    engine.stop()


def test_the_metrics_count_proposals(small) -> None:
    from systolic.serving.http.metrics import Metrics, TextMetrics

    metrics = Metrics()
    engine = small.opened(NARROW, TextMetrics(metrics).of("small"))
    engine.start()
    sampling = SamplingParams(temperature=0.0, logit_bias=FEW)
    last = answer(engine, repeating(8, 20), 40, sampling)[-1]
    engine.stop()
    page = metrics.page().decode()
    at = '{engine="0",model_name="small",version="1"}'
    for name, count in (
        ("drafts", last.drafts),
        ("draft_tokens", last.drafted_tokens),
        ("accepted_tokens", last.accepted_tokens),
    ):
        assert f"systolic:spec_decode_num_{name}_total{at} {float(count)}" in page
    assert last.accepted_tokens > 0
    steps = f'bucket="verify 1 x 5, 12 pages",engine="0",model_name="small",version="1"}} {float(last.drafts)}'
    assert f"systolic:bucket_selected_total{{{steps}" in page
