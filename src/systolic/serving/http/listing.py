"""What is served, whether it answers, and its tokenizer: ``/v1/models``, health, ``/tokenize``."""

from importlib.metadata import version
from typing import Annotated, Any

from msgspec import Meta, Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.bodies import encode, read
from systolic.serving.http.completions import checked_ids
from systolic.serving.http.desk import Desk
from systolic.serving.http.messages import checked_messages, rendered
from systolic.serving.http.problems import bad
from systolic.serving.http.texts import off_loop, token_ids
from systolic.serving.served import Served, ServedText


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(encode(value), status_code=status, media_type="application/json")


def described(served: Served) -> dict[str, Any]:
    """A model as OpenAI lists it, with its context as vLLM adds it."""
    found = {**entry(served.name, served.created), "ready": served.ready}
    if isinstance(served, ServedText):
        return {**found, "kind": served.kind, "max_model_len": served.engine.context}
    return {**found, "kind": served.model.kind.value}


def entry(name: str, created: int = 0) -> dict[str, Any]:
    """The fields that OpenAI lists of a model; one that is not ready has no more."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "systolic",
        "root": name,
        "parent": None,
        "ready": False,
    }


async def models(request: Request, desk: Desk) -> Response:
    """``GET /v1/models``: those that answer, then those that are opened."""
    del request
    found = [described(one) for one in desk.shelf.newest()]
    names = [one["id"] for one in found]
    opening = dict.fromkeys(name for name, _ in desk.opening if name not in names)
    return json_response({"object": "list", "data": [*found, *map(entry, opening)]})


async def health(request: Request, desk: Desk) -> Response:
    """Empty, 200 where every model answers, else 503."""
    del request
    return Response(status_code=200 if desk.ready else 503)


async def liveness(request: Request, desk: Desk) -> Response:
    """Empty, 200 unless a model failed or hangs, else 503."""
    del request
    return Response(status_code=200 if desk.alive else 503)


async def metrics(request: Request, desk: Desk) -> Response:
    """Prometheus' text format."""
    del request
    desk.metrics.ready.set(desk.ready)
    desk.metrics.http_in_flight.set(desk.in_flight)
    return Response(desk.metrics.page(), media_type=CONTENT_TYPE_LATEST)


async def version_of(request: Request, desk: Desk) -> Response:
    """``GET /version``."""
    del request, desk
    return json_response({"version": version("systolic")})


class TokenizeFields(Struct, kw_only=True):
    """A request of ``/tokenize``: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeFields(Struct, kw_only=True):
    """A request of ``/detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


async def tokenize(request: Request, desk: Desk) -> Response:
    """``POST /tokenize``."""
    fields = await read(request, TokenizeFields)
    served = desk.text(request, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad("send either prompt or messages", "prompt")
    if fields.prompt is not None:
        text, special = fields.prompt, fields.add_special_tokens
    else:
        messages = checked_messages(fields.messages or [], served)
        text, special = rendered(served, messages), False
    ids = await token_ids(served.tokenizer, text, special=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": served.engine.context,
        "tokens": ids,
    }
    if fields.return_token_strs:
        answer["token_strs"] = [served.tokenizer.token(one) for one in ids]
    return json_response(answer)


async def detokenize(request: Request, desk: Desk) -> Response:
    """``POST /detokenize``."""
    fields = await read(request, DetokenizeFields)
    served = desk.text(request, fields.model)
    ids = checked_ids(fields.tokens, served, "tokens")
    text = await off_loop(len(ids) * 4, lambda: served.tokenizer.decode(ids))
    return json_response({"prompt": text})
