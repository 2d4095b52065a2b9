"""An engine's answers are those that each text would have alone, read whole."""

import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from systolic.job import ServedCache
from systolic.serving.request import RefusedError
from systolic.serving.text.request import Finish, SamplingParams, TextRequest
from tests.serving.text.engine import SIZES, SMALL, Small, shared

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def small():
    return shared()


@pytest.fixture(scope="module")
def engine(small):
    engine = small.engine(programs=(1, 2, 1))
    yield engine
    engine.stop()


def ids(pieces) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def ask(engine, tokens, most, sampling=GREEDY, **more) -> list:
    request = TextRequest(
        tokens=tokens, max_tokens=most, sampling=sampling, ignore_ends=True, **more
    )
    return list(engine.submit(request))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 25, 60])
def test_a_text_has_the_tokens_of_reading_it_whole(small, engine, length):
    draw = random.Random(length)
    prompt = [draw.randrange(256) for _ in range(length)]
    wanted, scores = small.greedy(prompt, 12)
    pieces = ask(engine, prompt, 12, logprobs=0)
    assert ids(pieces) == wanted
    found = [value for piece in pieces for value, _ in piece.logprobs]
    assert found == pytest.approx(scores, abs=1e-4)
    assert pieces[-1].finish is Finish.length
    assert pieces[-1].prompt_tokens == length
    assert pieces[-1].completion_tokens == 12


def test_many_at_once_have_the_tokens_of_each_alone(small, engine):
    draw = random.Random(0)
    begin = [draw.randrange(256) for _ in range(20)]
    prompts = [
        begin[: draw.randrange(21)] + [draw.randrange(256) for _ in range(draw.randrange(1, 40))]
        for _ in range(24)
    ]
    counts = [draw.randrange(1, 20) for _ in prompts]
    streams = [
        engine.submit(
            TextRequest(tokens=prompt, max_tokens=count, sampling=GREEDY, ignore_ends=True)
        )
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    for prompt, count, stream in zip(prompts, counts, streams, strict=True):
        assert ids(stream) == small.greedy(prompt, count)[0]


@pytest.mark.slow
def test_greedy_texts_are_the_same_at_every_concurrency(small):
    draw = random.Random(4)
    prompts = [[draw.randrange(256) for _ in range(draw.randrange(1, 60))] for _ in range(24)]
    alone = [small.greedy(prompt, 24) for prompt in prompts]
    # Of no near tie, which rounding in another program could turn.
    for prompt, (tokens, _) in zip(prompts, alone, strict=True):
        row = jnp.asarray([[*prompt, *tokens, *[0] * (96 - len(prompt) - 24)]], jnp.int32)
        best = jnp.sort(small.whole(row)[len(prompt) - 1 : len(prompt) + 23], -1)
        assert float((best[:, -1] - best[:, -2]).min()) > 1e-4
    engine = small.engine(rows=24, programs=(5, 2, 2))
    try:
        for at_once in (1, 2, 3, 5, 8, 16, 24):
            places = draw.sample(range(24), at_once)
            requests = [
                TextRequest(tokens=prompts[n], max_tokens=24, sampling=GREEDY, ignore_ends=True)
                for n in places
            ]
            streams = [engine.submit(request) for request in requests]
            assert [ids(stream) for stream in streams] == [alone[n][0] for n in places], at_once
    finally:
        engine.stop()


def test_a_prompt_seen_before_is_not_read_again(small, engine):
    prompt = list(range(100, 150))
    first, again = ask(engine, prompt, 5), ask(engine, prompt, 5)
    assert ids(first) == ids(again) == small.greedy(prompt, 5)[0]
    # 49 of 50 tokens can be found, in whole pages of 8.
    assert again[-1].cached_tokens == 48


@pytest.mark.slow
def test_over_pages_in_int8_a_text_is_the_same_alone_and_beside_others_cached_and_preempted(small):
    """Pages for one long text and a half, so that texts wait, are read again, and find pages of others."""
    draw, begin = random.Random(2), list(range(100, 120))
    prompts = [begin + [draw.randrange(256) for _ in range(12)] for _ in range(5)]
    lost = []
    watcher = SimpleNamespace(
        stepped=lambda facts: lost.append(facts.preempted), ended=lambda output, load: None
    )
    sizes = replace(SIZES, cache=ServedCache.int8, pages=16, programs=(1, 1, 1), mixed=True)
    engine = small.opened(sizes, watcher)
    engine.start()
    try:
        alone = [ids(ask(engine, prompt, 40)) for prompt in prompts]
        streams = [
            engine.submit(
                TextRequest(tokens=prompt, max_tokens=40, sampling=GREEDY, ignore_ends=True)
            )
            for prompt in prompts
        ]
        together = [list(stream) for stream in streams]
        assert [ids(pieces) for pieces in together] == alone
        assert any(pieces[-1].cached_tokens for pieces in together)
        assert sum(lost) > 0
    finally:
        engine.stop()


OVERFLOWS = 263
"""A token whose embedding is infinite."""


@pytest.fixture(scope="module")
def overflowing():
    small = Small(replace(SMALL, tie_embeddings=False), seed=1)  # that never says OVERFLOWS
    small.params["embedding"] = small.params["embedding"].at[OVERFLOWS].set(jnp.inf)
    return small


@pytest.fixture(scope="module")
def scarce(overflowing):
    """An engine with pages for one long text, whose programs read prompts beside generating, as on a GPU."""
    engine = overflowing.engine(pages=14, programs=(1, 1, 1), mixed=True)
    yield engine
    engine.stop()


def test_too_few_pages_make_texts_wait_or_read_again(overflowing, scarce):
    draw = random.Random(1)
    prompts = [[draw.randrange(256) for _ in range(40)] for _ in range(6)]
    streams = [
        scarce.submit(
            TextRequest(
                tokens=prompt,
                max_tokens=50,
                sampling=GREEDY,
                ignore_ends=True,
                logprobs=1,
                prompt_logprobs=number % 2 == 0,
            )
        )
        for number, prompt in enumerate(prompts)
    ]
    for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        pieces = list(stream)
        assert ids(pieces) == overflowing.greedy(prompt, 50)[0]
        # Those that were read again are scored once.
        scored = [token for piece in pieces for token in piece.prompt_ids]
        assert scored == (prompt if number % 2 == 0 else [])
    assert scarce.scheduler.pool.in_use == 0


def test_a_text_that_overflows_ends_and_no_other_sees_it(overflowing, scarce):
    beside, after = [9, 8, 7], [[33, 44], [10], [77] * 30]
    # In the first of two chunks, in the last, and alone.
    for prompt in ([OVERFLOWS, *range(30)], [*range(30), OVERFLOWS, 1], [OVERFLOWS]):
        stream = scarce.submit(
            TextRequest(tokens=beside, max_tokens=12, sampling=GREEDY, ignore_ends=True)
        )
        last = ask(scarce, prompt, 4)[-1]
        assert (last.finish, last.completion_tokens) == (Finish.error, 0)
        assert "not finite" in last.message
        assert ids(stream) == overflowing.greedy(beside, 12)[0]
    for prompt in after:
        assert ids(ask(scarce, prompt, 12)) == overflowing.greedy(prompt, 12)[0]
    assert scarce.ready


def test_pages_of_a_text_that_overflows_are_found_by_none(overflowing, scarce):
    # In the second of two chunks, and in the first: the step after it was on its way before its own result was known.
    for prompt in (
        [*range(40), OVERFLOWS, 3, 4],
        [*range(60, 90), OVERFLOWS, 1],
        [OVERFLOWS, *range(60)],
    ):
        for more in ([], [], [5], [6, 7]):
            last = ask(scarce, [*prompt, *more], 4)[-1]
            assert last.finish is Finish.error, (prompt, more, last)
            read = prompt.index(OVERFLOWS)
            assert last.cached_tokens <= read


def test_settings_that_do_not_fit_end_one_text_alone(small, engine):
    stream = engine.submit(TextRequest(tokens=[9, 8], max_tokens=20, sampling=GREEDY))
    last = ask(engine, [1, 2], 3, SamplingParams(logit_bias={1 << 40: 1.0}))[-1]
    assert last.finish is Finish.error
    # NumPy before 2.4 warns, which is an error in tests.
    assert "OverflowError" in last.message or "out-of-bound" in last.message
    with pytest.raises(RefusedError, match="301 tokens and at most 300") as found:
        ask(engine, [1, 2], 3, SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0)))
    assert found.value.parameter == "logit_bias"
    assert ids(stream) == small.greedy([9, 8], 20)[0]
    assert engine.ready


def test_a_decoder_that_fails_ends_one_text_alone(small, engine, monkeypatch):
    class Broken:
        def push(self, token):
            raise ValueError("no such token")

        flush = None

    class BrokenTokenizer:
        def stream(self, *_):
            return Broken()

    stream = engine.submit(TextRequest(tokens=[9, 8], max_tokens=20, sampling=GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "tokenizer", BrokenTokenizer())
        broken = engine.submit(TextRequest(tokens=[1], max_tokens=4, sampling=GREEDY))
    last = list(broken)[-1]
    assert (last.finish, last.message) == (Finish.error, "ValueError: no such token")
    assert ids(stream) == small.greedy([9, 8], 20)[0]
    assert engine.ready


def test_a_seed_gives_the_same_text_alone_and_beside_others(engine):
    choice = SamplingParams(temperature=1.0, seed=7)
    alone = ids(ask(engine, [5, 6, 7], 16, choice))
    request = TextRequest(tokens=[5, 6, 7], max_tokens=16, sampling=choice, ignore_ends=True)
    others = [
        TextRequest(tokens=[n], max_tokens=16, sampling=SamplingParams(seed=n), ignore_ends=True)
        for n in range(5)
    ]
    streams = [engine.submit(one) for one in [*others, request]]
    assert ids(streams[-1]) == alone
    assert any(ids(stream) != alone for stream in streams[:-1])


def test_the_cuts_of_a_row_do_not_touch_another(small, engine):
    prompt = [9, 8, 7]
    narrow = SamplingParams(temperature=2.0, top_k=1)
    wide = SamplingParams(temperature=0.0, logit_bias={33: 100.0})
    streams = [
        engine.submit(TextRequest(tokens=prompt, max_tokens=8, sampling=one, ignore_ends=True))
        for one in (narrow, wide, GREEDY)
    ]
    wanted = small.greedy(prompt, 8)[0]
    assert ids(streams[0]) == wanted
    assert ids(streams[1]) == [33] * 8
    assert ids(streams[2]) == wanted


def test_a_penalty_counts_the_token_chosen_last(small, engine):
    prompt = [1, 2]
    tokens = sorted({*range(40, 60)})
    # Among twenty tokens, so that some come again and the penalty decides.
    bias = dict.fromkeys(tokens, 30.0)
    choice = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=bias)

    def change(logits, text):
        for token in tokens:
            logits[token] += 30.0 - 2.0 * text[len(prompt) :].count(token)

    wanted = small.greedy(prompt, 24, change)[0]
    assert len(set(wanted)) < 24
    assert ids(ask(engine, prompt, 24, choice)) == wanted


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_waiting_for_the_device_is_no_time_of_the_host(engine, monkeypatch, penalty):
    class Watch:
        seconds: list[tuple[float, float]]

        def stepped(self, facts) -> None:
            self.seconds.append((facts.host_seconds, facts.seconds))

        def ended(self, output, load) -> None:
            pass

    watch, now, collect = Watch(), [0.0], engine.runner.collect
    watch.seconds = []

    def slow(flight):
        now[0] += 1.0
        return collect(flight)

    # A clock that only a step of the device moves.
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: now[0])
    monkeypatch.setattr("systolic.serving.text.engine.time", clock)
    monkeypatch.setattr(engine.runner, "collect", slow)
    monkeypatch.setattr(engine, "watcher", watch)
    ask(engine, [1, 2], 6, SamplingParams(temperature=0.0, presence_penalty=penalty))
    assert sum(seconds for _, seconds in watch.seconds) >= 4
    assert [host for host, _ in watch.seconds] == [0.0] * len(watch.seconds)


def test_log_probabilities_of_a_prompt_are_those_of_reading_it_whole(small, engine):
    draw = random.Random(3)
    prompt = [draw.randrange(256) for _ in range(40)]
    ask(engine, prompt, 1)  # Its pages could be shared; scores need all of it.
    pieces = ask(engine, prompt, 1, logprobs=3, prompt_logprobs=True)
    found = [value for piece in pieces for value in piece.prompt_logprobs]
    assert [token for piece in pieces for token in piece.prompt_ids] == prompt
    assert found[0][0] is None
    every = small.whole(jnp.asarray([prompt], jnp.int32))
    for place, (token, (logprob, top)) in enumerate(zip(prompt[1:], found[1:], strict=True)):
        assert logprob == pytest.approx(float(every[place, token]), abs=1e-4)
        assert len(top) == 3
        assert top[0][1] == pytest.approx(float(every[place].max()), abs=1e-4)


def test_a_cancelled_text_gives_its_pages_back(engine):
    stream = engine.submit(
        TextRequest(tokens=[1] * 20, max_tokens=70, sampling=GREEDY, ignore_ends=True)
    )
    pieces = iter(stream)
    next(pieces)
    stream.cancel()
    rest = list(pieces)
    assert rest[-1].finish in (Finish.cancelled, Finish.length)
    ask(engine, [2], 1)
    assert engine.scheduler.pool.in_use == 0
    assert engine.live == 0


def test_a_deadline_ends_a_text(engine):
    pieces = ask(engine, [3, 4], 80, deadline_seconds=0.0)
    assert pieces[-1].finish is Finish.deadline


def test_a_stop_string_ends_a_text_before_it(small, engine):
    prompt = [50, 51]
    text = engine.tokenizer.decode(small.greedy(prompt, 20)[0])
    stop = text[6:8]
    pieces = ask(engine, prompt, 20, stop=(stop,))
    assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert pieces[-1].finish is Finish.stop


@pytest.mark.parametrize(
    ("tokens", "most", "said"),
    [
        ([], 1, "no tokens"),
        ([1] * 96, 1, "at most 96"),
        ([264], 1, "264 is no token"),
        ([-1], 1, "-1 is no token"),
    ],
)
def test_what_can_never_run_is_refused(engine, tokens, most, said):
    with pytest.raises(RefusedError, match=said) as found:
        ask(engine, tokens, most)
    assert found.value.retry_seconds is None


def test_a_full_queue_refuses_and_a_drain_loses_nothing(small):
    engine = small.engine(rows=1, queued=2, programs=(1, 1, 1))
    request = TextRequest(tokens=[1], max_tokens=60, sampling=GREEDY, ignore_ends=True)
    streams, refused = [], []
    for _ in range(12):
        try:
            streams.append(engine.submit(request))
        except RefusedError as error:
            refused.append(error.retry_seconds)
    assert refused
    assert all(refused)
    ended = []
    reader = threading.Thread(target=lambda: ended.extend(list(one)[-1] for one in streams))
    reader.start()
    assert engine.drain(60)
    reader.join()
    assert {piece.finish for piece in ended} == {Finish.length}
    with pytest.raises(RefusedError, match="shutting down"):
        engine.submit(request)


def test_a_compile_after_the_start_is_noticed(small):
    engine = small.engine(rows=1, queued=2, programs=(1, 1, 1))
    try:
        runner = engine.runner
        real = runner.run

        def run(*step):
            import jax

            jax.jit(lambda x: x * 3 + 1)(jnp.ones((5, 7)))
            return real(*step)

        runner.run = run
        last = ask(engine, [1, 2, 3], 4)[-1]
        assert last.finish is Finish.error
        assert "compiled after the engine was ready" in last.message
        assert not engine.ready
    finally:
        engine.stop()


@pytest.mark.slow
def test_many_threads_submit_at_once(small):
    engine = small.engine(rows=4, queued=4000)
    failed, ended = [], []

    def ask_many(number):
        try:
            for _ in range(10):
                ended.append(ask(engine, [number], 1)[-1].finish)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask_many, args=(n,)) for n in range(16)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert ended == [Finish.length] * 160
        assert engine.scheduler.pool.in_use == 0
    finally:
        engine.stop()


def test_no_text_ends_before_its_least_tokens(small, engine):
    prompt = [5, 6, 7]
    wanted, _ = small.greedy(prompt, 12)
    end = wanted[2]
    request = TextRequest(
        tokens=prompt, max_tokens=12, sampling=GREEDY, stop_tokens=[end], ignore_ends=True
    )
    (*_, last) = plain = list(engine.submit(request))
    assert (ids(plain), last.finish) == (wanted[:3], Finish.stop)

    def held_back(logits, text):
        if len(text) - len(prompt) < 8:
            logits[end] = float("-inf")

    (*_, last) = longer = list(engine.submit(replace(request, min_tokens=8)))
    assert last.completion_tokens >= 8
    assert ids(longer) == small.greedy(prompt, len(ids(longer)), held_back)[0]
    assert end not in ids(longer)[:8]
    # Stop strings are searched in the text of later tokens.
    text = "".join(piece.text for piece in ask(engine, prompt, 12))
    stop = text[0]
    early = "".join(piece.text for piece in ask(engine, prompt, 12, stop=[stop]))
    assert early == ""
    (*_, last) = list(ask(engine, prompt, 12, stop=[stop], min_tokens=12))
    assert last.finish is Finish.length
    with pytest.raises(RefusedError, match="with the tokens that min_tokens holds back, has 301"):
        engine.submit(replace(request, stop_tokens=range(301), min_tokens=1))
