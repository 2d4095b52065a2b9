"""The Open Inference Protocol with Triton's client."""

import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from systolic.core.errors import NotFoundError
from systolic.serving.http.inference import DTYPES, datatype, named, to_bytes, to_json
from systolic.serving.http.protocol import ProblemError
from systolic.serving.registry import ReloadPlan
from systolic.serving.request import ModelKind
from tests.serving.http.running import Running, pending, running, toy_model

X = np.array([[1, 2], [3, 4.5]], np.float32)


@pytest.fixture(scope="module")
def client(server: Running) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.url.removeprefix("http://"))


def given(name: str, value: np.ndarray, datatype: str, *, binary: bool) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value, binary_data=binary)
    return made


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tensors")
    assert client.is_model_ready("tensors", "1")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "systolic"
    found = client.get_model_metadata("tensors")
    assert found["versions"] == ["1"]
    assert found["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
    assert client.get_model_metadata("image")["inputs"][0]["datatype"] == "BYTES"
    states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
    assert states["tensors"] == "READY"


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_binary_and_json(client: triton.InferenceServerClient, sent: bool, back: bool) -> None:
    outputs = [triton.InferRequestedOutput("y", binary_data=back)]
    found = client.infer(
        "tensors", [given("x", X, "FP32", binary=sent)], outputs=outputs, request_id="42"
    )
    np.testing.assert_array_equal(found.as_numpy("y"), 2 * X)
    answer = found.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("tensors", "1", "42")


def test_all_outputs_by_default(client: triton.InferenceServerClient) -> None:
    found = client.infer("tensors", [given("x", X, "FP32", binary=True)], model_version="1")
    np.testing.assert_array_equal(found.as_numpy("y"), 2 * X)


@pytest.mark.parametrize("back", [True, False])
def test_infinities_are_told_from_what_is_not_a_number(
    client: triton.InferenceServerClient, back: bool
) -> None:
    x = np.array([[np.inf, -np.inf], [3, np.nan]], np.float32)
    outputs = [triton.InferRequestedOutput("y", binary_data=back)]
    found = client.infer("tensors", [given("x", x, "FP32", binary=True)], outputs=outputs)
    np.testing.assert_array_equal(found.as_numpy("y"), 2 * x)


@pytest.mark.parametrize("binary", [True, False])
def test_bytes_in_and_out(client: triton.InferenceServerClient, binary: bool) -> None:
    files = np.array([b"one", b"two\x00"], object)
    back = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("name", "label")]
    for shape in ((2,), (2, 1)):
        sent = given("image", files.reshape(shape), "BYTES", binary=True)
        found = client.infer("image", [sent], outputs=back)
        names = [one.decode() if binary else one for one in found.as_numpy("name")[:, 0]]
        assert [str(one) for one in names] == ["cat", "cat"]
        assert found.as_numpy("label").tolist() == [[0], [0]]


def test_errors_have_the_protocols_form(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="there is no model 'nothing'"):
        client.infer("nothing", [given("x", X, "FP32", binary=True)])
    with pytest.raises(InferenceServerException, match="no version 7"):
        client.infer("tensors", [given("x", X, "FP32", binary=True)], model_version="7")
    with pytest.raises(InferenceServerException, match="unknown or missing"):
        client.infer("tensors", [given("z", X, "FP32", binary=True)])
    with pytest.raises(InferenceServerException, match="no output 'z'"):
        client.infer("tensors", [given("x", X, "FP32", binary=True)], outputs=[triton.InferRequestedOutput("z")])  # fmt: skip
    with pytest.raises(InferenceServerException, match="language model and takes text_input"):
        client.infer("echo", [given("x", X, "FP32", binary=True)])


def test_a_language_model_takes_what_its_metadata_lists(
    client: triton.InferenceServerClient,
) -> None:
    about = client.get_model_metadata("echo")
    (asked,), (told,) = about["inputs"], about["outputs"]
    texts = np.array(["hello", "you"], object)
    for binary in (True, False):
        for shape in ((2,), (2, 1)):
            sent = given(
                asked["name"], texts.reshape(shape), datatype=asked["datatype"], binary=binary
            )
            found = client.infer("echo", [sent], model_version="1", parameters={"max_tokens": 4})
            # The first of a prompt's tokens, which the echo says again, has no text.
            assert found.as_numpy(told["name"]).tolist() == [b"hel", b"you"]
    for name, value in (("n", 2), ("stream", True), ("max_tokens", 5000), ("top_p", 7)):
        with pytest.raises(InferenceServerException, match=name):
            client.infer("echo", [sent], parameters={name: value})
    wrong = given("text_input", np.array([b"\xff"], object), "BYTES", binary=True)
    with pytest.raises(InferenceServerException, match="not UTF-8"):
        client.infer("echo", [wrong])


def body(**changed: Any) -> dict[str, Any]:
    one = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **changed}
    return {"inputs": [one]}


WRONG: list[Any] = [
    {},
    {"inputs": {}},
    body(datatype="FP31"),
    body(shape=[1, 3]),
    body(shape=[-1, 2]),
    body(shape=[2**40, 2**40]),
    body(shape=[1] * 40),
    body(data=None),
    body(data=[1, "x"]),
    body(data=[[1], [2, 3]]),
    body(datatype="INT32", data=[1.5, 2]),
    body(datatype="INT8", data=[1, 300]),
    body(datatype="INT64", data=[1, 2**70]),
    body(datatype="BOOL", data=[1, 2]),
    body(datatype="BYTES", data=[1, 2]),
    body(datatype="FP16", data=[1e10, 2]),
    body(parameters={"binary_data_size": 8}),
    body(parameters={"binary_data_size": -1}),
    body(parameters={"binary_data_size": "x"}),
    {"inputs": [body()["inputs"][0]] * 2},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: json.dumps(one)[:60])
def test_wrong_requests(server: Running, wrong: Any) -> None:
    with server.client() as http:
        found = http.post("/v2/models/tensors/infer", json=wrong)
    assert (found.status_code, list(found.json())) == (400, ["error"]), found.text


def test_nested_data_and_flat(server: Running) -> None:
    with server.client() as http:
        for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
            found = http.post("/v2/models/tensors/infer", json=body(shape=[2, 2], data=data)).json()
            assert found["outputs"] == [
                {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [2, 4, 6, 8]}
            ]


@pytest.mark.parametrize("size", ["x", "-1", "99999", "9" * 40, ""])
def test_wrong_lengths_of_the_json(server: Running, size: str) -> None:
    raw, headers = json.dumps(body()).encode(), {"Inference-Header-Content-Length": size}
    with server.client() as http:
        found = http.post("/v2/models/tensors/infer", content=raw, headers=headers)
    assert (found.status_code, list(found.json())) == (400, ["error"])


def test_elements_that_end_too_soon(server: Running) -> None:
    raw = b"\x09\x00\x00\x00abc"
    head = json.dumps({"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}]}).encode()  # fmt: skip
    headers = {"Inference-Header-Content-Length": str(len(head))}
    with server.client() as http:
        found = http.post("/v2/models/image/infer", content=head + raw, headers=headers)
    assert (found.status_code, "ends within" in found.json()["error"]) == (400, True)


def test_compressed_bodies_are_refused(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        raw, headers = gzip.compress(b"{}"), {"content-encoding": "gzip"}
        found = http.post("/v2/models/tensors/infer", content=raw, headers=headers)
    assert (found.status_code, list(found.json())) == (415, ["error"])


def test_models_are_not_unloaded_unless_that_is_allowed(
    client: triton.InferenceServerClient,
) -> None:
    for change in (client.unload_model, client.load_model):
        with pytest.raises(InferenceServerException, match="--model-control"):
            change("tensors")
    assert client.is_model_ready("tensors")


def test_models_out_and_in_again() -> None:
    made: list[int] = []

    def renewal(name: str | None) -> Any:
        if name != "toy":
            raise NotFoundError(f"the server was not given a model {name}")
        held = {it.version for it in one.state.registry.everything() if it.name == name}
        made.extend(version for version in (1, 2) if version not in held)
        toys = [toy_model(ModelKind.tensors, "toy", version) for version in (1, 2)]
        return ReloadPlan(added=[pending(toy) for toy in toys if toy.version not in held])

    first = [toy_model(ModelKind.tensors, "toy"), toy_model(ModelKind.embedding, "other")]
    with running(first) as one:
        one.process._renewal, one.state.control = renewal, one.process
        client = triton.InferenceServerClient(one.url.removeprefix("http://"))
        client.unload_model("toy")
        assert not client.is_model_ready("toy")
        assert client.is_server_ready()
        assert {"name": "toy", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"} in (
            client.get_model_repository_index()
        )
        told = "toy is unloaded; load with POST /v2/repository/models/toy/load"
        with pytest.raises(InferenceServerException, match=told):
            client.infer("toy", [given("x", X, "FP32", binary=True)])
        with pytest.raises(InferenceServerException, match=told):
            client.get_model_metadata("toy")
        client.unload_model("other")
        with one.client() as http:
            for path, body in (("embeddings", {"input": "x"}), ("completions", {"prompt": "x"})):
                found = http.post(f"/v1/{path}", json=body)
                assert found.json()["error"]["message"] == (
                    "no model is loaded; other, toy are unloaded; load with POST /v2/repository/models/NAME/load"
                )
                assert found.status_code == 404
        client.load_model("toy")
        assert made == [1, 2]
        found = client.infer("toy", [given("x", X, "FP32", binary=True)])
        assert found.get_response()["model_version"] == "2"
        states = {one["version"]: one["state"] for one in client.get_model_repository_index()}
        assert states == {"1": "READY", "2": "READY", "": "UNAVAILABLE"}
        for change, name in ((client.unload_model, "nothing"), (client.load_model, "nothing")):
            with pytest.raises(InferenceServerException, match="nothing"):
                change(name)
        with pytest.raises(InferenceServerException, match="config is not taken"):
            client.load_model("toy", config="{}")
        assert {"name": "other", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"} in (
            client.get_model_repository_index()
        )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float8_e4m3fn", "FP32"), ("float8_e5m2", "FP32"), ("int4", "INT8"), ("uint4", "UINT8"), ("bfloat16", "BF16"), ("float16", "FP16"), ("int64", "INT64")],
)  # fmt: skip
def test_outputs_without_a_name_in_the_protocol_are_widened(dtype: str, name: str) -> None:
    values = np.array([0, 1, 2, 3, 6]).astype(dtype)
    sent = named(values)
    assert datatype(dtype) == name
    assert sent.astype(np.float32).tolist() == [0, 1, 2, 3, 6]
    assert len(to_bytes(sent)) == 5 * DTYPES[name].itemsize
    assert to_json(sent) == [0, 1, 2, 3, 6]


def test_an_output_that_has_no_wider_dtype_is_refused() -> None:
    with pytest.raises(ProblemError) as found:
        named(np.zeros(2, np.complex64))
    assert "complex64, which the protocol has no name for" in found.value.message
