"""OpenTelemetry spans of requests, where its package is installed: one each, child of the caller's, with its phases below it.

Which exporter they go to is OpenTelemetry's own configuration: ``opentelemetry-instrument systolic serve ...``.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from systolic.serving.http.desk import Ticket

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path to ``gen_ai.operation.name``."""


class RequestSpan(Protocol):
    """A span of a request."""

    def ended(self, status: int, ticket: "Ticket") -> None:
        """Notes the answer."""
        ...


class Traces(Protocol):
    """Whatever makes spans."""

    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], ticket: "Ticket"
    ) -> AbstractContextManager[RequestSpan]:
        """The span of a request."""
        ...


class NoTraces:
    """Makes none."""

    @contextmanager
    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], ticket: "Ticket"
    ) -> Generator["NoTraces"]:
        """See :class:`Traces`."""
        del scope, headers, ticket
        yield self

    def ended(self, status: int, ticket: "Ticket") -> None:
        """See :class:`RequestSpan`."""
        del status, ticket


class OpenTelemetry:
    """Spans by the global tracer provider, with the attributes of its conventions for HTTP and for language models.

    Below the span of a request lie ``queue``, ``prefill`` and ``decode`` of each of its texts.
    """

    @contextmanager
    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], ticket: "Ticket"
    ) -> Generator["_Span"]:
        """See :class:`Traces`."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        carrier = {name.decode("latin-1"): value for name, value in headers.items()}
        tracer = trace.get_tracer("systolic")
        attributes: dict[str, str] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "systolic.request.id": ticket.id,
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
            yield _Span(tracer, span)


class _Span:
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self._span = tracer, span

    def ended(self, status: int, ticket: "Ticket") -> None:
        """See :class:`RequestSpan`."""
        from opentelemetry.trace import Status, StatusCode

        found: dict[str, str | int | float | Sequence[str]] = {"http.response.status_code": status}
        if ticket.model is not None:
            found["gen_ai.request.model"] = found["gen_ai.response.model"] = ticket.model
        if ticket.usage is not None:
            found["gen_ai.usage.input_tokens"] = ticket.usage.prompt_tokens
            found["gen_ai.usage.output_tokens"] = ticket.usage.completion_tokens
            found["gen_ai.usage.cache_read.input_tokens"] = ticket.usage.cached_tokens
        if ticket.finish is not None:
            found["gen_ai.response.finish_reasons"] = ticket.finish.split(",")
        if ticket.first_byte_seconds is not None:
            found["gen_ai.server.time_to_first_token"] = ticket.first_byte_seconds
        self._span.set_attributes(found)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        for number, times in enumerate(ticket.times):
            begin = times.submitted_ns
            for name, seconds in times.phases().items():
                end = begin + int(seconds * 1e9)
                part = self._tracer.start_span(
                    name, start_time=begin, attributes={"systolic.text": number}
                )
                part.end(end)
                begin = end


def find_traces() -> Traces:
    """Spans where OpenTelemetry is installed, else none."""
    return OpenTelemetry() if find_spec("opentelemetry") is not None else NoTraces()
