"""Requests are spread over engines by what each has to do for them."""

from typing import Any

import pytest

from systolic.serving.request import RefusedError
from systolic.serving.text.replicas import Replicas
from systolic.serving.text.request import TextRequest


class Counting:
    """An engine that keeps what it is given."""

    def __init__(self, most: int = 100) -> None:
        self.most, self.taken = most, list[TextRequest]()
        self.ready, self.heartbeat_seconds, self.context = True, 0.0, 64
        self.started, self.stopped = False, False

    @property
    def outstanding_tokens(self) -> int:
        return sum(len(one.tokens) + one.max_tokens for one in self.taken)

    def submit(self, request: TextRequest) -> Any:
        if len(self.taken) >= self.most:
            raise RefusedError(f"{len(self.taken)} requests wait", retry_seconds=1)
        self.taken.append(request)
        return request

    def start(self) -> None:
        self.started = True

    def drain(self, seconds: float) -> bool:
        self.ready = False
        return seconds > 1 and not self.taken

    def stop(self) -> None:
        self.stopped = True


def asked(tokens: list[int], most: int = 4) -> TextRequest:
    return TextRequest(tokens=tokens, max_tokens=most)


def test_the_engine_with_fewest_tokens_takes_the_next_request() -> None:
    engines = [Counting(), Counting(), Counting()]
    replicas = Replicas(engines, page_size=8)
    for length in (40, 10, 10, 10, 10):
        replicas.submit(asked([length, *range(length)]))
    assert [len(engine.taken) for engine in engines] == [1, 2, 2]


def test_texts_that_begin_alike_meet_unless_their_engine_is_busier_than_that_saves() -> None:
    engines = [Counting(), Counting()]
    replicas = Replicas(engines, page_size=8)
    prefix = list(range(20))
    replicas.submit(asked([*prefix, 90]))
    engines[0].taken.clear()
    replicas.submit(asked([7] * 9))
    assert [len(engine.taken) for engine in engines] == [1, 0]
    # Its two full pages are 16 tokens of work less, and the other request is 13.
    replicas.submit(asked([*prefix, 91]))
    assert [len(engine.taken) for engine in engines] == [2, 0]
    # Now the first has 38 to do and the second nothing.
    replicas.submit(asked([*prefix, 92]))
    assert [len(engine.taken) for engine in engines] == [2, 1]
    # It has the prefix too, and is remembered for it.
    engines[1].taken.clear()
    engines[0].taken.clear()
    replicas.submit(asked([*prefix, 93]))
    assert [len(engine.taken) for engine in engines] == [0, 1]


def test_a_full_or_stopped_engine_is_passed_over() -> None:
    engines = [Counting(most=1), Counting(most=2)]
    replicas = Replicas(engines, page_size=8)
    for _ in range(3):
        replicas.submit(asked([1, 2, 3]))
    assert [len(engine.taken) for engine in engines] == [1, 2]
    with pytest.raises(RefusedError, match="requests wait"):
        replicas.submit(asked([1, 2, 3]))
    engines = [Counting(), Counting()]
    replicas = Replicas(engines, page_size=8)
    engines[0].ready = False
    replicas.submit(asked([1]))
    assert not replicas.ready
    assert [len(engine.taken) for engine in engines] == [0, 1]


def test_its_life_is_that_of_all_engines() -> None:
    engines = [Counting(), Counting()]
    replicas = Replicas(engines, page_size=8)
    replicas.start()
    assert [engine.started for engine in engines] == [True, True]
    engines[1].heartbeat_seconds = 5.0
    assert replicas.ready
    assert (replicas.heartbeat_seconds, replicas.context) == (5.0, 64)
    assert replicas.drain(10.0)
    assert not replicas.ready
    engines[0].taken.append(asked([1]))
    assert not replicas.drain(10.0)
    replicas.stop()
    assert [engine.stopped for engine in engines] == [True, True]
