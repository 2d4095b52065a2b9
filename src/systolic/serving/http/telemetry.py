"""Log and traces of a server: one JSON object a line on stderr, and OpenTelemetry spans of requests where its package is installed.

Which exporter the spans go to is OpenTelemetry's own configuration: ``opentelemetry-instrument systolic serve ...``.
"""

import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from systolic.serving.http.state import RequestContext


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


OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path to ``gen_ai.operation.name``."""


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
