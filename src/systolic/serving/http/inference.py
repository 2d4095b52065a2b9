"""The Open Inference Protocol (KServe v2) over REST, with Triton's binary extension."""

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from typing import Any

import numpy as np
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.batch.request import ANY, BYTES, ArraySpec
from systolic.serving.http.completions import CompletionFields, continued
from systolic.serving.http.listing import json_response
from systolic.serving.http.protocol import ProblemError, bad, decode, encode
from systolic.serving.http.responses import answered, objects
from systolic.serving.http.state import ModelControl, Phase, ServerState
from systolic.serving.http.tensors import (
    WireTensor,
    datatype,
    described,
    named,
    read_tensors,
    to_bytes,
    to_json,
)
from systolic.serving.registry import Served, ServedText

HEADER = "inference-header-content-length"
TEXT_INPUT, TEXT_OUTPUT = (
    ArraySpec(name=name, dtype=BYTES, shape=(ANY,)) for name in ("text_input", "text_output")
)
"""Inputs and outputs of a language model, as Triton's backends for such models name them."""
NOT_HERE = ("stream", "stream_options", "n", "echo", "logprobs", "model", "prompt")
"""Fields of completions that this protocol has no place for in its answers, or elsewhere in its requests."""


class WireOutput(Struct, kw_only=True):
    """An output that a request asks for."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


class InferFields(Struct, kw_only=True):
    """A request of ``/v2/models/NAME/infer``."""

    inputs: list[WireTensor]
    id: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: list[WireOutput] | None = None


class IndexFields(Struct, kw_only=True):
    """A request of ``/v2/repository/index``."""

    ready: bool = False


class ControlFields(Struct, kw_only=True):
    """A request of ``/v2/repository/models/NAME/load`` or ``/unload``."""

    parameters: dict[str, Any] = field(default_factory=dict)


async def live(request: Request, state: ServerState) -> Response:
    """``GET /v2/health/live``."""
    del request
    return json_response({"live": state.alive}, 200 if state.alive else 503)


async def ready(request: Request, state: ServerState) -> Response:
    """``GET /v2/health/ready``."""
    del request
    up = state.ready
    models = [
        {"name": one.name, "version": str(one.version), "ready": one.phase is Phase.ready}
        for one in state.states()
    ]
    return json_response({"ready": up, "models": models}, 200 if up else 503)


async def server(request: Request, state: ServerState) -> Response:
    """``GET /v2``."""
    del request, state
    return json_response(
        {
            "name": "systolic",
            "version": installed("systolic"),
            "extensions": ["binary_tensor_data", "model_repository"],
        }
    )


async def index(request: Request, state: ServerState) -> Response:
    """``POST /v2/repository/index``: all models with their states."""
    raw = await request.body()
    only_ready = bool(raw) and bool(decode(raw, IndexFields).ready)
    found = [
        {
            "name": one.name,
            "version": str(one.version),
            "state": one.phase.triton,
            "reason": one.reason,
        }
        for one in state.states()
        if one.phase is Phase.ready or not only_ready
    ]
    if not only_ready:
        found += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}
            for name in sorted(state.unloaded)
        ]
    return json_response(found)


async def load(request: Request, state: ServerState) -> Response:
    """``POST /v2/repository/models/NAME/load``."""
    raw = await request.body()
    given = decode(raw, ControlFields).parameters if raw else {}
    if given:
        raise bad(f"{next(iter(given))} is not taken; models are loaded as their folders have them")
    name = request.path_params["name"]
    done = await asyncio.to_thread(_control(state).load, name)
    return json_response(
        {
            "name": name,
            "loaded": [str(one.key[1]) for one in done.added],
            "unchanged": [str(version) for _, version in done.unchanged],
            "unloaded": [str(version) for _, version in done.gone],
        }
    )


async def unload(request: Request, state: ServerState) -> Response:
    """``POST /v2/repository/models/NAME/unload``; there are no models that depend on others."""
    await request.body()
    await asyncio.to_thread(_control(state).unload, request.path_params["name"])
    return Response()


def _control(state: ServerState) -> ModelControl:
    if state.control is None:
        raise ProblemError(
            status=403,
            message="models are not loaded and unloaded by clients here; start the server with --model-control",
        )
    if not state.opened:
        raise state.not_ready("the server")
    return state.control


async def model_ready(request: Request, state: ServerState) -> Response:
    """``GET /v2/models/NAME/ready``."""
    served = _find(request, state)
    up = served.ready and not state.draining
    return json_response({"name": served.name, "ready": up}, 200 if up else 503)


async def metadata(request: Request, state: ServerState) -> Response:
    """``GET /v2/models/NAME``."""
    served = _find(request, state)
    found: dict[str, Any] = {
        "name": served.name,
        "versions": [str(one.version) for one in state.registry.versions(served.name)],
        "platform": "systolic_jax",
    }
    inputs, outputs = _specs(served)
    return json_response(
        {
            **found,
            "inputs": [described(one) for one in inputs],
            "outputs": [described(one) for one in outputs],
        }
    )


def _specs(served: Served) -> tuple[Sequence[ArraySpec], Sequence[ArraySpec]]:
    if isinstance(served, ServedText):
        return [TEXT_INPUT], [TEXT_OUTPUT]
    return served.model.inputs, served.model.outputs


async def infer(request: Request, state: ServerState) -> Response:
    """``POST /v2/models/NAME/infer``."""
    raw = await request.body()
    size = request.headers.get(HEADER)
    if size is not None and not (size.isascii() and size.isdigit() and int(size[:20]) <= len(raw)):
        raise bad(f"{HEADER} is {size[:40]!r} and the body has {len(raw)} bytes")
    end = len(raw) if size is None else int(size)
    fields = decode(raw[:end], InferFields)
    served = state.use(request, request.path_params["name"], version_in(request))
    inputs = read_tensors(fields.inputs, raw[end:])
    # A scalar per example may come as [n, 1], as Triton's clients send texts and files.
    for spec in _specs(served)[0]:
        given = inputs.get(spec.name)
        if spec.dtype == BYTES and given is not None and given.dtype == object and given.ndim == 2:
            inputs[spec.name] = given[:, 0] if given.shape[1] == 1 else given
    if isinstance(served, ServedText):
        found = await _texts(request, state, served, fields, inputs)
    else:
        found = await answered(request, served, inputs)
    return _response(fields, served, found)


async def _texts(
    request: Request,
    state: ServerState,
    served: ServedText,
    fields: InferFields,
    inputs: Mapping[str, np.ndarray],
) -> Mapping[str, np.ndarray]:
    """The texts that a language model continues ``text_input`` with; the request's parameters are fields of completions."""
    given = inputs.get(TEXT_INPUT.name)
    if given is None or len(inputs) > 1 or given.dtype != object or given.ndim != 1:
        raise bad(
            f"{served.name} is a language model and takes {TEXT_INPUT.name}, BYTES [texts]; send that, or ask /v1/completions"
        )
    try:
        prompts = [bytes(one).decode() for one in given]
    except UnicodeDecodeError as error:
        raise bad(f"{TEXT_INPUT.name} is not UTF-8 ({error.reason}); send texts") from error
    for name in NOT_HERE:
        if fields.parameters.get(name):
            raise bad(f"parameters.{name} is not taken here; leave it out, or ask /v1/completions")
    body = encode({**fields.parameters, "model": served.name, "prompt": prompts})
    texts = await continued(request, state, served, decode(body, CompletionFields))
    return {TEXT_OUTPUT.name: objects([one.encode() for one in texts])}


def _response(fields: InferFields, served: Served, found: Mapping[str, np.ndarray]) -> Response:
    asked = [WireOutput(name=name) for name in found] if not fields.outputs else fields.outputs
    default = bool(fields.parameters.get("binary_data_output", False))
    outputs, raws = [], []
    for one in asked:
        if one.name not in found:
            raise bad(f"there is no output {one.name[:80]!r}; the model's are {', '.join(found)}")
        if "classification" in one.parameters:
            raise bad("classification is not supported; read the outputs themselves")
        array = named(found[one.name])
        kind = BYTES if array.dtype == object else str(array.dtype)
        entry: dict[str, Any] = {
            "name": one.name,
            "datatype": datatype(kind),
            "shape": list(array.shape),
        }
        if one.parameters.get("binary_data", default):
            raws.append(to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raws[-1])}
        else:
            entry["data"] = to_json(array)
        outputs.append(entry)
    answer = {
        "model_name": served.name,
        "model_version": str(served.version),
        "outputs": outputs,
    }
    head = encode(answer if fields.id is None else {**answer, "id": fields.id})
    if not raws:
        return Response(head, media_type="application/json")
    headers = {HEADER: str(len(head))}
    body = b"".join([head, *raws])
    return Response(body, media_type="application/octet-stream", headers=headers)


def _find(request: Request, state: ServerState) -> Served:
    return state.versions(request.path_params["name"], version_in(request))[-1]


def version_in(request: Request) -> int | None:
    """The version that a path names.

    Raises:
        ProblemError: it is no number.
    """
    given = request.path_params.get("version")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise ProblemError(
            status=404, message=f"{given[:40]!r} is no version; versions are whole numbers"
        )
    return int(given)
