"""The application asked in its own process, without a socket."""

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from systolic.serving.http.state import CONTEXT, RequestContext


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
    """Posts some JSON to a :class:`~systolic.serving.http.middleware.RequestMiddleware`; cancelled, it ends the request and frees what it holds."""
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
    given = [body]
    headers: dict[bytes, bytes] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if given:
            return {"type": "http.request", "body": given.pop(), "more_body": False}
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
