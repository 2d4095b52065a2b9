"""Log and traces of a server: one JSON object a line on stderr, or lines for a person; OpenTelemetry spans of requests."""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from systolic.core.units import gibibytes, plural

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from systolic.serving.http.state import RequestContext

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path to ``gen_ai.operation.name``."""
JSON = '-H "content-type: application/json"'
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "chat": (
        "/v1/chat/completions",
        JSON,
        '-d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is a systolic array?"}}]}}\'',
    ),
    "text": (
        "/v1/completions",
        JSON,
        '-d \'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 32}}\'',
    ),
    "embedding": ("/v1/embeddings", JSON, '-d \'{{"model": "{name}", "input": "some text"}}\''),
    "transcription": ("/v1/audio/transcriptions", "-F model={name}", "-F file=@speech.wav"),
    "image": (
        "/v1/models/{name}:predict",
        '-d @- <<< "{{\\"instances\\": [{{\\"b64\\": \\"$(base64 < picture.jpg)\\"}}]}}"',
    ),
    "tensors": ("/v2/models/{name}",),
}
"""Kind of a model to the path and the options of a curl command that asks it."""


class EventLog:
    """Writes events with their time; fields that are None are left out.

    Args:
        file: Where to; standard error by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()

    def warn(self, line: str) -> None:
        """A warning."""
        self.write("warning", message=line)

    def write(self, event: str, **fields: Any) -> None:
        """One event."""
        now = datetime.now(UTC)
        known = {name: value for name, value in fields.items() if value is not None}
        with self._lock:
            text = self.render(event, known, now)
            self.file.write(text)
            self.file.flush()

    @property
    def file(self) -> TextIO:
        """Output of the log."""
        return sys.stderr if self._file is None else self._file

    def render(self, event: str, fields: dict[str, Any], now: datetime) -> str:
        """The text of an event."""
        record = {"time": now.isoformat(timespec="milliseconds"), "event": event, **fields}
        return msgspec.json.encode(record).decode() + "\n"


class RequestSpan(Protocol):
    """A span of a request."""

    def ended(self, status: int, context: "RequestContext") -> None:
        """Notes the answer."""
        ...


class Traces(Protocol):
    """Whatever makes spans."""

    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], context: "RequestContext"
    ) -> AbstractContextManager[RequestSpan]:
        """The span of a request."""
        ...


class NoTraces:
    """Makes none."""

    @contextmanager
    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], context: "RequestContext"
    ) -> Generator["NoTraces"]:
        """See :class:`Traces`."""
        del scope, headers, context
        yield self

    def ended(self, status: int, context: "RequestContext") -> None:
        """See :class:`RequestSpan`."""
        del status, context


class OpenTelemetry:
    """Spans by the global tracer provider, with the attributes of its conventions for HTTP and for language models.

    Below the span of a request lie ``queue``, ``prefill`` and ``decode`` of each of its texts.
    """

    @contextmanager
    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], context: "RequestContext"
    ) -> Generator["_TraceSpan"]:
        """See :class:`Traces`."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        carrier = {name.decode("latin-1"): value for name, value in headers.items()}
        tracer = trace.get_tracer("systolic")
        attributes: dict[str, str] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "systolic.request.id": context.id,
        }
        operation = OPERATIONS.get(scope["path"])
        if operation is not None:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "systolic"}
        with tracer.start_as_current_span(
            f"{scope['method']} {scope['path'].partition(':')[0]}",
            context=extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            yield _TraceSpan(tracer, span)


class _TraceSpan:
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self._span = tracer, span

    def ended(self, status: int, context: "RequestContext") -> None:
        """See :class:`RequestSpan`."""
        from opentelemetry.trace import Status, StatusCode

        attributes: dict[str, str | int | float | Sequence[str]] = {
            "http.response.status_code": status
        }
        if context.model is not None:
            attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = context.model
        if context.prompt_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = context.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = context.completion_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = context.cached_tokens
        if context.finish is not None:
            attributes["gen_ai.response.finish_reasons"] = context.finish.split(",")
        if context.first_byte_seconds is not None:
            attributes["gen_ai.server.time_to_first_token"] = context.first_byte_seconds
        self._span.set_attributes(attributes)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        for number, output in enumerate(context.ended):
            begin = output.submitted_ns
            for name, seconds in output.phases().items():
                end = begin + int(seconds * 1e9)
                part = self._tracer.start_span(
                    name, start_time=begin, attributes={"systolic.text": number}
                )
                part.end(end)
                begin = end


def find_traces() -> Traces:
    """Spans where OpenTelemetry is installed, else none."""
    return OpenTelemetry() if find_spec("opentelemetry") is not None else NoTraces()


class ConsoleLog(EventLog):
    """Writes the events that matter to whoever started the server; compiles share one line of a terminal.

    Args:
        file: Where to; standard error by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file)
        self._url = ""
        self._key = self._compiling = False

    def render(self, event: str, fields: dict[str, Any], now: datetime) -> str:
        """The text of an event; empty for one that is left out."""
        match event:
            case "opening":
                text = f"reading {fields['model']} from {fields['path']}"
            case "layout":
                text = _layout(fields)
            case "context":
                text = f"{fields['model']}: texts of up to {fields['context']:,} tokens, prompt and answer ({fields['origin']})"
            case "sizes":
                text = "\n".join(_sizes(fields))
            case "memory":
                text = "\n".join(_memory(fields))
            case "compiled":
                return self._progress(fields)
            case "warm":
                text = f"{fields['model']} is ready after {fields['seconds']:.1f} s"
            case "ready":
                text = "\n".join(_ready(fields))
            case "request":
                text = f"{now.astimezone():%H:%M:%S}  {_request(fields)}"
            case "listening":
                return ""
            case "draining":
                text = f"ending: {plural(fields['in_flight'], 'request')} in flight"
            case "ended":
                cut = f", {fields['cut']} cut off" if fields["cut"] else ""
                text = f"ended after {fields['seconds']:.1f} s{cut}"
            case "traffic":
                text = f"saved the traffic of {', '.join(fields['models']) or 'nothing'} in {fields['path']}"
            case "worker_died":
                text = f"warning: {fields['model']} replaced a worker that died ({fields['error']})"
            case "failed":
                text = f"error: {_failed(fields)}"
            case "replaced" | "unchanged":
                outcomes = {
                    "replaced": "the new one has taken its place",
                    "unchanged": "it is unchanged",
                }
                text = f"{fields['model']} version {fields['version']}: {outcomes[event]}"
            case "warning":
                text = f"warning: {fields['message']}"
            case _:
                text = f"{event}  " + "  ".join(f"{name} {fields[name]}" for name in fields)
        start = "\r\x1b[K" if self._compiling else ""
        self._compiling = False
        return f"{start}{text}\n"

    def _progress(self, fields: dict[str, Any]) -> str:
        if fields.get("late"):
            return f"warning: {fields['model']} compiled {fields['program']} after it was ready\n"
        done, total = fields.get("done", 0), fields.get("programs", 0)
        text = f"compiling {fields['model']}  {done}/{total}  {fields['program']}"
        if not self.file.isatty():
            # A tenth of them at a time.
            before, after = (10 * (done - 1)) // max(total, 1), 10 * done // max(total, 1)
            return f"{text}\n" if after > before or done == total else ""
        self._compiling = True
        return f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"


class OpeningLog(ConsoleLog):
    """Writes what a model tells while it is opened, for a command that is no server.

    Args:
        warn: Called with warnings and failures.
        file: Where the rest goes; standard error by default.
    """

    def __init__(self, warn: Callable[[str], None], file: TextIO | None = None) -> None:
        super().__init__(file)
        self._warn = warn

    def write(self, event: str, **fields: Any) -> None:
        """One event."""
        message = fields.get("message") if event == "warning" else fields.get("error")
        if message:
            self._warn(message)
        elif event != "request":
            super().write(event, **fields)


def _failed(fields: dict[str, Any]) -> str:
    if "model" not in fields:
        return fields["error"]
    return f"{fields['model']} version {fields['version']} can't be opened: {fields['error']}"


def _layout(fields: dict[str, Any]) -> str:
    engines, idle = fields["engines"], fields["idle"]
    axes = [f"{axis} {fields[axis]}" for axis in ("tensor", "expert") if fields[axis] > 1]
    count = plural(engines, "engine")
    spread = f" of {' x '.join(axes)}" if axes else ""
    rest = f", {idle} idle" if idle else ""
    return f"{fields['model']}: {count}{spread} on {plural(fields['devices'], 'device')}{rest}: {fields['reason']}"


def _sizes(fields: dict[str, Any]) -> list[str]:
    origin = "" if fields.get("measured") else ", of assumed traffic"
    shown = [
        f"{fields['model']}: {plural(fields['programs'], 'program')}; expected padding{origin}:"
    ]
    for name, sizes in fields["sizes"].items():
        share = fields["padding"].get(name)
        listed = ", ".join(map(str, sizes))
        shown.append(f"  {name:<14}{listed:<32}{'' if share is None else f'{share:7.1%}'}".rstrip())
    if "all" in fields["padding"]:
        shown.append(f"  {'in all':<46}{fields['padding']['all']:7.1%}")
    if "kernel" in fields:
        shown.append(f"  pages are read by {fields['kernel']}")
    return shown


def _memory(fields: dict[str, Any]) -> list[str]:
    pages = f"{fields['pages']:,} of {fields['page_size']} tokens"
    adapters = fields.get("adapters_bytes", 0)
    rows = (
        ("weights", fields["weights_bytes"] - adapters, ""),
        *([("adapters", adapters, "")] if adapters else []),
        ("pages", fields["pages_bytes"], f"  {pages}"),
        ("temporaries", fields["temporary_bytes"], ""),
        ("free", fields["left_bytes"], ""),
    )
    head = f"{fields['model']}: memory of each device, {gibibytes(fields['capacity_bytes'])}"
    return [
        head,
        *(f"  {name:<14}{gibibytes(size):>11}{text}" for name, size, text in rows),
        f"  room for {plural(fields['texts'], 'text')} of {fields['context']:,} tokens at once",
    ]


def _request(fields: dict[str, Any]) -> str:
    parts = [f"{fields['status']}  {fields['method']} {fields['route']}"]
    if "model" in fields:
        parts.append(fields["model"])
    if "completion_tokens" in fields:
        parts.append(f"{fields['prompt_tokens']} + {fields['completion_tokens']} tokens")
    parts.append(f"{fields['seconds']:.2f} s")
    if "prompt" in fields:
        parts.append(json.dumps(fields["prompt"]))
    return "  ".join(parts)


def _ready(fields: dict[str, Any]) -> list[str]:
    url = fields["url"]
    shown = ["", f"ready: open {url} in a browser, or ask from another terminal:", ""]
    key = ['-H "Authorization: Bearer $KEY"'] if fields.get("keys") else []
    for model in fields["models"]:
        route, *options = (line.format(name=model["name"]) for line in EXAMPLES[model["kind"]])
        parts = [f"  curl {url}{route}", *(f"    {option}" for option in [*key, *options])]
        shown.append(" \\\n".join(parts))
    return [
        *shown,
        "",
        "Ctrl+C ends it when its requests have ended; a second one ends it at once.",
    ]
