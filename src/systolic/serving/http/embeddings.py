"""``POST /v1/embeddings``, ``/v1/score``, ``/v1/rerank``: vectors of texts, and how near they are."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.protocol import Count, Truncation, Whole, bad, encode, read
from systolic.serving.http.responses import answered, objects, off_loop
from systolic.serving.http.state import RequestContext, ServerState, usage
from systolic.serving.registry import ServedBatch
from systolic.serving.request import ModelKind

Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ids = list[Index]
Texts = str | list[str]


class EmbeddingFields(Struct, kw_only=True):
    """A request of ``/v1/embeddings``."""

    input: str | list[str | Index | Ids]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


class ScoreFields(Struct, kw_only=True):
    """A request of ``/v1/score``: two sides of texts, under one of vLLM's pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Texts of both sides, as many of either: one text is scored against each of the other side.

        Raises:
            ProblemError: a side is missing, empty, or neither one text nor as many as the other.
        """
        pairs = (
            ("text_1", "text_2"),
            ("queries", "documents"),
            ("queries", "items"),
            ("data_1", "data_2"),
        )
        for names in pairs:
            left, right = (getattr(self, name) for name in names)
            if left is None or right is None:
                continue
            left, right = ([side] if isinstance(side, str) else side for side in (left, right))
            for name, side in zip(names, (left, right), strict=True):
                if not side:
                    raise bad(f"{name} is empty; send a text or several", name)
            if len(left) not in (1, len(right)):
                raise bad(
                    f"{names[0]} has {len(left)} texts and {names[1]} {len(right)}; send one text, or as many as in {names[1]}",
                    names[0],
                )
            return left * (len(right) // len(left)), right
        raise bad("text_1 and text_2 are missing; send both", "text_1")


class RerankFields(Struct, kw_only=True):
    """A request of ``/v1/rerank``."""

    query: str
    documents: Texts
    model: str | None = None
    top_n: Whole | None = None
    """Documents of the answer, the best; 0 for all."""
    truncate_prompt_tokens: Truncation | None = None


async def embeddings(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as the parts that it calls."""
    fields = await read(request, EmbeddingFields)
    served = encoder_of(request, state, fields.model)
    if state.log_prompts:
        RequestContext.of(request).prompt = str(fields.input)
    texts = _texts(fields.input)
    vectors, counts = await _vectors(request, state, served, texts, "input", fields)
    vectors, tokens = _cut(vectors, fields.dimensions), int(np.sum(counts))
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": number, "embedding": _written(row, fields)}
            for number, row in enumerate(vectors)
        ],
        "model": served.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Response(encode(answer), media_type="application/json")


async def score(request: Request, state: ServerState) -> Response:
    """``POST /v1/score``: cosines of pairs of texts, as vLLM scores them by a model of embeddings."""
    fields = await read(request, ScoreFields)
    served = encoder_of(request, state, fields.model)
    left, right = fields.sides()
    scores, tokens = await _scores(request, state, served, left, right, "text_2", fields)
    context = RequestContext.of(request)
    context.answer("score")
    answer = {
        "id": context.answer_id,
        "object": "list",
        "created": context.created,
        "model": served.name,
        "data": [
            {"index": number, "object": "score", "score": value}
            for number, value in enumerate(scores)
        ],
        "usage": usage(tokens, 0),
    }
    return Response(encode(answer), media_type="application/json")


async def rerank(request: Request, state: ServerState) -> Response:
    """``POST /v1/rerank``: documents by their score with a query, best first, as vLLM, Jina and Cohere answer."""
    fields = await read(request, RerankFields)
    served = encoder_of(request, state, fields.model)
    documents = [fields.documents] if isinstance(fields.documents, str) else fields.documents
    if not documents:
        raise bad("documents is empty; send a text or several", "documents")
    query = [fields.query] * len(documents)
    scores, tokens = await _scores(request, state, served, query, documents, "documents", fields)
    context = RequestContext.of(request)
    context.answer("rerank")
    ranked = sorted(range(len(documents)), key=lambda number: -scores[number])
    results = [
        {"index": at, "document": {"text": documents[at]}, "relevance_score": scores[at]}
        for at in ranked[: fields.top_n or None]
    ]
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"id": context.answer_id, "model": served.name, "usage": used, "results": results}
    return Response(encode(answer), media_type="application/json")


def encoder_of(request: Request, state: ServerState, name: str | None) -> ServedBatch:
    """The model of embeddings of a request; errors as :meth:`~systolic.serving.http.state.ServerState.use`.

    Raises:
        ProblemError: also where the model makes no vectors of texts.
    """
    served = state.batch(request, name)
    if served.model.kind is not ModelKind.embedding:
        raise bad(
            f"{served.name} is a model of kind {served.model.kind.value} and makes no vectors of texts",
            "model",
        )
    return served


async def _scores(
    request: Request,
    state: ServerState,
    served: ServedBatch,
    left: Sequence[str],
    right: Sequence[str],
    param: str,
    fields: ScoreFields | RerankFields,
) -> tuple[list[float], int]:
    """Cosine of each pair of texts, and the tokens of all pairs; every text is read once."""
    several = list(dict.fromkeys([*left, *right]))
    if state.log_prompts:
        RequestContext.of(request).prompt = str(several)
    vectors, counts = await _vectors(request, state, served, _texts(several, param), param, fields)
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    place = {text: number for number, text in enumerate(several)}
    at, beside = ([place[text] for text in side] for side in (left, right))
    products = np.sum(vectors[at] * vectors[beside], axis=1)
    return products.tolist(), int(np.sum(counts[at]) + np.sum(counts[beside]))


async def _vectors(
    request: Request,
    state: ServerState,
    served: ServedBatch,
    texts: list[Any],
    param: str,
    fields: EmbeddingFields | ScoreFields | RerankFields,
) -> tuple[np.ndarray, np.ndarray]:
    """Vectors f32[texts, dims] of texts, cut to the tokens that the request keeps, and the tokens of each."""
    if len(texts) > state.limits.prompts:
        raise bad(
            f"{param} has {len(texts)} texts; at most {state.limits.prompts} are taken at once",
            param,
        )
    if fields.truncate_prompt_tokens is not None:
        texts = await _truncated(served, texts, fields.truncate_prompt_tokens)
    outputs = await answered(request, served, {"text": objects(texts)})
    return np.asarray(outputs["embedding"], np.float32), np.asarray(outputs["tokens"])


async def _truncated(served: ServedBatch, texts: list[Any], kept: int) -> list[Any]:
    """Ids of texts, at most so many, those around a text among them.

    Raises:
        ProblemError: the model does not read as many.
    """
    reader = served.model.reader
    assert reader is not None
    if kept > reader.most:
        raise bad(
            f"truncate_prompt_tokens is {kept}, and the model reads up to {reader.most}; ask for {reader.most} or less",
            "truncate_prompt_tokens",
        )
    most = reader.most if kept < 0 else kept
    plain = [part.decode() for part in texts if isinstance(part, bytes)]
    size = sum(map(len, plain))
    ids = iter(await off_loop(size, lambda: reader.ids(plain, most)) if plain else [])
    return [next(ids) if isinstance(part, bytes) else part[:most] for part in texts]


def _texts(content: str | Sequence[str | int | Ids], param: str = "input") -> list[Any]:
    """Each text as bytes, or as an int array of its ids."""
    if isinstance(content, str):
        several: list[Any] = [content]
    elif content and all(isinstance(part, int) for part in content):
        several = [content]
    else:
        several = list(content)
    if not several or any(isinstance(part, int) or not len(part) for part in several):
        raise bad(
            f"{param} is empty, has an empty text, or mixes ids and texts; send texts or lists of ids",
            param,
        )
    return [
        part.encode() if isinstance(part, str) else np.array(part, np.int32) for part in several
    ]


def _cut(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first numbers of each vector [n, dims], of the length 1 again, as OpenAI shortens them.

    Raises:
        ProblemError: there are fewer.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise bad(
            f"dimensions is {dimensions}; the model's vectors have {vectors.shape[1]}", "dimensions"
        )
    short = vectors[:, :dimensions]
    return short / np.maximum(np.linalg.norm(short, axis=1, keepdims=True), 1e-12)


def _written(row: np.ndarray, fields: EmbeddingFields) -> list[float] | str:
    if fields.encoding_format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return row.tolist()
