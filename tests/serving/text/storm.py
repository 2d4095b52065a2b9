"""Many requests at once, of all lengths, that end in every way: read, cancelled, late, abandoned, refused, and by clients that leave."""

import gc
import json
import random
import socket
import threading
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psutil

from systolic.serving.request import RefusedError
from systolic.serving.text.engine import Engine
from systolic.serving.text.request import Finish, SamplingParams, Stream, TextOutput, TextRequest
from systolic.serving.text.sequence import EngineLoad, Sequence, StepFacts
from tests.serving.http.running import Running

GREEDY = SamplingParams(temperature=0.0)
MOST = 24
"""New tokens of a request."""
AT_ONCE = 5
"""Requests of a thread."""
HTTP_SHARE = 0.25


@dataclass
class StormWatch:
    """Counts what an engine tells."""

    ended: Counter[Finish] = field(default_factory=Counter)
    steps: int = 0
    preempted: int = 0
    most_running: int = 0
    fullest: float = 0.0

    def stepped(self, facts: StepFacts) -> None:
        self.steps += 1
        self.preempted += facts.preempted
        self.most_running = max(self.most_running, facts.running)
        self.fullest = max(self.fullest, facts.pages_in_use / facts.pages_total)

    def ended_request(self, output: TextOutput) -> None:
        self.ended[output.finish] += 1


class Watched:
    """An engine's watcher."""

    def __init__(self) -> None:
        self.counts = StormWatch()

    def stepped(self, facts: StepFacts) -> None:
        self.counts.stepped(facts)

    def ended(self, output: TextOutput, load: EngineLoad) -> None:
        self.counts.ended_request(output)


@dataclass
class Held:
    """Memory when everything has ended."""

    traced_bytes: int
    resident_bytes: int


class Storm:
    """Requests to one engine, directly and over a server.

    Args:
        engine: Started.
        server: Over it.
        watched: The engine's watcher.
        vocab: Ids that prompts are made of.
    """

    def __init__(self, engine: Engine, server: Running, watched: Watched, vocab: int) -> None:
        self.engine, self.server, self.watched = engine, server, watched
        draw = random.Random(0)
        begins = [[draw.randrange(vocab) for _ in range(30)] for _ in range(3)]
        self.prompts = [
            (draw.choice(begins)[: draw.randrange(31)] if n % 2 else [])
            + [draw.randrange(vocab) for _ in range(draw.randrange(1, 40))]
            for n in range(16)
        ]
        self.submitted = 0
        self._lock = threading.Lock()
        self._submit = engine.submit
        engine.submit = self._counted
        self.alone = [self._ids(self._request(prompt, MOST)) for prompt in self.prompts]
        """What each prompt is continued with where nothing else runs."""
        self.did: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.failures: list[BaseException] = []

    def run(self, requests: int, threads: int, first: int = 0) -> None:
        """Sends so many, and returns when all have ended."""
        numbers = iter(range(first, first + requests))

        def work() -> None:
            try:
                while group := self._group(numbers):
                    self._some(group)
            except BaseException as error:
                self.failures.append(error)

        several = [threading.Thread(target=work) for _ in range(threads)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()
        if self.failures:
            raise self.failures[0]
        assert sum(self.did.values()) == first + requests
        until(lambda: self.engine.live == 0 and self.server.state.in_flight == 0)

    def check(self) -> None:
        """Everything has ended once, and nothing is left of it."""
        engine, counts = self.engine, self.watched.counts
        assert engine.ready
        until(lambda: sum(counts.ended.values()) >= self.submitted)
        assert sum(counts.ended.values()) == self.submitted
        assert counts.ended[Finish.error] == 0
        pool, scheduler = engine.scheduler.pool, engine.scheduler
        assert (pool.in_use, pool.available) == (0, pool.total)
        assert not pool._holders
        assert set(pool._by_key.values()) == set(pool._kept) == set(pool._key_of)
        assert sorted([*pool._free, *pool._kept]) == list(range(1, pool.num_pages))
        assert [*scheduler.running, *scheduler.waiting] == []
        assert sorted(scheduler._slots) == list(range(scheduler.limits.rows))
        assert [*engine._live, *engine._by_stream, *engine._arrived, *engine._cancelled] == []
        logged = len(self.server.log("request"))
        assert logged == sum(self.statuses.values()), (logged, self.statuses)
        assert {line["status"] for line in self.server.log("request")} <= {200, 400, 429, 499, 504}

    def held(self) -> Held:
        """Memory; the server's log is emptied."""
        self.statuses.clear()
        self.server.lines.seek(0)
        self.server.lines.truncate()
        gc.collect()
        # The loop's last step names its texts while nothing follows it.
        for kind in (Sequence, Stream):
            left = [one for one in gc.get_objects() if type(one) is kind]
            assert len(left) <= self.engine.scheduler.limits.rows + 1
        return Held(tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss)

    def _counted(self, request: TextRequest) -> Stream:
        stream = self._submit(request)
        with self._lock:
            self.submitted += 1
        return stream

    def _group(self, numbers: Any) -> list[int]:
        with self._lock:
            return list(islice(numbers, AT_ONCE))

    def _request(self, prompt: list[int], most: int, **more: Any) -> TextRequest:
        return TextRequest(
            tokens=prompt, max_tokens=most, **{"sampling": GREEDY, "ignore_ends": True, **more}
        )

    def _ids(self, request: TextRequest) -> list[int]:
        pieces = list(self.engine.submit(request))
        return [token for piece in pieces for token in piece.token_ids]

    def _some(self, numbers: list[int]) -> None:
        """Several requests of one thread, begun together and read one after the other."""
        begun = []
        for number in numbers:
            draw = random.Random(number)
            if draw.random() < HTTP_SHARE:
                self._over_http(draw)
            else:
                begun.append((draw, *self._begin(draw)))
        for draw, place, request, stream in begun:
            if stream is not None:
                self._read(draw, place, request, stream)

    def _begin(self, draw: random.Random) -> tuple[int, TextRequest, Stream | None]:
        place = draw.randrange(len(self.prompts))
        more: dict[str, Any] = {}
        kind = draw.random()
        if kind < 0.15:
            more["deadline_seconds"] = draw.choice([0.0, 0.01, 0.05, 0.2])
        elif kind < 0.25:
            more["sampling"] = SamplingParams(
                temperature=1.0, top_k=5, presence_penalty=0.5, seed=place
            )
            more["logprobs"] = 2
        elif kind < 0.3:
            more |= {"prompt_logprobs": True, "logprobs": 0}
        elif kind < 0.33:
            wrong = self._request([10**6], 1)
            try:
                self.engine.submit(wrong)
            except RefusedError:
                self._count("refused")
            return place, wrong, None
        request = self._request(self.prompts[place], draw.randint(1, MOST), **more)
        while True:
            try:
                return place, request, self.engine.submit(request)
            except RefusedError:  # The queue is full.
                time.sleep(0.005)

    def _read(self, draw: random.Random, place: int, request: TextRequest, stream: Stream) -> None:
        way = draw.random()
        if way < 0.1:
            self._count("abandoned")
            stream.cancel()
            return
        leaves = draw.randrange(MOST) if way < 0.35 else None
        pieces = []
        for piece in stream:
            pieces.append(piece)
            if leaves is not None and len(pieces) > leaves:
                stream.cancel()
        assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        last = pieces[-1]
        assert last.finish is not None
        ids = [token for piece in pieces for token in piece.token_ids]
        assert last.completion_tokens == len(ids) <= request.max_tokens
        if last.finish is Finish.length:
            assert len(ids) == request.max_tokens
        else:
            expected = Finish.deadline if request.deadline_seconds is not None else None
            assert last.finish in (Finish.cancelled, expected)
        scored = [token for piece in pieces for token in piece.prompt_ids]
        assert scored == list(request.tokens[: len(scored)])
        if request.prompt_logprobs and ids:
            assert len(scored) == len(request.tokens)
        if request.sampling is GREEDY:
            assert ids == self.alone[place][: len(ids)]
        self._count(f"read to {last.finish.value}")

    def _over_http(self, draw: random.Random) -> None:
        place = draw.randrange(len(self.prompts))
        most = draw.randint(1, MOST)
        fields = {"prompt": self.prompts[place], "max_tokens": most, "temperature": 0}
        fields |= {"ignore_eos": True, "stream": draw.random() < 0.5}
        head, way = "", draw.random()
        if way < 0.1:
            head = f"X-Request-Timeout: {draw.choice([0.001, 0.02])}\r\n"
        body = json.dumps(fields).encode()
        raw = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        leaves = {0: None, 1: 0, 2: draw.randrange(1, 600)}[draw.choice([0, 0, 1, 2])]
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as link:
            if way > 0.95:
                # Half of the body; then it leaves.
                link.sendall(raw + body[: len(body) // 2])
                self._sent("half a body", 499)
                return
            link.sendall(raw + body)
            found = b""
            while leaves is None or len(found) < leaves:
                part = link.recv(4096)
                if not part:
                    break
                found += part
        if leaves is not None:
            self._sent("left", 499)
            return
        status = int(found.split(b" ", 2)[1])
        self._sent("answered", status)
        if status != 200:
            assert status in (429, 504), found
            return
        if not fields["stream"]:
            usage = json.loads(found.split(b"\r\n\r\n", 1)[1])["usage"]
            assert usage["completion_tokens"] == most
        else:
            assert b"[DONE]" in found or b'"code":"deadline"' in found

    def _sent(self, what: str, status: int) -> None:
        self._count(f"over HTTP: {what}")
        with self._lock:
            self.statuses[status] += 1

    def _count(self, what: str) -> None:
        with self._lock:
            self.did[what] += 1


def until(met: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
