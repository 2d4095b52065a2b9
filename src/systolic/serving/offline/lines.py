"""Lines of an offline batch: requests and results in OpenAI's batch file format."""

import json
import re
from typing import NamedTuple

import msgspec
from msgspec import Raw

from systolic.serving.http.protocol import encode, with_infinities

BODIES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
"""Field of a line that is a body alone, and the route that it is for."""
EXPECTED = 'each line is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or a body alone with messages, prompt or input'
"""Form of a file of requests."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
ABSENT = Raw()
_ID = re.compile(r"batch_req_(?P<line>[1-9][0-9]{0,14})_(?P<digest>[0-9a-f]{16})")


class _Fields(msgspec.Struct, kw_only=True):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT


class _Streamed(msgspec.Struct, kw_only=True):
    stream: Raw = ABSENT


class _Response(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str | None = None
    body: Raw = ABSENT


class _Problem(msgspec.Struct, kw_only=True):
    code: str
    message: str


class _Result(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str | None = None
    response: _Response | None = None
    error: _Problem | None = None


_FIELDS = msgspec.json.Decoder(_Fields)
_STREAMED = msgspec.json.Decoder(_Streamed)
_RESULT = msgspec.json.Decoder(_Result)


class LineRequest(NamedTuple):
    """A line that can be asked."""

    custom_id: str
    url: str
    body: bytes


class LineProblem(NamedTuple):
    """A line that can't."""

    custom_id: str
    code: str
    message: str


class LineAnswered(NamedTuple):
    """Which line of the input a line of the output answers."""

    number: int
    digest: int
    ok: bool
    """Whether its status is 200."""


def custom_id_of(number: int, line: bytes) -> str:
    """Name of a line in the output: its ``custom_id``, or ``line-N`` if it has none."""
    try:
        return _FIELDS.decode(line).custom_id or f"line-{number}"
    except UNREADABLE:
        return f"line-{number}"


def request_of(number: int, line: bytes) -> LineRequest | LineProblem:
    """The request of a line, counted from 1: ``{"custom_id", "method", "url", "body"}``, or a body alone."""
    named = f"line-{number}"
    try:
        fields = _FIELDS.decode(line)
    except UNREADABLE as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return LineProblem(named, "invalid_line", f"line {number} is no request: {reason}")
    named = fields.custom_id or named
    if fields.method not in (None, "POST"):
        message = f"method is {fields.method!r}; send POST"
        return LineProblem(named, "invalid_method", message)
    url, body = fields.url, fields.body
    if not bytes(body) and url is None:
        bodies = zip(BODIES, (fields.messages, fields.prompt, fields.input), strict=True)
        routes = [BODIES[name] for name, value in bodies if bytes(value)]
        if len(routes) == 1:
            url, body = routes[0], Raw(line.strip())
    if url is None or not url.startswith("/") or not url.isprintable():
        known = "there is no url" if url is None else f"url is {url!r}"
        message = f"{known}; give a path such as /v1/chat/completions"
        return LineProblem(named, "invalid_url", message)
    if not bytes(body):
        return LineProblem(named, "invalid_body", "body is missing; give the fields of the request")
    if _streams(bytes(body)):
        message = "stream is true, and a batch has whole answers; leave it out"
        return LineProblem(named, "invalid_body", message)
    return LineRequest(named, url, bytes(body))


def no_request(number: int, line: bytes) -> str | None:
    """Why a line is something else than a request, such as a line of a log; None for a request, though it be a wrong one."""
    request = request_of(number, line)
    if isinstance(request, LineRequest) or request.code not in ("invalid_line", "invalid_url"):
        return None
    return request.message.removeprefix(f"line {number} is no request: ")


def _streams(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        stream = _STREAMED.decode(body).stream
    except UNREADABLE:
        return False  # The route says what is wrong with it.
    return bytes(stream) == b"true"


def result_id(number: int, digest: int) -> str:
    """Names a line of the input by its number and the digest of its bytes."""
    return f"batch_req_{number}_{digest:016x}"


def answer_line(id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output for a request that was asked, whatever its status.

    Args:
        id: By :func:`result_id`.
        custom_id: Of the input's line.
        status: HTTP status.
        request_id: Of the server's application.
        body: One JSON value; NaN and Infinity may be in it, as TensorFlow Serving writes them.
    """
    response = _Response(
        status_code=status, request_id=request_id, body=Raw(_strict(body).replace(b"\n", b" "))
    )
    return _written(_Result(id=id, custom_id=custom_id, response=response))


def _strict(body: bytes) -> bytes:
    """The same value as JSON that every reader takes."""
    if b"NaN" not in body and b"Infinity" not in body:
        return body
    return encode(with_infinities(json.loads(body), b"1e999"))


def problem_line(id: str, problem: LineProblem) -> bytes:
    """A line of the output for one of the input that could not be asked."""
    error = _Problem(code=problem.code, message=problem.message)
    return _written(_Result(id=id, custom_id=problem.custom_id, error=error))


def answered_line(line: bytes) -> LineAnswered | None:
    """The line of the input that a line of an output answers; None if no batch of this package wrote it."""
    try:
        result = _RESULT.decode(line)
    except UNREADABLE:
        return None
    match = _ID.fullmatch(result.id)
    if match is None:
        return None
    ok = result.response is not None and result.response.status_code == 200
    return LineAnswered(int(match["line"]), int(match["digest"], 16), ok)


def _written(result: _Result) -> bytes:
    return msgspec.json.encode(result) + b"\n"
