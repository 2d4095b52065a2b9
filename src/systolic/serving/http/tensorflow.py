"""TensorFlow Serving's REST under ``/v1/models``, which OpenAI's listing of one model shares."""

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from systolic.core.errors import OptionError
from systolic.serving.batch.intake import check_range, kind_of
from systolic.serving.http.listing import described, entry, json_response
from systolic.serving.http.protocol import ProblemError, bad
from systolic.serving.http.responses import answered, objects
from systolic.serving.http.state import Phase, ServerState, VersionState
from systolic.serving.registry import Served, ServedBatch, ServedText
from systolic.serving.request import BYTES, ArraySpec, ModelKind

_GET = re.compile(r"(?P<name>.+?)(?:/versions/(?P<version>[0-9]{1,15}))?(?P<metadata>/metadata)?")
_POST = re.compile(
    r"(?P<name>[^:]+?)(?:/versions/(?P<version>[0-9]{1,15})|/labels/(?P<label>[^/:]+))?:(?P<verb>[a-z]+)"
)
ROUTES = "/v1/models/"
"""Begin of the paths here."""
SIGNATURE = "serving_default"
SMALL = 1 << 16
"""Bytes of JSON that are read in the event loop."""
TYPES: Mapping[str, str] = {
    BYTES: "DT_STRING",
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "float16": "DT_HALF",
    "bfloat16": "DT_BFLOAT16",
    "bool": "DT_BOOL",
    **{f"int{bits}": f"DT_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"DT_UINT{bits}" for bits in (8, 16, 32, 64)},
}
STATES: Mapping[Phase, str] = {
    Phase.ready: "AVAILABLE",
    Phase.loading: "LOADING",
    Phase.stopped: "UNLOADING",
    Phase.failed: "END",
}
PLAIN: Mapping[ModelKind, str] = {ModelKind.image: "uint8", ModelKind.transcription: "float32"}
"""Kind to the dtype of numbers that stand for an encoded input."""


def label(path: str) -> str:
    """Label of a path in metrics and the log: any other word than these would be a label of the client's making."""
    ends = (end for end in (":predict", "/metadata") if path.endswith(end))
    return f"{ROUTES}{{name}}{next(ends, '')}"


async def model(request: Request, state: ServerState) -> Response:
    """``GET /v1/models/NAME``: OpenAI's model and TensorFlow Serving's versions in one object; or the signatures under ``/metadata``."""
    match = _GET.fullmatch(request.path_params["rest"])
    if match is None:
        raise ProblemError(status=404, message="there is no such path")
    name, version = match["name"], None if match["version"] is None else int(match["version"])
    if match["metadata"]:
        return json_response(_metadata(state.versions(name, version)[-1]))
    states = [
        version_state
        for version_state in state.states()
        if version_state.name == name and version in (None, version_state.version)
    ]
    if all(version_state.phase is Phase.loading for version_state in states):
        state.versions(name, version)
    newest = next((served for served in state.registry.newest() if served.name == name), None)
    about = entry(name) if newest is None else described(newest)
    statuses = [
        _state(version_state)
        for version_state in sorted(
            states, key=lambda version_state: version_state.version, reverse=True
        )
    ]
    return json_response({**about, "model_version_status": statuses})


def _state(version_state: VersionState) -> dict[str, Any]:
    failed = version_state.phase is Phase.failed
    status = {
        "error_code": "INTERNAL" if failed else "OK",
        "error_message": version_state.reason if failed else "",
    }
    return {
        "version": str(version_state.version),
        "state": STATES[version_state.phase],
        "status": status,
    }


def _metadata(served: Served) -> dict[str, Any]:
    if isinstance(served, ServedText):
        raise bad(f"{served.name} is a language model; ask /v1/completions")
    signature = {
        "inputs": {spec.name: _signed(spec) for spec in served.model.inputs},
        "outputs": {spec.name: _signed(spec) for spec in served.model.outputs},
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": served.name, "signature_name": "", "version": str(served.version)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    }


def _signed(spec: ArraySpec) -> dict[str, Any]:
    dims = [{"size": str(size), "name": ""} for size in spec.shape]
    return {
        "dtype": TYPES.get(spec.dtype, "DT_INVALID"),
        "tensor_shape": {"dim": dims, "unknown_rank": False},
        "name": f"{spec.name}:0",
    }


async def predict(request: Request, state: ServerState) -> Response:
    """``POST /v1/models/NAME[/versions/N]:predict``."""
    match = _POST.fullmatch(request.path_params["rest"])
    if match is None:
        raise ProblemError(status=404, message="there is no such path; ask /v1/models/NAME:predict")
    if match["label"]:
        raise ProblemError(status=404, message=f"{match['name']} has no label {match['label']}")
    if match["verb"] != "predict":
        raise bad(f"{match['verb']} is not supported; ask :predict")
    raw = await request.body()
    version = None if match["version"] is None else int(match["version"])
    served = state.batch(request, match["name"], version)
    inputs, rows = await _off_loop(len(raw), lambda: read_inputs(raw, served))
    outputs = await answered(request, served, inputs)
    body = await _off_loop(
        sum(array.nbytes for array in outputs.values()), lambda: written(outputs, rows=rows)
    )
    return Response(body, media_type="application/json")


async def _off_loop(size: int, work: Any) -> Any:
    return work() if size <= SMALL else await asyncio.to_thread(work)


def read_inputs(raw: bytes, served: ServedBatch) -> tuple[dict[str, np.ndarray], bool]:
    """Inputs of a request, and whether they came as rows.

    Raises:
        ProblemError: the body is no such request.
    """
    try:
        # The standard's parser, since TensorFlow Serving takes NaN and Infinity.
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON ({error}); send a JSON object") from error
    if not isinstance(fields, dict):
        raise bad("the body is no JSON object; send {instances: [...]} or {inputs: {...}}")
    if fields.get("signature_name", SIGNATURE) not in (SIGNATURE, ""):
        raise bad(
            f"there is no signature {str(fields['signature_name'])[:40]!r}; the model has {SIGNATURE}"
        )
    if ("instances" in fields) == ("inputs" in fields):
        raise bad("send either instances (rows) or inputs (columns)")
    rows = "instances" in fields
    columns = _from_rows(fields["instances"], served) if rows else fields["inputs"]
    specs = {spec.name: spec for spec in served.model.inputs}
    if not isinstance(columns, dict) or "b64" in columns:
        columns = {_only(served): columns}
    for name in columns:
        if name not in specs:
            raise bad(f"there is no input {str(name)[:80]!r}; the model's are {', '.join(specs)}")
    kind = served.model.kind
    return {name: _array(value, specs[name], kind) for name, value in columns.items()}, rows


def _only(served: ServedBatch) -> str:
    needed = [spec.name for spec in served.model.inputs if not spec.optional]
    if len(needed) != 1:
        raise bad(
            f"name the inputs; the model's are {', '.join(spec.name for spec in served.model.inputs)}"
        )
    return needed[0]


def _from_rows(rows: Any, served: ServedBatch) -> dict[str, list[Any]]:
    if not isinstance(rows, list) or not rows:
        raise bad("instances is no list with an example in it")
    if not isinstance(rows[0], dict) or "b64" in rows[0]:
        return {_only(served): rows}
    names = set(rows[0])
    if any(not isinstance(row, dict) or set(row) != names for row in rows):
        raise bad("instances have different inputs; give each row the same names")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _array(value: Any, spec: ArraySpec, kind: ModelKind) -> np.ndarray:
    """A column as an array.

    Raises:
        ProblemError: values do not fit the input.
    """
    if not isinstance(value, list):
        raise bad(f"input {spec.name} is no list of examples")
    if spec.dtype == BYTES:
        if all(isinstance(example, str | dict) for example in value):
            return objects([_raw(example, spec) for example in value])
        dtype = np.dtype(PLAIN.get(kind, "int32"))
        if kind is ModelKind.embedding:
            return objects([_numbers(example, spec, dtype) for example in value])
    else:
        dtype = np.dtype(spec.dtype)
    return _numbers(value, spec, dtype)


def _raw(value: str | dict[str, Any], spec: ArraySpec) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise bad(f"input {spec.name} has a text that is no Unicode") from error
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise bad(f'input {spec.name} has bytes that are not {{"b64": "..."}}') from error


def _numbers(value: Any, spec: ArraySpec, dtype: np.dtype) -> np.ndarray:
    try:
        plain = np.asarray(value)
        wanted = {"b": "b", "i": "iu", "u": "iu"}.get(kind_of(dtype), "iuf")
        if plain.size and plain.dtype.kind not in wanted:
            raise ValueError(f"{plain.dtype} where {dtype} is expected")
        check_range("it", plain, dtype)
        return plain.astype(dtype)
    except (OptionError, ValueError, TypeError, OverflowError) as error:
        raise bad(f"input {spec.name} does not fit {dtype} ({error})") from error


def written(outputs: Mapping[str, np.ndarray], *, rows: bool) -> bytes:
    """The answer: rows where the request had rows, else columns; a single output stands for itself."""
    columns = {name: _listed(name, array) for name, array in outputs.items()}
    if not rows:
        body = next(iter(columns.values())) if len(columns) == 1 else columns
        return json.dumps({"outputs": body}).encode()
    if len(columns) == 1:
        return json.dumps({"predictions": next(iter(columns.values()))}).encode()
    names = list(columns)
    rows_of = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps({"predictions": rows_of}).encode()


def _listed(name: str, array: np.ndarray) -> Any:
    if array.dtype == object:
        as_base64 = name.endswith("_bytes")
        return _each(array.tolist(), as_base64=as_base64)
    return (array.astype(np.float32) if str(array.dtype) == "bfloat16" else array).tolist()


def _each(value: Any, *, as_base64: bool) -> Any:
    if isinstance(value, list):
        return [_each(part, as_base64=as_base64) for part in value]
    raw = value.encode() if isinstance(value, str) else bytes(value)
    if as_base64:
        return {"b64": base64.b64encode(raw).decode()}
    return raw.decode("utf-8", "replace")
