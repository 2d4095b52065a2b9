"""The Open Inference Protocol (KServe v2) over REST: arrays as JSON numbers, or by Triton's binary extension as raw bytes behind the JSON."""

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from systolic.core.errors import OptionError
from systolic.serving.batch.intake import check_range
from systolic.serving.http.completions import CompletionFields, continued
from systolic.serving.http.listing import json_response
from systolic.serving.http.protocol import ProblemError, bad, decode, encode, read, with_infinities
from systolic.serving.http.responses import answered, objects
from systolic.serving.http.state import Phase, ServerState
from systolic.serving.registry import Served, ServedText
from systolic.serving.request import ANY, BYTES, ArraySpec, ModelKind

if TYPE_CHECKING:
    from systolic.serving.http.process import Process

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("float32"),
    "FP64": np.dtype("float64"),
}
"""Datatype of the protocol to that of NumPy; BYTES are object arrays."""
HEADER = "inference-header-content-length"
BASE64 = "base64"
"""``content_type`` of BYTES, as MLServer has it."""
FILES = {ModelKind.image: "image", ModelKind.transcription: "audio"}
"""Kind of a model to its input whose elements are files."""
TEXT_INPUT, TEXT_OUTPUT = (
    ArraySpec(name=name, dtype=BYTES, shape=(ANY,)) for name in ("text_input", "text_output")
)
"""Inputs and outputs of a language model, as Triton's backends for such models name them."""
NOT_HERE = ("stream", "stream_options", "n", "echo", "logprobs", "model", "prompt")
"""Fields of completions that this protocol has no place for in its answers, or elsewhere in its requests."""


class WireTensor(Struct, kw_only=True):
    """An input of a request."""

    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def is_plain_text(self) -> bool:
        """Whether its data are JSON's strings as they are."""
        coded = self.parameters.get("content_type") == BASE64
        return self.datatype == "BYTES" and "binary_data_size" not in self.parameters and not coded


def datatype(dtype: str) -> str:
    """The protocol's name of a dtype of an :class:`~systolic.serving.request.ArraySpec`, as :func:`named` writes it."""
    if dtype == BYTES:
        return "BYTES"
    sent = named(np.zeros(0, np.dtype(dtype))).dtype
    return next(name for name, known in DTYPES.items() if known == sent)


def named(array: np.ndarray) -> np.ndarray:
    """An array in a dtype that the protocol has a name for: the next wider one where it has none for its own, such as float8."""
    if array.dtype == object or array.dtype in DTYPES.values():
        return array
    for wider in (np.uint8, np.int8, np.float32):
        if np.can_cast(array.dtype, wider):
            return array.astype(wider)
    raise ProblemError(
        status=400,
        message=f"an output is of the dtype {array.dtype}, which the protocol has no name for; leave it out of outputs",
    )


def described(spec: ArraySpec) -> dict[str, Any]:
    """An input or output as the model's metadata lists it."""
    return {"name": spec.name, "datatype": datatype(spec.dtype), "shape": list(spec.shape)}


def read_tensors(tensors: Sequence[WireTensor], raw: bytes) -> dict[str, np.ndarray]:
    """Inputs by name, from their JSON or from the bytes behind it; BYTES whose ``content_type`` is ``base64`` are decoded.

    Raises:
        ProblemError: sizes, types or values do not agree.
    """
    arrays: dict[str, np.ndarray] = {}
    at = 0
    for tensor in tensors:
        if tensor.datatype not in DTYPES and tensor.datatype != "BYTES":
            raise bad(
                f"input {tensor.name} has the datatype {tensor.datatype[:20]!r}; known are BYTES, {', '.join(DTYPES)}"
            )
        if any(size < 0 for size in tensor.shape) or len(tensor.shape) > 32:
            raise bad(f"input {tensor.name} has the shape {tensor.shape[:8]}; sizes are 0 or more")
        if tensor.name in arrays:
            raise bad(f"input {tensor.name} is there twice; send each once")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            arrays[tensor.name] = _decoded(tensor, _from_json(tensor))
            continue
        if not isinstance(size, int) or not 0 <= size <= len(raw) - at:
            raise bad(
                f"input {tensor.name} has {size} bytes by its JSON, and {len(raw) - at} follow"
            )
        arrays[tensor.name] = _decoded(tensor, _from_bytes(tensor, raw[at : at + size]))
        at += size
    if at != len(raw):
        raise bad(f"{len(raw) - at} bytes follow the last input; binary_data_size does not add up")
    return arrays


def _decoded(tensor: WireTensor, array: np.ndarray) -> np.ndarray:
    """An input with its BYTES decoded."""
    if array.dtype != object or tensor.parameters.get("content_type") != BASE64:
        return array
    decoded = np.empty(array.size, object)
    try:
        decoded[:] = [base64.b64decode(text, validate=True) for text in array.flat]
    except ValueError as error:
        raise bad(
            f"input {tensor.name} has data that are no base64 ({error}); encode each element, or leave out its content_type"
        ) from error
    return decoded.reshape(array.shape)


def _from_json(tensor: WireTensor) -> np.ndarray:
    if not isinstance(tensor.data, list):
        raise bad(f"input {tensor.name} has no data; send a list, or bytes with binary_data_size")
    if tensor.datatype == "BYTES":
        flat = _flat(tensor.data)
        if not all(isinstance(text, str) for text in flat):
            raise bad(f"input {tensor.name} is of datatype BYTES; its data are texts")
        array = np.empty(len(flat), object)
        array[:] = [text.encode() for text in flat]
        return _shaped(tensor, array)
    dtype = DTYPES[tensor.datatype]
    try:
        plain = np.asarray(tensor.data)
        if plain.dtype == object or (plain.size and not _holds(plain, dtype)):
            raise ValueError(f"{plain.dtype} where {dtype} is expected")
        with np.errstate(over="raise"):
            check_range("it", plain, dtype)
            array = plain.astype(dtype)
    except (OptionError, ValueError, TypeError, OverflowError, FloatingPointError) as error:
        raise bad(f"input {tensor.name} does not fit {tensor.datatype} ({error})") from error
    return _shaped(tensor, array.reshape(-1))


def _holds(plain: np.ndarray, dtype: np.dtype) -> bool:
    """Whether values read from JSON keep their meaning in a dtype."""
    if dtype.kind == "b":
        return plain.dtype.kind == "b"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return plain.dtype.kind in "iu" and limits.min <= plain.min() and plain.max() <= limits.max
    return plain.dtype.kind in "iuf"


def _flat(data: list[Any]) -> list[Any]:
    while data and all(isinstance(row, list) for row in data):
        data = [value for row in data for value in row]
    return data


def _from_bytes(tensor: WireTensor, raw: bytes) -> np.ndarray:
    if tensor.datatype != "BYTES":
        dtype = DTYPES[tensor.datatype].newbyteorder("<")
        if len(raw) != math.prod(tensor.shape) * dtype.itemsize:
            raise bad(
                f"input {tensor.name} has {len(raw)} bytes; {tensor.datatype}{tensor.shape} has {math.prod(tensor.shape) * dtype.itemsize}"
            )
        array = np.frombuffer(raw, dtype)
        if tensor.datatype == "BOOL" and array.size and np.frombuffer(raw, np.uint8).max() > 1:
            raise bad(f"input {tensor.name} has a BOOL that is neither 0 nor 1")
        return _shaped(tensor, array)
    texts, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        if len(raw) - at < 4 + size:
            raise bad(
                f"input {tensor.name} ends within an element; each is 4 bytes of length and its bytes"
            )
        texts.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(texts), object)
    array[:] = texts
    return _shaped(tensor, array)


def _shaped(tensor: WireTensor, flat: np.ndarray) -> np.ndarray:
    if flat.size != math.prod(tensor.shape):
        raise bad(
            f"input {tensor.name} has {flat.size} values; its shape {tensor.shape} has {math.prod(tensor.shape)}"
        )
    try:
        return flat.reshape(tensor.shape)
    except ValueError as error:
        raise bad(
            f"input {tensor.name} has the shape {tensor.shape}, which is too large"
        ) from error


def to_bytes(array: np.ndarray) -> bytes:
    """An array as the protocol's raw bytes."""
    if array.dtype != object:
        return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()
    parts = []
    for text in array.reshape(-1):
        raw = text.encode() if isinstance(text, str) else bytes(text)
        parts += [len(raw).to_bytes(4, "little"), raw]
    return b"".join(parts)


def to_json(array: np.ndarray) -> list[Any]:
    """An array as a flat list for :func:`~systolic.serving.http.protocol.encode`, row-major.

    Raises:
        ProblemError: it holds bytes that are no UTF-8.
    """
    if array.dtype != object:
        wide = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        listed = wide.reshape(-1).tolist()
        if wide.dtype.kind != "f" or not np.isinf(wide).any():
            return listed
        return with_infinities(listed, b"Infinity")  # as Triton writes and its clients read it
    try:
        return [
            text if isinstance(text, str) else bytes(text).decode() for text in array.reshape(-1)
        ]
    except UnicodeDecodeError as error:
        raise ProblemError(
            status=400, message="an output holds bytes that are no UTF-8; ask for it as binary data"
        ) from error


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


class AdapterFields(Struct, kw_only=True):
    """A request of ``/v1/load_lora_adapter`` or ``/v1/unload_lora_adapter``, as vLLM has them."""

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False
    """Whether it takes the place of an adapter of its name."""
    lora_int_id: int | None = None
    """Unused: adapters go by their names."""


async def live(request: Request, state: ServerState) -> Response:
    """``GET /v2/health/live``."""
    del request
    return json_response({"live": state.alive}, 200 if state.alive else 503)


async def ready(request: Request, state: ServerState) -> Response:
    """``GET /v2/health/ready``."""
    del request
    up = state.ready
    models = [
        {
            "name": version.name,
            "version": str(version.version),
            "ready": version.phase is Phase.ready,
        }
        for version in state.states()
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
    models = [
        {
            "name": version.name,
            "version": str(version.version),
            "state": version.phase.triton,
            "reason": version.reason,
        }
        for version in state.states()
        if version.phase is Phase.ready or not only_ready
    ]
    if not only_ready:
        models += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}
            for name in sorted(state.unloaded)
        ]
    return json_response(models)


async def load(request: Request, state: ServerState) -> Response:
    """``POST /v2/repository/models/NAME/load``."""
    raw = await request.body()
    parameters = decode(raw, ControlFields).parameters if raw else {}
    if parameters:
        raise bad(
            f"{next(iter(parameters))} is not taken; models are loaded as their folders have them"
        )
    name = request.path_params["name"]
    done = await asyncio.to_thread(_control(state).load, name)
    return json_response(
        {
            "name": name,
            "loaded": [str(added.key[1]) for added in done.added],
            "unchanged": [str(version) for _, version in done.unchanged],
            "unloaded": [str(version) for _, version in done.gone],
        }
    )


async def unload(request: Request, state: ServerState) -> Response:
    """``POST /v2/repository/models/NAME/unload``; there are no models that depend on others."""
    await request.body()
    await asyncio.to_thread(_control(state).unload, request.path_params["name"])
    return Response()


async def load_adapter(request: Request, state: ServerState) -> Response:
    """``POST /v1/load_lora_adapter``."""
    fields = await read(request, AdapterFields)
    for field_name in ("lora_name", "lora_path"):
        if not getattr(fields, field_name):
            raise bad(f"{field_name} is missing; give lora_name and lora_path", field_name)
    control, path = _control(state), FilePath(fields.lora_path)
    await asyncio.to_thread(control.load_adapter, fields.lora_name, path, fields.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")


async def unload_adapter(request: Request, state: ServerState) -> Response:
    """``POST /v1/unload_lora_adapter``; answers when the adapter's requests have ended."""
    fields = await read(request, AdapterFields)
    await asyncio.to_thread(_control(state).unload_adapter, fields.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


def _control(state: ServerState) -> "Process":
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
    about: dict[str, Any] = {
        "name": served.name,
        "versions": [str(version.version) for version in state.registry.versions(served.name)],
        "platform": "systolic_jax",
    }
    inputs, outputs = _specs(served)
    return json_response(
        {
            **about,
            "inputs": [described(spec) for spec in inputs],
            "outputs": [described(spec) for spec in outputs],
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
    file = None if isinstance(served, ServedText) else FILES.get(served.model.kind)
    if any(tensor.is_plain_text and tensor.name == file for tensor in fields.inputs):
        raise bad(
            f'input {file} takes files, and its data are JSON strings; send their bytes behind the JSON with binary_data_size, or base64 with "parameters": {{"content_type": "base64"}}'
        )
    inputs = read_tensors(fields.inputs, raw[end:])
    # A scalar per example may come as [n, 1], as Triton's clients send texts and files.
    for spec in _specs(served)[0]:
        array = inputs.get(spec.name)
        if spec.dtype == BYTES and array is not None and array.dtype == object and array.ndim == 2:
            inputs[spec.name] = array[:, 0] if array.shape[1] == 1 else array
    if isinstance(served, ServedText):
        outputs = await _texts(request, state, served, fields, inputs)
    else:
        outputs = await answered(request, served, inputs)
    return _response(fields, served, outputs)


async def _texts(
    request: Request,
    state: ServerState,
    served: ServedText,
    fields: InferFields,
    inputs: Mapping[str, np.ndarray],
) -> Mapping[str, np.ndarray]:
    """The texts that a language model continues ``text_input`` with; the request's parameters are fields of completions."""
    array = inputs.get(TEXT_INPUT.name)
    if array is None or len(inputs) > 1 or array.dtype != object or array.ndim != 1:
        raise bad(
            f"{served.name} is a language model and takes {TEXT_INPUT.name}, BYTES [texts]; send that, or ask /v1/completions"
        )
    try:
        prompts = [bytes(text).decode() for text in array]
    except UnicodeDecodeError as error:
        raise bad(f"{TEXT_INPUT.name} is not UTF-8 ({error.reason}); send texts") from error
    for name in NOT_HERE:
        if fields.parameters.get(name):
            raise bad(f"parameters.{name} is not taken here; leave it out, or ask /v1/completions")
    body = encode({**fields.parameters, "model": served.name, "prompt": prompts})
    texts = await continued(request, state, served, decode(body, CompletionFields))
    return {TEXT_OUTPUT.name: objects([text.encode() for text in texts])}


def _response(fields: InferFields, served: Served, arrays: Mapping[str, np.ndarray]) -> Response:
    requested = [WireOutput(name=name) for name in arrays] if not fields.outputs else fields.outputs
    default = bool(fields.parameters.get("binary_data_output", False))
    outputs, raws = [], []
    for output in requested:
        if output.name not in arrays:
            raise bad(
                f"there is no output {output.name[:80]!r}; the model's are {', '.join(arrays)}"
            )
        if "classification" in output.parameters:
            raise bad("classification is not supported; read the outputs themselves")
        array = named(arrays[output.name])
        kind = BYTES if array.dtype == object else str(array.dtype)
        entry: dict[str, Any] = {
            "name": output.name,
            "datatype": datatype(kind),
            "shape": list(array.shape),
        }
        if output.parameters.get("binary_data", default):
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
    version = request.path_params.get("version")
    if version is None:
        return None
    if not (version.isascii() and version.isdigit() and len(version) < 16):
        raise ProblemError(
            status=404, message=f"{version[:40]!r} is no version; versions are whole numbers"
        )
    return int(version)
