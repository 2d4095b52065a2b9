"""``POST /v1/embeddings``: vectors of texts."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.protocol import Count, bad, encode, read
from systolic.serving.http.responses import answered
from systolic.serving.http.state import RequestContext, ServerState
from systolic.serving.request import ModelKind

Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ids = list[Index]


class EmbeddingFields(Struct, kw_only=True):
    """A request of ``/v1/embeddings``."""

    input: str | list[str | Index | Ids]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


async def embeddings(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as the parts that it calls."""
    fields = await read(request, EmbeddingFields)
    served = state.batch(request, fields.model)
    if served.model.kind is not ModelKind.embedding:
        raise bad(
            f"{served.name} is a model of kind {served.model.kind.value} and makes no vectors of texts",
            "model",
        )
    texts = _texts(fields.input)
    if len(texts) > state.limits.prompts:
        raise bad(
            f"input has {len(texts)} texts; at most {state.limits.prompts} are taken at once",
            "input",
        )
    if state.log_prompts:
        RequestContext.of(request).prompt = str(fields.input)
    rows = np.empty(len(texts), object)
    for number, text in enumerate(texts):
        rows[number] = text
    outputs = await answered(request, served, {"text": rows})
    vectors = _cut(np.asarray(outputs["embedding"], np.float32), fields.dimensions)
    tokens = int(np.sum(outputs["tokens"]))
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


def _texts(content: str | Sequence[str | int | Ids]) -> list[Any]:
    """Each text as bytes, or as an int array of its ids."""
    if isinstance(content, str):
        several: list[Any] = [content]
    elif content and all(isinstance(part, int) for part in content):
        several = [content]
    else:
        several = list(content)
    if not several or any(isinstance(part, int) or not len(part) for part in several):
        raise bad(
            "input is empty, has an empty text, or mixes ids and texts; send texts or lists of ids",
            "input",
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
