"""The application: routes, errors, the description of both, and the middleware before them: request ids, authentication, limits, draining and the access log."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from systolic.core.errors import SystolicError
from systolic.serving.http import inference, listing, tensorflow
from systolic.serving.http.chat import ChatFields, chat_completions
from systolic.serving.http.completions import CompletionFields, completions
from systolic.serving.http.embeddings import (
    EmbeddingFields,
    RerankFields,
    ScoreFields,
    embeddings,
    rerank,
    score,
)
from systolic.serving.http.keys import Keys
from systolic.serving.http.protocol import Dialect, ProblemError, encode, problem_of
from systolic.serving.http.responses_api import ResponseFields, responses
from systolic.serving.http.state import CONTEXT, RequestContext, ServerState, new_id, too_large
from systolic.serving.http.telemetry import EventLog, Traces
from systolic.serving.http.transcriptions import FORMATS, transcriptions
from systolic.serving.registry import NAME_IN_PATH

Handler = Callable[[Request, ServerState], Awaitable[Response]]
FORM = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file"],
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "model": {"type": "string"},
                "language": {"type": "string"},
                "response_format": {"type": "string", "enum": list(FORMATS)},
                "stream": {"type": "string", "enum": ["true", "false"]},
            },
        }
    }
}
PREDICT = {
    "application/json": {
        "schema": {
            "type": "object",
            "properties": {
                "signature_name": {"type": "string"},
                "instances": {"type": "array", "items": {}},
                "inputs": {},
            },
        }
    }
}
MODEL = "/v2/models/{name:model}"
VERSION = f"{MODEL}/versions/{{version}}"
REPOSITORY = "/v2/repository/models/{name:model}"
_SIGNS = str.maketrans("/{}:", "____")
OPEN = ("/", "/health", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics")
"""Paths that need no key and answer while the server ends."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Path(NamedTuple):
    """One route."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    """Type of the JSON body, or a schema of another media type."""


class NameConvertor(Convertor[str]):
    """Names of models in paths, which may have several parts: ``org/model``."""

    regex = NAME_IN_PATH

    def convert(self, value: str) -> str:
        """The name."""
        return value

    def to_string(self, value: str) -> str:
        """The name."""
        return value


register_url_convertor("model", NameConvertor())
PATHS: Sequence[Path] = (
    Path("GET", "/", listing.page, "A page for trying the models"),
    Path("GET", "/health", listing.health, "200 where every model answers"),
    Path("GET", "/readyz", listing.health, "The same"),
    Path("GET", "/livez", listing.liveness, "200 unless a model failed or hangs"),
    Path("GET", "/metrics", listing.metrics, "Prometheus metrics"),
    Path("GET", "/version", listing.version_of, "Version of the server"),
    Path("GET", "/v1/models", listing.models, "All models"),
    Path(
        "GET", "/v1/models/{rest:path}", tensorflow.model, "One model, its versions, its signatures"
    ),
    Path(
        "POST",
        "/v1/models/{rest:path}",
        tensorflow.predict,
        "TensorFlow Serving's predict",
        PREDICT,
    ),
    Path("POST", "/v1/completions", completions, "Continues texts", CompletionFields),
    Path("POST", "/v1/chat/completions", chat_completions, "Answers chats", ChatFields),
    Path("POST", "/v1/responses", responses, "Answers chats, as items", ResponseFields),
    Path("POST", "/v1/embeddings", embeddings, "Vectors of texts", EmbeddingFields),
    *(
        Path("POST", path, score, "Scores of pairs of texts", ScoreFields)
        for path in ("/v1/score", "/score")
    ),
    *(
        Path("POST", path, rerank, "Documents by a query, best first", RerankFields)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    Path("POST", "/v1/audio/transcriptions", transcriptions, "Speech to text", FORM),
    Path("POST", "/tokenize", listing.tokenize, "Ids of a text", listing.TokenizeFields),
    Path("POST", "/detokenize", listing.detokenize, "Text of ids", listing.DetokenizeFields),
    Path("GET", "/tokenizer_info", listing.tokenizer_info, "Marks and template of a tokenizer"),
    Path("GET", "/v2", inference.server, "The server"),
    Path("GET", "/v2/health/live", inference.live, "Whether it is alive"),
    Path("GET", "/v2/health/ready", inference.ready, "Whether it is ready"),
    Path("POST", "/v2/repository/index", inference.index, "All models with their states"),
    Path("POST", f"{REPOSITORY}/load", inference.load, "Makes a model ready"),
    Path("POST", f"{REPOSITORY}/unload", inference.unload, "Takes a model out"),
    Path(
        "POST",
        "/v1/load_lora_adapter",
        inference.load_adapter,
        "Makes an adapter ready",
        inference.AdapterFields,
    ),
    Path(
        "POST",
        "/v1/unload_lora_adapter",
        inference.unload_adapter,
        "Takes an adapter out",
        inference.AdapterFields,
    ),
    Path("GET", MODEL, inference.metadata, "Inputs and outputs"),
    Path("GET", VERSION, inference.metadata, "Inputs and outputs"),
    Path("GET", f"{MODEL}/ready", inference.model_ready, "Whether it is ready"),
    Path("GET", f"{VERSION}/ready", inference.model_ready, "Whether it is ready"),
    Path("POST", f"{MODEL}/infer", inference.infer, "Outputs of inputs", inference.InferFields),
    Path("POST", f"{VERSION}/infer", inference.infer, "Outputs of inputs", inference.InferFields),
)


def application(state: ServerState) -> FastAPI:
    """All routes over the models of a server; a :class:`~systolic.serving.http.app.RequestMiddleware` goes around it."""
    app = FastAPI(
        title="Systolic",
        version=version("systolic"),
        docs_url=None,  # It loads scripts from elsewhere.
        redoc_url=None,
        telemetry={"tracing": False},  # The middleware's span is of the whole request.
    )
    bodies = [path.body for path in PATHS if isinstance(path.body, type)]
    _, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    for path in PATHS:
        endpoint = _endpoint(path.handler, state)
        app.add_api_route(
            path.path,
            endpoint,
            methods=[path.method],
            summary=path.summary,
            operation_id=f"{path.method.lower()}{path.path.translate(_SIGNS)}",
            response_class=Response,
            openapi_extra=_described(path),
        )
        if path.method == "GET":  # The web server leaves the body of the answer out.
            app.add_api_route(path.path, endpoint, methods=["HEAD"], include_in_schema=False)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi
    for kind in (ProblemError, SystolicError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer)
    return app


def label(app: FastAPI, scope: Scope) -> str:
    """Label of a request's path in metrics and the log; ``unknown`` for a path that does not exist."""
    for route in app.routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            own = route.path_format.startswith(tensorflow.ROUTES)
            return tensorflow.label(scope["path"]) if own else route.path_format
    return "unknown"


def _endpoint(handler: Handler, state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, state)

    return endpoint


def _described(path: Path) -> dict[str, Any]:
    """Parameters of the path and schema of the body, which FastAPI can't see in a handler."""
    extra: dict[str, Any] = {}
    names = [part.split("}")[0].split(":")[0] for part in path.path.split("{")[1:]]
    if names:
        extra["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if isinstance(path.body, type):
        schema = {"$ref": f"#/components/schemas/{path.body.__name__}"}
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    elif path.body is not None:
        extra["requestBody"] = {"required": True, "content": path.body}
    return extra


async def _answer(request: Request, error: Exception) -> Response:
    """The error's answer, in the form of the path's protocol."""
    if isinstance(error, ProblemError):
        problem = error
    elif isinstance(error, SystolicError):
        problem = problem_of(error)
    elif isinstance(error, HTTPException):
        allow = (error.headers or {}).get("Allow")
        messages = {404: "there is no such path", 405: f"the path takes {allow}"}
        message = messages.get(error.status_code, str(error.detail))
        problem = ProblemError(status=error.status_code, message=message, allow=allow)
    elif isinstance(error, ClientDisconnect):
        problem = ProblemError(status=499, message="the client left")
    else:
        problem = ProblemError(status=500, message="this server failed; its log says why")
    body = encode(problem.body(Dialect.of(request.url.path)))
    return Response(body, problem.status, problem.headers(), media_type="application/json")


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
