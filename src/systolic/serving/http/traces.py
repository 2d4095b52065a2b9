"""OpenTelemetry spans of requests, where its package is installed: one span each, child of the caller's.

Which exporter they go to is OpenTelemetry's own configuration: ``opentelemetry-instrument systolic serve ...``.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from systolic.serving.http.desk import Ticket


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
    """Spans by the global tracer provider, with the attributes of its conventions for HTTP and for language models."""

    @contextmanager
    def request(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, str], ticket: "Ticket"
    ) -> Generator["_Span"]:
        """See :class:`Traces`."""
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        carrier = {name.decode("latin-1"): value for name, value in headers.items()}
        tracer = trace.get_tracer("systolic")
        with tracer.start_as_current_span(
            f"{scope['method']} {scope['path'].partition(':')[0]}",
            context=extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "systolic.request.id": ticket.id},
        ) as span:
            yield _Span(span)


class _Span:
    def __init__(self, span: "Span") -> None:
        self._span = span

    def ended(self, status: int, ticket: "Ticket") -> None:
        """See :class:`RequestSpan`."""
        found: dict[str, str | int | float] = {"http.response.status_code": status}
        if ticket.model is not None:
            found["gen_ai.request.model"] = ticket.model
        if ticket.usage is not None:
            found["gen_ai.usage.input_tokens"] = ticket.usage.prompt_tokens
            found["gen_ai.usage.output_tokens"] = ticket.usage.completion_tokens
        if ticket.first_byte_seconds is not None:
            found["gen_ai.server.time_to_first_token"] = ticket.first_byte_seconds
        self._span.set_attributes(found)


def find_traces() -> Traces:
    """Spans where OpenTelemetry is installed, else none."""
    return OpenTelemetry() if find_spec("opentelemetry") is not None else NoTraces()
