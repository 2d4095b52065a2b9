"""What every request passes: id, keys, rates, sizes, the end of the server; and what is noted of its answer."""

import asyncio
import re
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from systolic.core.errors import SystolicError
from systolic.serving.http.app import label
from systolic.serving.http.keys import Keys
from systolic.serving.http.protocol import Dialect, ProblemError, encode, problem_of
from systolic.serving.http.state import CONTEXT, RequestContext, ServerState, new_id
from systolic.serving.http.telemetry import EventLog, Traces

OPEN = ("/", "/health", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics")
"""Paths that need no key and answer while the server ends."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(kw_only=True, eq=False)
class RequestMiddleware:
    """An ASGI application around that of the routes.

    Every request gets one answer in its protocol's form, whatever is raised inside.
    """

    app: FastAPI
    state: ServerState
    log: EventLog
    traces: Traces
    keys: Keys | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        context = RequestContext(id=given if _ID.fullmatch(given) else new_id("req"))
        scope[CONTEXT] = context
        answer = _Exchange(send=send, context=context, receive=receive)
        answer.body_left = self.state.limits.body_bytes
        answer.body_end = time.monotonic() + self.state.limits.body_seconds
        self.state.in_flight += 1
        with self.traces.request(scope, headers, context) as span:
            try:
                await self._answer(scope, headers, answer)
            finally:
                context.held.close()
                self.state.in_flight -= 1
                self._note(scope, answer)
                span.ended(answer.status, context)

    async def _answer(
        self, scope: Scope, headers: MutableMapping[bytes, str], answer: "_Exchange"
    ) -> None:
        try:
            self._admit(scope["path"], headers, answer.context)
            await self.app(scope, answer.receiving, answer.sending)
        except ProblemError as problem:
            await answer.problem(problem, scope["path"])
        except SystolicError as error:
            await answer.problem(problem_of(error), scope["path"])
        except asyncio.CancelledError:
            answer.context.gone = True
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self.log.write("failed", id=answer.context.id, path=scope["path"], error=reason)
            problem = ProblemError(
                status=500, message=f"this server failed; its log names request {answer.context.id}"
            )
            await answer.problem(problem, scope["path"])

    def _admit(
        self, path: str, headers: MutableMapping[bytes, str], context: RequestContext
    ) -> None:
        """Refuses what needs no reading.

        Raises:
            ProblemError: no or a wrong key, a rate that is used up, a body that is too large, an encoding that is not read, or the server ends.
        """
        limits = self.state.limits
        if path in OPEN:
            return
        if self.state.draining:
            raise self.state.ending()
        if self.keys is not None:
            self._identify(self.keys, headers, context)
        if self.state.in_flight > limits.requests:
            raise ProblemError(
                status=503,
                message=f"{limits.requests} requests are answered already; come back later",
                code="overloaded",
                retry_seconds=1.0,
            )
        if headers.get(b"content-encoding", "identity") != "identity":
            raise ProblemError(
                status=415, message="compressed bodies are not read; send the body as it is"
            )
        length = headers.get(b"content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        context.deadline_seconds = _deadline(
            headers.get(b"x-request-timeout"), limits.deadline_seconds
        )

    def _identify(
        self, keys: Keys, headers: MutableMapping[bytes, str], context: RequestContext
    ) -> None:
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get(b"x-api-key", "")
        key = keys.find(given.strip(), self.log.warn)
        if key is None:
            told = "the API key is not known" if given else "no API key was given"
            raise ProblemError(
                status=401,
                message=f"{told}; send one as Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        context.key = key.name
        context.rates, now = keys.rates(key), time.monotonic()
        waits = {what: bucket.wait_seconds(now) for what, bucket in context.rates.items()}
        what = max(waits, key=waits.__getitem__, default="")
        if waits.get(what):
            raise ProblemError(
                status=429,
                message=f"key {key.name} has used up its {what}; come back in {waits[what]:.1f} s",
                code="rate_limit_exceeded",
                retry_seconds=waits[what],
            )
        if "requests" in context.rates:
            context.rates["requests"].take(now)

    def _note(self, scope: Scope, answer: "_Exchange") -> None:
        context, metrics = answer.context, self.state.metrics
        route = label(self.app, scope)
        seconds = time.monotonic() - context.begun
        status = "499" if context.gone else str(answer.status)
        metrics.http_requests.labels(route, status).inc()
        metrics.http_seconds.labels(route).observe(seconds)
        if context.gone:
            metrics.cancelled.labels(route).inc()
        if scope["path"] in OPEN:
            return
        usage = context.usage
        self.log.write(
            "request",
            id=context.id,
            method=scope["method"],
            route=route,
            status=int(status),
            key=context.key,
            model=context.model,
            seconds=round(seconds, 6),
            first_byte_seconds=context.first_byte_seconds,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            examples=context.examples if context.examples > 1 else None,
            choices=context.choices if context.choices > 1 else None,
            finish=context.finish,
            prompt=context.prompt if self.state.log_prompts else None,
        )


@dataclass(kw_only=True, eq=False)
class _Exchange:
    """The two directions of one request."""

    send: Send
    receive: Receive
    context: RequestContext
    status: int = 0
    body_left: int = 0
    body_end: float = 0.0
    whole: bool = False
    """Whether the body has arrived."""
    cut: bool = False
    """Whether the rest of the body is not read, so that the connection ends with the answer."""
    told: bool = False
    """Whether the whole answer was sent; to leave then is no cancel."""
    _headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def receiving(self) -> Message:
        """The next part of the body, as long as it is not too large nor too slow; then the client's leaving."""
        if self.whole:
            message = await self.receive()
        else:
            try:
                async with asyncio.timeout(self.body_end - time.monotonic()):
                    message = await self.receive()
            except TimeoutError as error:
                self.cut = True
                raise ProblemError(
                    status=408, message="the body did not arrive in time; send it at once"
                ) from error
        if message["type"] == "http.disconnect":
            self.context.gone |= not (self.told or self.context.finish)
            return message
        self.body_left -= len(message.get("body", b""))
        if self.body_left < 0:
            self.cut = True
            raise _too_large(None)
        self.whole = not message.get("more_body", False)
        return message

    async def sending(self, message: Message) -> None:
        """Hands a part of the answer on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {"x-request-id": self.context.id}
            if self.cut:
                own["connection"] = "close"
            for what, bucket in self.context.rates.items():
                own.update(bucket.headers(what))
            pairs = [(name.encode(), value.encode()) for name, value in own.items()]
            message["headers"] = [*message.get("headers", []), *pairs]
        elif self.context.first_byte_seconds is None:
            self.context.first_byte_seconds = round(time.monotonic() - self.context.begun, 6)
        await self.send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.told = True

    async def problem(self, problem: ProblemError, path: str) -> None:
        """Sends an error where nothing was sent before; else the answer stays cut off."""
        if self.status:
            return
        raw = encode(problem.body(Dialect.of(path)))
        headers: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": str(len(raw)),
            **problem.headers(),
        }
        if not (self.whole or self.cut):
            headers["connection"] = "close"  # What is left of the body is not read.
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        with suppress(OSError):
            await self.sending(
                {"type": "http.response.start", "status": problem.status, "headers": pairs}
            )
            await self.sending({"type": "http.response.body", "body": raw})


def _too_large(most: int | None) -> ProblemError:
    limit = "" if most is None else f" of {most} bytes"
    return ProblemError(
        status=413, message=f"the body is larger than this server's limit{limit}; send less"
    )


def _deadline(asked: str | None, most: float | None) -> float | None:
    """Seconds that a request may take: what its header asks for, at most the server's.

    Raises:
        ProblemError: the header is no number of seconds.
    """
    if asked is None:
        return most
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ProblemError(
            status=400, message="X-Request-Timeout is no number of seconds above 0; give one"
        )
    return seconds if most is None else min(seconds, most)
