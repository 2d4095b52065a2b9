"""``systolic batch``: the requests of a file, asked of the server's application in this process, without a server."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from systolic.core.errors import DataError, RunError, SystolicError
from systolic.core.files import digest, write_json
from systolic.core.reporter import reporter
from systolic.formats.outline import model_contents
from systolic.formats.registry import in_files
from systolic.job import Precision
from systolic.serving.http.app import RequestMiddleware, application
from systolic.serving.http.keys import HttpLimits
from systolic.serving.http.metrics import Metrics
from systolic.serving.http.state import CONTEXT, RequestContext, ServerState
from systolic.serving.http.telemetry import EventLog, NoTraces
from systolic.serving.offline.files import (
    BatchInput,
    BatchOutput,
    BatchProgress,
    LineProblem,
    LineRequest,
    answer_line,
    digest_of,
    problem_line,
    request_of,
    result_id,
)
from systolic.serving.registry import ModelRegistry, Served
from systolic.serving.server import ServeSettings, ServeTarget, checked_targets, open_served

AHEAD = 2
"""Lines in flight for each text that is continued at once: while one runs, another waits for its place."""
IN_FLIGHT = 128
"""Lines in flight of a model that writes no text."""
QUEUED = 1 << 16
"""Texts or examples that may wait: lines can have many, and none is refused for others' sake."""
STALLED_SECONDS = 3600.0
"""Time of a call after which a model that writes no text counts as stuck; nobody waits for a single answer here."""
SYNC_SECONDS, SHOWN_SECONDS = 1.0, 0.25
ADAPTER = "adapter "
"""Before the name of an adapter, among what answers depend on."""
ALONE, RETRY_SECONDS = 3, 0.05
"""Times that a line is asked while no other is, before its refusal is its answer; the time between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answerer:
    """Everything that answers depend on, beside the lines that ask for them."""

    model: str
    """Its name, which answers hold."""
    version: int
    weights: str
    """Digest of weights and config; a copy elsewhere has the same."""
    texts: str
    """Digest of tokenizer, chat template and preprocessing; empty where it has none of them."""
    precision: str
    """Precision of the computation."""
    context: int
    """Tokens of a text; 0 for the model's own limit."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Digests of adapters and their chat templates, by name behind :data:`ADAPTER`."""

    @property
    def values(self) -> dict[str, Any]:
        """Each by its name, in the file and in messages."""
        values = asdict(self)
        return values | values.pop("adapters")

    def begin(self, out: Path) -> None:
        """Writes the file of an output that has no result yet.

        Raises:
            RunError: it can't be written.
        """
        write_json(answerer_file(out), self.values)

    def check(self, out: Path) -> None:
        """Compares the file of an output that has results.

        Raises:
            DataError: something else gave them, or the file is gone or damaged.
        """
        file = answerer_file(out)
        try:
            before = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{out} has results, and {file} that says which model gave them can't be read; put it back, or name another output"
            ) from error
        known, values = before if isinstance(before, dict) else {}, self.values
        names = [*values, *(n for n in known if n.startswith(ADAPTER) and n not in values)]
        differ = [
            f"{name} {known.get(name, 'none')!s:.40}, now {values.get(name, 'none')}"
            for name in names
            if known.get(name) != values.get(name)
        ]
        if differ:
            raise DataError(
                f"{out} has results of another model or other options ({'; '.join(differ)}); use those again, or name another output"
            )


def answerer_file(out: Path) -> Path:
    """The file beside an output."""
    return out.with_name(f"{out.name}.model.json")


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """An event of a model that is opened, as the log of a server has it: ``context``, ``compiled``, ``warm``."""

    event: str
    fields: Mapping[str, Any]


class _ReporterLog(EventLog):
    """A log whose warnings and events the reporter is given."""

    def write(self, event: str, **fields: Any) -> None:
        """Warns of failures, and of what opening a model warns of; reports all else."""
        text = fields.get("message") if event == "warning" else fields.get("error")
        if text:
            reporter().warn(text)
        else:
            reporter().update(ModelEvent(event, fields))


def run_batch(
    model: str, source: Path, out: Path, settings: ServeSettings, in_flight: int = 0
) -> BatchProgress:
    """Answers each line of a file that has no result yet; Ctrl+C ends it when the lines in flight have theirs.

    The reporter is given the progress a few times a second, and a :class:`ModelEvent` for what opening the model tells.

    Args:
        model: ``DIR`` or ``NAME=DIR``; of several versions the newest.
        source: The requests.
        out: The results.
        settings: How the model is opened.
        in_flight: Lines that are asked at once; 0 takes :data:`AHEAD` for each of its rows, or :data:`IN_FLIGHT`.

    Raises: as :func:`systolic.batch`.
    """
    target = max(checked_targets([model]), key=lambda target: target.version)
    output = BatchOutput.open(out, BatchInput.read(source))
    try:
        if output.answered:
            answerer_of(target, settings).check(out)
        elif output.left:
            answerer_of(target, settings).begin(out)
        if not output.left:
            return output.progress
        return _answered(output, target, settings, in_flight)
    finally:
        output.close()


def _answered(
    output: BatchOutput, target: ServeTarget, settings: ServeSettings, in_flight: int
) -> BatchProgress:
    from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
    from systolic.serving.registry import ServedText

    metrics = Metrics()
    settings = replace(
        settings,
        sizes=replace(settings.sizes, queued=QUEUED),
        batch=replace(settings.batch, waiting=QUEUED, stalled_seconds=STALLED_SECONDS),
    )
    texts, batches = TextMetrics(metrics), BatchMetrics(metrics)
    log, begun = _ReporterLog(), time.monotonic()
    served = open_served(target, settings, texts, batches, log)
    try:
        served.start()
        seconds = round(time.monotonic() - begun, 3)
        log.write("warm", model=served.name, version=served.version, seconds=seconds)
        ahead = AHEAD * settings.sizes.rows if isinstance(served, ServedText) else IN_FLIGHT
        run = BatchRun(output, served, in_flight or ahead, reporter().warn)
        asyncio.run(run.run(reporter().update))
        return run.progress
    finally:
        served.drain(0.0)


def answerer_of(target: ServeTarget, settings: ServeSettings) -> Answerer:
    """Weights, texts and options that a model's answers depend on.

    Raises: as :func:`~systolic.inference.model.prepare_model`.
    """
    contents = model_contents(target.path, settings.checkpoint)
    return Answerer(
        model=target.name,
        version=target.version,
        weights=contents.weights,
        texts=contents.texts,
        precision=_precision(target, settings),
        context=settings.sizes.context,
        adapters={
            f"{ADAPTER}{own.name}": _adapter_digest(own.path) for own in settings.adapters.targets
        },
    )


def _adapter_digest(path: Path) -> str:
    from systolic.serving.text.adapters import adapter_contents, template_of

    template = template_of(path)
    return digest([adapter_contents(path), template.text if template else ""])


def _precision(target: ServeTarget, settings: ServeSettings) -> str:
    precision = settings.precision
    if not in_files(target.path):
        return "the run's" if precision is Precision.auto else precision.value
    from systolic.steps.machine import LocalDevices

    return precision.resolve(LocalDevices.here().platform).value


@dataclass(frozen=True, kw_only=True)
class InProcessResponse:
    """A whole answer."""

    context: RequestContext
    """Its request, with what was counted."""
    body: bytes
    json: bool
    """Whether the body is one JSON value."""
    retry_seconds: float | None = None
    """When to come back, where the request was refused for now."""


async def post(app: ASGIApp, url: str, body: bytes) -> InProcessResponse:
    """Posts some JSON to a :class:`~systolic.serving.http.app.RequestMiddleware`; cancelled, it ends the request and frees what it holds."""
    path, _, query = url.partition("?")
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    bodies = [body]
    headers: dict[bytes, bytes] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await asyncio.Event().wait()  # This client does not leave before its answer.
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal headers
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    retry = headers.get(b"retry-after")
    return InProcessResponse(
        context=scope[CONTEXT],
        body=b"".join(parts),
        json=headers.get(b"content-type", b"").startswith(b"application/json"),
        retry_seconds=None if retry is None else float(retry),
    )


class BatchRun:
    """Asks a model for the lines that an output lacks.

    Args:
        output: The results.
        served: The model, started.
        in_flight: Lines that are asked at once.
        warn: Called with warnings.
    """

    def __init__(
        self,
        output: BatchOutput,
        served: Served,
        in_flight: int,
        warn: Callable[[str], None],
    ) -> None:
        self._output, self._served = output, served
        # The server's routes over one model.
        state = ServerState(
            registry=ModelRegistry([served]),
            limits=HttpLimits(requests=in_flight + 1),
            metrics=Metrics(),
            opened=True,
        )
        self._app = RequestMiddleware(
            app=application(state), state=state, log=WarningLog(warn), traces=NoTraces()
        )
        self._slots, self._turn = asyncio.Semaphore(in_flight), asyncio.Lock()
        self._asking = 0
        self._begun = time.monotonic()
        self._stops = 0
        self._task: asyncio.Task[Any] | None = None
        self._seen = output.progress
        self._prompt_tokens = self._completion_tokens = 0

    @property
    def progress(self) -> BatchProgress:
        """How far it is."""
        return replace(
            self._seen,
            answered=self._output.answered,
            failed=self._output.failed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            seconds=time.monotonic() - self._begun,
            stopped=self._stops > 0,
        )

    async def run(self, shown: Callable[[BatchProgress], None]) -> None:
        """Ends when every line has a result, or after a signal: the first one waits for the lines in flight, the second does not.

        Raises:
            RunError: as :func:`run_batch`.
        """
        self._task, self._begun = asyncio.current_task(), time.monotonic()
        try:
            with self._signals():
                async with asyncio.TaskGroup() as watching:
                    watcher = watching.create_task(self._watch(shown))
                    async with asyncio.TaskGroup() as lines:
                        await self._feed(lines)
                    watcher.cancel()
        except asyncio.CancelledError:
            if self._stops < 2:
                raise
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        self._output.sync()
        shown(self.progress)

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        for number, line in self._output.source.lines(self._output.done):
            await self._slots.acquire()
            if self._stops:
                return
            group.create_task(self._answer(number, line))

    async def _watch(self, shown: Callable[[BatchProgress], None]) -> None:
        synced = time.monotonic()
        while True:
            shown(self.progress)
            await asyncio.sleep(SHOWN_SECONDS)
            if time.monotonic() - synced >= SYNC_SECONDS:
                await asyncio.to_thread(self._output.sync)
                synced = time.monotonic()

    @contextmanager
    def _signals(self) -> Generator[None]:
        """Takes Ctrl+C and SIGTERM over, which only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _stop(self) -> None:
        self._stops += 1
        if self._stops > 1 and self._task is not None:
            self._task.cancel()

    async def _answer(self, number: int, line: bytes) -> None:
        """Asks for one line and keeps its result."""
        try:
            id, request = result_id(number, digest_of(line)), request_of(number, line)
            if isinstance(request, LineRequest):
                answer = await self._asked(number, request)
                request = self._kept(number, id, request, answer)
            if isinstance(request, LineProblem):
                self._output.append(number, problem_line(id, request), ok=False)
        finally:
            self._slots.release()

    def _kept(
        self, number: int, id: str, request: LineRequest, answer: InProcessResponse
    ) -> LineProblem | None:
        context = answer.context
        self._prompt_tokens += context.prompt_tokens or 0
        self._completion_tokens += context.completion_tokens
        if not answer.json:
            message = f"{request.url} did not answer with JSON; ask for no binary data and no files"
            return LineProblem(request.custom_id, "invalid_answer", message)
        record = answer_line(id, request.custom_id, context.status, context.id, answer.body)
        self._output.append(number, record, ok=context.status == 200)
        return None

    async def _asked(self, number: int, request: LineRequest) -> InProcessResponse:
        """The answer; one that is refused because others wait comes after them."""
        answer = await self._post(number, request)
        if answer.retry_seconds is None:
            return answer
        async with self._turn:
            alone = 0
            while answer.retry_seconds is not None and alone < ALONE:
                alone = 0 if self._asking else alone + 1
                await asyncio.sleep(RETRY_SECONDS)
                answer = await self._post(number, request)
        return answer

    async def _post(self, number: int, request: LineRequest) -> InProcessResponse:
        self._asking += 1
        try:
            answer = await post(self._app, request.url, request.body)
        finally:
            self._asking -= 1
        refused = answer.context.status >= 500 or answer.retry_seconds is not None
        if refused and not self._served.ready:
            message = " ".join(answer.body.decode(errors="replace").split())[:300]
            raise RunError(
                f"{self._served.name} stopped before line {number} was answered ({message}); {self._output.answered:,} of {self._output.source.count:,} lines are: run the same command again to continue"
            )
        return answer


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first error of a group that is none itself, one of ours before others."""
    leaves: list[BaseException] = []
    groups: list[BaseException] = [errors]
    while groups:
        error = groups.pop(0)
        if isinstance(error, BaseExceptionGroup):
            groups += error.exceptions
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, SystolicError)), leaves[0])


class WarningLog(EventLog):
    """A log of what a person has to know."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._warn = warn

    def write(self, event: str, **fields: Any) -> None:
        """Warns of failures, and of what opening a model warns of."""
        text = fields.get("message") if event == "warning" else fields.get("error")
        if text:
            self._warn(text)
