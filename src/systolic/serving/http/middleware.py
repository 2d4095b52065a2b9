"""ASGI middleware: request ids, authentication, rate and size limits, draining, and the access log."""

import asyncio
import re
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from systolic.core.errors import SystolicError
from systolic.serving.http.app import label
from systolic.serving.http.keys import Keys
from systolic.serving.http.protocol import ProblemError, problem_of
from systolic.serving.http.state import CONTEXT, RequestContext, ServerState, new_id, too_large
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
        request_id = headers.get(b"x-request-id", "")
        context = scope[CONTEXT] = RequestContext(
            id=request_id if _ID.fullmatch(request_id) else new_id("req"),
            receive=receive,
            send=send,
            body_left=self.state.limits.body_bytes,
            body_seconds=self.state.limits.body_seconds,
        )
        self.state.in_flight += 1
        with self.traces.request(scope, headers, context) as span:
            try:
                await self._answer(scope, headers, context)
            finally:
                context.held.close()
                self.state.in_flight -= 1
                self._log(scope, context)
                span.ended(context.status, context)

    async def _answer(
        self, scope: Scope, headers: MutableMapping[bytes, str], context: RequestContext
    ) -> None:
        try:
            self._admit(scope["path"], headers, context)
            await self.app(scope, context.receive_body, context.send_answer)
        except ProblemError as problem:
            await context.send_problem(problem, scope["path"])
        except SystolicError as error:
            await context.send_problem(problem_of(error), scope["path"])
        except asyncio.CancelledError:
            context.gone = True
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self.log.write("failed", id=context.id, path=scope["path"], error=reason)
            problem = ProblemError(
                status=500, message=f"this server failed; its log names request {context.id}"
            )
            await context.send_problem(problem, scope["path"])

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
            raise too_large(limits.body_bytes)
        context.deadline_seconds = _deadline(
            headers.get(b"x-request-timeout"), limits.deadline_seconds
        )

    def _identify(
        self, keys: Keys, headers: MutableMapping[bytes, str], context: RequestContext
    ) -> None:
        scheme, _, secret = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = headers.get(b"x-api-key", "")
        key = keys.find(secret.strip(), self.log.warn)
        if key is None:
            problem = "the API key is not known" if secret else "no API key was given"
            raise ProblemError(
                status=401,
                message=f"{problem}; send one as Authorization: Bearer KEY",
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

    def _log(self, scope: Scope, context: RequestContext) -> None:
        metrics = self.state.metrics
        route = label(self.app, scope)
        seconds = time.monotonic() - context.begun
        status = "499" if context.gone else str(context.status)
        metrics.http_requests.labels(route, status).inc()
        metrics.http_seconds.labels(route).observe(seconds)
        if context.gone:
            metrics.cancelled.labels(route).inc()
        if scope["path"] in OPEN:
            return
        counted = context.prompt_tokens is not None
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
            prompt_tokens=context.prompt_tokens,
            completion_tokens=context.completion_tokens if counted else None,
            cached_tokens=context.cached_tokens if counted else None,
            examples=context.examples if context.examples > 1 else None,
            choices=context.choices if context.choices > 1 else None,
            finish=context.finish,
            prompt=context.prompt if self.state.log_prompts else None,
        )


def _deadline(header: str | None, most: float | None) -> float | None:
    """Seconds that a request may take: what its header asks for, at most the server's.

    Raises:
        ProblemError: the header is no number of seconds.
    """
    if header is None:
        return most
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ProblemError(
            status=400, message="X-Request-Timeout is no number of seconds above 0; give one"
        )
    return seconds if most is None else min(seconds, most)
