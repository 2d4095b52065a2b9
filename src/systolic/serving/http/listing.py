"""Models that are served, their health and tokenizers, and a page for trying them: ``/``, ``/v1/models``, ``/health``, ``/tokenize``."""

from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.http.chat import checked_messages, rendered
from systolic.serving.http.completions import checked_ids
from systolic.serving.http.protocol import bad, encode, read, refuse
from systolic.serving.http.responses import off_loop, token_ids
from systolic.serving.http.state import ServerState
from systolic.serving.registry import Served, ServedBatch, ServedText

if TYPE_CHECKING:
    from systolic.inference.predictor import TextReader

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(encode(value), status_code=status, media_type="application/json")


def described(served: Served) -> dict[str, Any]:
    """A model as OpenAI lists it, with its context as vLLM adds it."""
    about = {**entry(served.name, served.created), "ready": served.ready}
    about |= {"parent": served.base} if served.base else {}
    if isinstance(served, ServedText):
        return {**about, "kind": served.kind, "max_model_len": served.engine.context}
    return {**about, "kind": served.model.kind.value}


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


async def models(request: Request, state: ServerState) -> Response:
    """``GET /v1/models``: those that answer, then those that are opened."""
    del request
    served_models = [described(served) for served in state.registry.newest()]
    names = [model["id"] for model in served_models]
    opening = dict.fromkeys(name for name, _ in state.opening if name not in names)
    return json_response({"object": "list", "data": [*served_models, *map(entry, opening)]})


async def health(request: Request, state: ServerState) -> Response:
    """Empty, 200 where every model answers, else 503."""
    del request
    return Response(status_code=200 if state.ready else 503)


async def liveness(request: Request, state: ServerState) -> Response:
    """Empty, 200 unless a model failed or hangs, else 503."""
    del request
    return Response(status_code=200 if state.alive else 503)


async def metrics(request: Request, state: ServerState) -> Response:
    """Prometheus' text format."""
    del request
    state.metrics.ready.set(state.ready)
    state.metrics.http_in_flight.set(state.in_flight)
    state.metrics.adapters.show(state.registry.everything())
    return Response(state.metrics.page(), media_type=CONTENT_TYPE_LATEST)


async def version_of(request: Request, state: ServerState) -> Response:
    """``GET /version``."""
    del request, state
    return json_response({"version": version("systolic")})


class TokenizeFields(Struct, kw_only=True):
    """A request of ``/tokenize``: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Whether a chat ends where the answer begins; default: it does."""
    add_special_tokens: bool | None = None
    """Whether a text begins with what starts a prompt; default: a text does, and a chat does not, whose template writes it."""
    return_token_strs: bool | None = None
    # Known and not carried out.
    continue_final_message: bool | None = None
    chat_template: str | None = None


class DetokenizeFields(Struct, kw_only=True):
    """A request of ``/detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


async def tokenize(request: Request, state: ServerState) -> Response:
    """``POST /tokenize``."""
    fields = await read(request, TokenizeFields)
    served = state.use(request, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad("send either prompt or messages", "prompt")
    for name in ("continue_final_message", "chat_template"):
        if value := getattr(fields, name):
            refuse(name, value)
    text, special = fields.prompt, fields.add_special_tokens
    if text is None:
        if isinstance(served, ServedBatch):
            raise bad(f"{served.name} knows no chat; send prompt", "messages")
        text = rendered(
            served,
            checked_messages(fields.messages or [], served),
            answer=fields.add_generation_prompt is not False,
            tools=fields.tools or (),
            names=fields.chat_template_kwargs or {},
        )
        special = bool(special)
    tokenizer, most, ids = await _encoded(served, text, special is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
    if fields.return_token_strs:
        answer["token_strs"] = [tokenizer.token(token) for token in ids]
    return json_response(answer)


def _reader(served: ServedBatch) -> "TextReader":
    """The reader of a model.

    Raises:
        ProblemError: it reads no texts.
    """
    if served.model.reader is None:
        kind = served.model.kind.value
        raise bad(f"{served.name} is a model of kind {kind} and reads no texts", "model")
    return served.model.reader


async def _encoded(served: Served, text: str, special: bool) -> tuple[Tokenizer, int, list[int]]:
    """The tokenizer of a model, the tokens that it takes, and those of a text."""
    if isinstance(served, ServedText):
        ids = await token_ids(served.tokenizer, text, special=special)
        return served.tokenizer, served.engine.context, ids
    reader = _reader(served)
    if not special:
        return reader.tokenizer, reader.most, await token_ids(reader.tokenizer, text, special=False)
    (around,) = await off_loop(len(text), lambda: reader.ids([text]))
    return reader.tokenizer, reader.most, around.tolist()


async def detokenize(request: Request, state: ServerState) -> Response:
    """``POST /detokenize``."""
    fields = await read(request, DetokenizeFields)
    served = state.use(request, fields.model)
    own = served if isinstance(served, ServedText) else _reader(served)
    tokenizer = own.tokenizer
    ids = checked_ids(fields.tokens, tokenizer, "tokens")
    text = await off_loop(len(ids) * 4, lambda: tokenizer.decode(ids))
    return json_response({"prompt": text})


async def tokenizer_info(request: Request, state: ServerState) -> Response:
    """``GET /tokenizer_info``, as vLLM has it: the marks that a text may hold, and the template of chats."""
    served = state.use(request, request.query_params.get("model"))
    own = served if isinstance(served, ServedText) else _reader(served)
    tokenizer = own.tokenizer
    marks = {"bos_token": tokenizer.start, "eos_token": tokenizer.end}
    about: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__, "pad_token": None}
    for name, number in marks.items():
        mark = None if number is None else tokenizer.token(number)
        # Bytes have an end that no text holds.
        about[name] = mark if mark and tokenizer.encode(mark) == [number] else None
        about[f"{name}_id"] = number
    if isinstance(served, ServedText):
        template = served.template
        about["chat_template"] = None if template is None else template.text
        about["model_max_length"] = served.engine.context
    return json_response(about)


async def page(request: Request, state: ServerState) -> Response:
    """The page."""
    del request, state
    text = files("systolic.serving.http").joinpath("page.html").read_text()
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
    return Response(text, media_type="text/html", headers=headers)
