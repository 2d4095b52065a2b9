"""Models without weights: an engine that says the prompt again, and one that adds numbers."""

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from systolic.core.errors import DataError, OptionError
from systolic.data.text.tokenizer import TextStream as Decoder
from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.grammar import Grammars
from systolic.serving.request import BYTES, ArraySpec, ModelKind, RefusedError
from systolic.serving.text.request import Finish, Logprob, TextOutput, TextRequest
from systolic.serving.text.sequence import EngineLoad, EngineWatcher, StepFacts


class EchoStream:
    """One request of an :class:`EchoEngine`."""

    def __init__(self, request: TextRequest, decoder: Decoder) -> None:
        self.request, self.decoder = request, decoder
        self.cancelled = threading.Event()
        self.cancelled_at = 0.0
        self.done = 0
        self.text = ""
        self.given = 0
        self.begun = time.monotonic()
        self.pieces: queue.SimpleQueue[TextOutput] = queue.SimpleQueue()
        self.made: list[float] = []
        self._waiting: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, piece: TextOutput) -> None:
        self.pieces.put(piece)
        if self._loop is not None and self._waiting is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody reads any more.
                self._loop.call_soon_threadsafe(self._waiting.set)

    def cancel(self) -> None:
        if not self.cancelled.is_set():
            self.cancelled_at = time.monotonic()
            self.cancelled.set()

    def __iter__(self) -> Iterator[TextOutput]:
        while True:
            piece = self.pieces.get()
            yield piece
            if piece.finish is not None:
                return

    async def __aiter__(self) -> AsyncIterator[TextOutput]:
        self._waiting, self._loop = asyncio.Event(), asyncio.get_running_loop()
        while True:
            self._waiting.clear()
            while not self.pieces.empty():
                piece = self.pieces.get()
                yield piece
                if piece.finish is not None:
                    return
            if self.pieces.empty():
                await self._waiting.wait()


class EchoEngine:
    """Answers with the prompt's tokens, or with ``answer``, one a step to every request.

    Args:
        tokenizer: For the text of its tokens.
        step_seconds: Of each step.
        context: As a model's.
        most: Requests that are taken at once.
        answer: What it says; the prompt where it is empty.
        watcher: Who is told.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        step_seconds: float = 0.0005,
        context: int = 4096,
        most: int = 10_000,
        answer: str = "",
        watcher: EngineWatcher | None = None,
    ) -> None:
        self.tokenizer, self.step_seconds, self.context = tokenizer, step_seconds, context
        self.most, self.answer, self.watcher = most, tokenizer.encode(answer), watcher
        self.grammars = Grammars(tokenizer, 264, (256,))
        self.streams: list[EchoStream] = []
        self.everything: list[EchoStream] = []
        self.ready, self.refuses = False, False
        self.hung = False
        self.turned = time.monotonic()
        self.requests: list[TextRequest] = []
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def heartbeat_seconds(self) -> float:
        return time.monotonic() - self.turned

    def start(self) -> None:
        threading.Thread(target=self._loop, daemon=True).start()
        self.ready = True

    def stop(self) -> None:
        self.refuses = True
        self._ended.set()
        for stream in self.streams:
            stream.cancel()

    def drain(self, seconds: float) -> bool:
        self.refuses = True
        end = time.monotonic() + seconds
        while self.streams and time.monotonic() < end:
            time.sleep(0.001)
        return not self.streams

    def submit(self, request: TextRequest) -> EchoStream:
        if self.refuses:
            raise RefusedError("the engine ends", retry_seconds=5.0)
        with self._lock:
            if len(self.streams) >= self.most:
                raise RefusedError("the queue is full", retry_seconds=1.5)
            stream = EchoStream(request, self.tokenizer.stream())
            self.streams.append(stream)
            self.everything.append(stream)
        self.requests.append(request)
        return stream

    def _loop(self) -> None:
        while not self._ended.is_set() or self.streams:
            time.sleep(self.step_seconds)
            if self.hung:
                continue
            self.turned = time.monotonic()
            with self._lock:
                live = list(self.streams)
            if self.watcher is not None and live:
                self.watcher.stepped(_facts(len(live)))
            for stream in live:
                if self._advance(stream):
                    with self._lock:
                        self.streams.remove(stream)

    def _advance(self, stream: EchoStream) -> bool:
        request = stream.request
        source = self.answer or list(request.tokens)
        output = TextOutput()
        if stream.done == 0 and request.prompt_logprobs:
            output.prompt_ids = list(request.tokens)
            output.prompt_logprobs = [
                _logprob(one, request, first=n == 0) for n, one in enumerate(request.tokens)
            ]
        finish = None
        late = request.deadline_seconds
        if stream.cancelled.is_set():
            finish = Finish.cancelled
        elif late is not None and time.monotonic() - stream.begun > late:
            finish = Finish.deadline
        if finish is None:
            one = source[stream.done % len(source)]
            output.token_ids = [one]
            output.logprobs = [] if request.logprobs is None else [_logprob(one, request)]
            stream.text += stream.decoder.push(one)
            stream.done += 1
            if stream.done == request.max_tokens:
                finish = Finish.length
            elif self.answer and stream.done == len(source):
                finish = Finish.stop
            if finish is not None:
                stream.text += stream.decoder.flush()
        for stop in request.stop:
            if stop in stream.text:
                stream.text, finish = stream.text[: stream.text.index(stop)], Finish.stop
        # For the test's purpose nothing is held back, whatever stop strings there are.
        output.text, stream.given = stream.text[stream.given :], len(stream.text)
        stream.made.append(time.monotonic())
        if finish is not None:
            total, size = time.monotonic() - stream.begun, len(request.tokens)
            output.finish, output.message = finish, ""
            output.prompt_tokens, output.completion_tokens = size, stream.done
            output.cached_tokens, output.started = size // 2, True
            output.submitted_ns = time.time_ns() - int(total * 1e9)
            output.queue_seconds, output.first_token_seconds = total / 4, total / 2
            output.seconds = total
            if self.watcher is not None:
                running = len(self.streams) - 1
                told = replace(output, cached_tokens=0, queue_seconds=0.0)
                self.watcher.ended(told, EngineLoad(running, 0, running, 100))
        stream.put(output)
        return finish is not None


def _logprob(index: int, request: TextRequest, *, first: bool = False) -> Logprob:
    """The log-probability -1/(1 + id) of a token, beside a likelier one."""
    if request.logprobs is None or first:
        return None, ()
    top = [(index, -1 / (1 + index)), (index + 1, -2.0)][: request.logprobs]
    return -1 / (1 + index), top


def _facts(rows: int) -> StepFacts:
    return StepFacts(
        decode_rows=rows,
        prefill_tokens=0,
        bucket="echo",
        padded_tokens=3,
        pages_in_use=rows,
        pages_total=100,
        running=rows,
        waiting=0,
        preempted=0,
        host_seconds=0.0,
        seconds=0.001,
    )


class ToyReader:
    """Bytes as ids, with one before the text and one after it."""

    most = 12

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()

    def ids(self, texts: Sequence[str], most: int | None = None) -> list[np.ndarray]:
        room = None if most is None else max(most - 2, 0)
        return [np.array([1, *text.encode()[:room], 2], np.int32) for text in texts]


class ToyModel:
    """A batch model of each kind, with answers that can be computed by hand."""

    def __init__(self, kind: ModelKind, name: str = "toy") -> None:
        self.kind, self.name, self.ready = kind, name, False
        self.labels: Sequence[str] = ()
        self.reader = ToyReader() if kind is ModelKind.embedding else None
        self.delay_seconds = self.heartbeat_seconds = 0.0
        self.cancelled = threading.Event()
        at = (-1,)
        self.inputs: Sequence[ArraySpec] = {
            ModelKind.tensors: [
                ArraySpec(name="x", dtype="float32", shape=(-1, 2)),
                ArraySpec(name="count", dtype="int32", shape=at, optional=True),
            ],
            ModelKind.embedding: [ArraySpec(name="text", dtype=BYTES, shape=at)],
            ModelKind.transcription: [
                ArraySpec(name="audio", dtype=BYTES, shape=at),
                ArraySpec(name="language", dtype=BYTES, shape=at, optional=True),
            ],
            ModelKind.image: [ArraySpec(name="image", dtype=BYTES, shape=at)],
        }[kind]
        self.outputs: Sequence[ArraySpec] = [ArraySpec(name="y", dtype="float32", shape=(-1, 2))]

    def submit(
        self, inputs: Mapping[str, np.ndarray], *, deadline_seconds: float | None = None
    ) -> "Future[Mapping[str, np.ndarray]]":
        if not self.ready:
            raise RefusedError("not ready", retry_seconds=1.0)
        unknown = set(inputs) - {one.name for one in self.inputs}
        missing = {one.name for one in self.inputs if not one.optional} - set(inputs)
        if unknown or missing:
            raise OptionError(f"inputs {sorted(unknown | missing)} are unknown or missing")
        future: Future[Mapping[str, np.ndarray]] = Future()
        threading.Thread(target=self._answer, args=(future, inputs), daemon=True).start()
        return future

    def _answer(
        self, future: "Future[Mapping[str, np.ndarray]]", inputs: Mapping[str, np.ndarray]
    ) -> None:
        time.sleep(self.delay_seconds)
        if not future.set_running_or_notify_cancel():
            self.cancelled.set()
            return
        try:
            future.set_result(self._outputs(inputs))
        except Exception as error:
            future.set_exception(error)

    def _outputs(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        match self.kind:
            case ModelKind.tensors:
                x = inputs["x"]
                if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != 2:
                    raise OptionError(f"x is {x.dtype}{list(x.shape)}; it takes float32[n, 2]")
                with np.errstate(over="ignore"):
                    return {"y": 2 * x}
            case ModelKind.embedding:
                rows = list(inputs["text"])
                made = [[len(one), 0.0, 0.0, 3.0] for one in rows]
                tokens = np.array([len(one) for one in rows], np.int32)
                return {"embedding": np.array(made, np.float32), "tokens": tokens}
            case ModelKind.transcription:
                (sound,) = inputs["audio"]
                if not sound.startswith(b"RIFF"):
                    raise DataError("the recording can't be read; send WAV or FLAC")
                parts = [
                    {"start": 0.0, "end": 1.5, "text": " Hello"},
                    {"start": 1.5, "end": 62.25, "text": " world."},
                ]
                texts, segments = np.empty(1, object), np.empty(1, object)
                texts[0], segments[0] = b"Hello world.", json.dumps(parts).encode()
                return {
                    "text": texts,
                    "language": inputs.get("language", np.array([b"english"], object)),
                    "seconds": np.array([62.25], np.float32),
                    "segments": segments,
                }
            case _:
                names = np.empty((len(inputs["image"]), 1), object)
                names[:] = [[b"cat"]] * len(names)
                return {
                    "label": np.zeros((len(names), 1), np.int32),
                    "probability": np.ones((len(names), 1), np.float32),
                    "name": names,
                }

    def start(self) -> None:
        self.ready = True

    def drain(self, seconds: float) -> bool:
        self.ready = False
        return True

    def close(self) -> None:
        self.ready = False
