"""The application: routes, errors, and the description of both."""

from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from systolic.core.errors import SystolicError
from systolic.serving.http import inference, listing, tensorflow
from systolic.serving.http.chat import ChatFields, chat_completions
from systolic.serving.http.completions import CompletionFields, completions
from systolic.serving.http.embeddings import EmbeddingFields, embeddings
from systolic.serving.http.protocol import Dialect, ProblemError, encode, problem_of
from systolic.serving.http.state import ServerState
from systolic.serving.http.transcriptions import FORMATS, transcriptions
from systolic.serving.registry import NAME_IN_PATH

Handler = Callable[[Request, ServerState], Awaitable[Response]]


class Path(NamedTuple):
    """One route."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    """Type of the JSON body, or a schema of another media type."""


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
MODEL = "/v2/models/{name:model}"
VERSION = f"{MODEL}/versions/{{version}}"
REPOSITORY = "/v2/repository/models/{name:model}"
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
    Path("POST", "/v1/embeddings", embeddings, "Vectors of texts", EmbeddingFields),
    Path("POST", "/v1/audio/transcriptions", transcriptions, "Speech to text", FORM),
    Path("POST", "/tokenize", listing.tokenize, "Ids of a text", listing.TokenizeFields),
    Path("POST", "/detokenize", listing.detokenize, "Text of ids", listing.DetokenizeFields),
    Path("GET", "/v2", inference.server, "The server"),
    Path("GET", "/v2/health/live", inference.live, "Whether it is alive"),
    Path("GET", "/v2/health/ready", inference.ready, "Whether it is ready"),
    Path("POST", "/v2/repository/index", inference.index, "All models with their states"),
    Path("POST", f"{REPOSITORY}/load", inference.load, "Makes a model ready"),
    Path("POST", f"{REPOSITORY}/unload", inference.unload, "Takes a model out"),
    Path("GET", MODEL, inference.metadata, "Inputs and outputs"),
    Path("GET", VERSION, inference.metadata, "Inputs and outputs"),
    Path("GET", f"{MODEL}/ready", inference.model_ready, "Whether it is ready"),
    Path("GET", f"{VERSION}/ready", inference.model_ready, "Whether it is ready"),
    Path("POST", f"{MODEL}/infer", inference.infer, "Outputs of inputs", inference.InferFields),
    Path("POST", f"{VERSION}/infer", inference.infer, "Outputs of inputs", inference.InferFields),
)


def application(state: ServerState) -> FastAPI:
    """All routes over the models of a server; a :class:`~systolic.serving.http.middleware.RequestMiddleware` goes around it."""
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


_SIGNS = str.maketrans("/{}:", "____")


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
        if request.url.path == "/v1/responses":
            message = "/v1/responses is not served; ask /v1/chat/completions"
        problem = ProblemError(status=error.status_code, message=message, allow=allow)
    elif isinstance(error, ClientDisconnect):
        problem = ProblemError(status=499, message="the client left")
    else:
        problem = ProblemError(status=500, message="this server failed; its log says why")
    body = encode(problem.body(Dialect.of(request.url.path)))
    return Response(body, problem.status, problem.headers(), media_type="application/json")
