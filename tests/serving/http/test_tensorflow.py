"""TensorFlow Serving's REST as its clients write it."""

import base64
import json
import math
import re
import threading
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.http

from systolic.core.errors import DataError
from systolic.serving.registry import ModelLoad, ReloadPlan, Served
from systolic.serving.request import ModelKind
from tests.serving.http.running import Running, echo_model, pending, running, toy_model, wait


def ask(server: Running, path: str, body: Any) -> Any:
    with server.client() as http:
        found = http.post(f"/v1/models/{path}:predict", content=json.dumps(body))
    assert found.status_code == 200, found.text
    return found.json()


def test_rows_and_columns(server: Running) -> None:
    rows = ask(server, "tensors", {"instances": [[1, 2], [3, 4]]})
    assert rows == {"predictions": [[2, 4], [6, 8]]}
    named = ask(server, "tensors", {"signature_name": "serving_default", "instances": [{"x": [1, 2], "count": 1}]})  # fmt: skip
    assert named == {"predictions": [[2, 4]]}
    assert ask(server, "tensors", {"inputs": {"x": [[1, 2]]}}) == {"outputs": [[2, 4]]}
    assert ask(server, "tensors/versions/1", {"inputs": [[1, 2]]}) == {"outputs": [[2, 4]]}


def test_bytes(server: Running) -> None:
    file = {"b64": base64.b64encode(b"\xff\xd8").decode()}
    rows = ask(server, "image", {"instances": [file, {"b64": ""}]})
    assert rows["predictions"][0] == {"label": [0], "probability": [1.0], "name": ["cat"]}
    assert len(ask(server, "image", {"instances": [{"image": file}]})["predictions"]) == 1
    columns = ask(server, "image", {"inputs": {"image": [file]}})["outputs"]
    assert columns["name"] == [["cat"]]
    vectors = ask(server, "embedding", {"instances": ["four"]})["predictions"]
    assert vectors == [{"embedding": [4, 0, 0, 3], "tokens": 4}]


def test_the_verb_is_in_the_label_of_the_route(server: Running) -> None:
    with server.client() as http:
        assert (
            http.post("/v1/models/tensors:predict", content=b'{"instances": 3}').status_code == 400
        )
        assert http.get("/v1/models/tensors").status_code == 200
        assert http.get("/v1/models/tensors/metadata").status_code == 200
        page = http.get("/metrics").text
    for route in (":predict", "", "/metadata"):
        assert f'route="/v1/models/{{name}}{route}"' in page


def test_not_a_number_is_allowed(server: Running) -> None:
    ((first, second),) = ask(server, "tensors", {"instances": [[math.nan, -math.inf]]})[
        "predictions"
    ]
    assert (math.isnan(first), second) == (True, -math.inf)


def test_status_and_metadata(server: Running) -> None:
    with server.client() as http:
        found = http.get("/v1/models/tensors").json()
        # TensorFlow Serving's client and OpenAI's read the same object.
        assert (found["id"], found["object"]) == ("tensors", "model")
        assert found["model_version_status"] == [
            {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]  # fmt: skip
        assert http.get("/v1/models/tensors/versions/1").status_code == 200
        gone = http.get("/v1/models/tensors/versions/3")
        assert (gone.status_code, list(gone.json())) == (404, ["error"])
        signature = http.get("/v1/models/tensors/metadata").json()["metadata"]["signature_def"]
        x = signature["signature_def"]["serving_default"]["inputs"]["x"]
    assert x["dtype"] == "DT_FLOAT"
    assert [one["size"] for one in x["tensor_shape"]["dim"]] == ["-1", "2"]


WRONG: list[Any] = [
    "{",
    "[]",
    {},
    {"instances": []},
    {"instances": 1},
    {"instances": [[1, 2]], "inputs": [[1, 2]]},
    {"instances": [[1, 2]], "signature_name": "other"},
    {"instances": [[1], [2, 3]]},
    {"instances": [{"x": [1, 2]}, {"y": [1, 2]}]},
    {"instances": [{"x": [1, 2], "count": 1.5}]},
    {"instances": [{"x": [1, 2], "count": 2**40}]},
    {"instances": [[1, 1e300]]},
    {"instances": ["text"]},
    {"inputs": {"z": [1]}},
    {"inputs": 7},
    {"instances": [[1, 2, 3]]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_requests(server: Running, wrong: Any) -> None:
    raw = wrong if isinstance(wrong, str) else json.dumps(wrong)
    with server.client() as http:
        found = http.post("/v1/models/tensors:predict", content=raw)
    assert (found.status_code, list(found.json())) == (400, ["error"]), found.text


@pytest.mark.parametrize(
    ("path", "status"),
    [("nothing:predict", 404), ("tensors/versions/9:predict", 404), ("tensors:classify", 400), ("tensors/labels/x:predict", 404), ("echo:predict", 400), ("tensors", 404)],
)  # fmt: skip
def test_paths_that_are_not_there(server: Running, path: str, status: int) -> None:
    with server.client() as http:
        found = http.post(f"/v1/models/{path}", json={"instances": [[1, 2]]})
    assert found.status_code == status


def test_versions_are_swapped_without_a_dropped_request() -> None:
    first = toy_model(ModelKind.tensors, "toy", 1)
    with running([first]) as one:
        second = toy_model(ModelKind.tensors, "toy", 2)
        second.start()
        first.model.delay_seconds = 0.3
        answers: list[Any] = []
        slow = threading.Thread(
            target=lambda: answers.append(ask(one, "toy", {"instances": [[1, 2]]}))
        )
        slow.start()
        while not one.state.in_flight:
            pass
        one.state.registry.put(second)
        assert one.state.registry.retire("toy", 1, 5.0)
        slow.join()
        assert answers == [{"predictions": [[2, 4]]}]
        with one.client() as http:
            states = http.get("/v1/models/toy").json()["model_version_status"]
        assert [state["version"] for state in states] == ["2"]


def test_folders_are_read_again_on_demand() -> None:
    first, second = toy_model(ModelKind.tensors, "toy", 1), toy_model(ModelKind.tensors, "toy", 2)
    with running([first]) as one, one.client() as http:

        def started() -> list[str]:
            return re.findall(
                r'startup_seconds.*phase="total",version="(\d+)"', http.get("/metrics").text
            )

        assert started() == ["1"]
        one.process._renewal = lambda _: ReloadPlan(added=[pending(second)], gone=[("toy", 1)])
        one.process.renew()
        wait(lambda: one.log("retired"))
        assert one.log("retired")[0]["whole"]
        wait(lambda: started() == ["2"])
        states = http.get("/v1/models/toy").json()["model_version_status"]
        assert [state["version"] for state in states] == ["2"]

        def damaged() -> Served:
            gauges = one.state.metrics.gauges("toy", version)
            gauges.add(one.state.metrics.startup, ("toy", str(version), "weights"), 7.0)
            raise DataError(f"version {version} is damaged")

        def status(path: str) -> Any:
            return http.get(f"/v1/models/toy/versions/{path}").json()["model_version_status"]

        for version, phases in ((3, {"total"}), (2, {"total"})):
            # Neither a new version nor new contents of the one that is served.
            asked = ModelLoad(key=("toy", version), open=damaged)
            one.process._renewal = lambda _, asked=asked: ReloadPlan(
                added=[asked], gone=[("toy", 2)]
            )
            one.process.renew()
            wait(lambda version=version: one.log("failed")[-1:] and one.log("failed")[-1]["version"] == version)  # fmt: skip
            (line,) = [line for line in one.log("failed") if line["version"] == version]
            assert (line["model"], line["error"]) == ("toy", f"version {version} is damaged")
            page = http.get("/metrics").text
            found = re.findall(r'startup_seconds\{.*phase="(\w+)",version="(\d)"\}', page)
            assert {phase for phase, number in found if number == "2"} >= phases
            assert {number for _, number in found} == {"2"}
            assert "7.0" not in re.findall(r"startup_seconds\{.* (\S+)", page)
            assert ask(one, "toy", {"instances": [[1, 2]]}) == {"predictions": [[2, 4]]}
        index = {it["version"]: it for it in http.post("/v2/repository/index").json()}
        assert (index["2"]["state"], index["2"]["reason"]) == ("READY", "version 2 is damaged")
        assert index["3"]["state"] == "UNAVAILABLE"
        assert index["3"]["reason"] == "version 3 is damaged"
        failed = {"error_code": "INTERNAL", "error_message": "version 3 is damaged"}
        assert status("3") == [{"version": "3", "state": "END", "status": failed}]
        assert [it["state"] for it in status("2")] == ["AVAILABLE"]
        # Its folder is gone.
        one.process._renewal = lambda _: ReloadPlan(gone=[("toy", 3)])
        one.process.renew()
        wait(lambda: http.get("/v1/models/toy/versions/3").status_code == 404)


def test_new_contents_of_a_version_take_its_place_without_a_dropped_request() -> None:
    first, second = toy_model(ModelKind.tensors, "toy"), toy_model(ModelKind.tensors, "toy")
    with running([first]) as one, one.client() as http:
        first.model.delay_seconds = 0.5
        one.state.control = one.process
        answers: list[Any] = []
        slow = threading.Thread(
            target=lambda: answers.append(ask(one, "toy", {"instances": [[1, 2]]}))
        )
        slow.start()
        wait(lambda: one.state.in_flight)
        one.process._renewal = lambda _: ReloadPlan(added=[pending(second)])
        told = http.post("/v2/repository/models/toy/load")
        assert told.json() == {"name": "toy", "loaded": ["1"], "unchanged": [], "unloaded": []}
        slow.join()
        assert answers == [{"predictions": [[2, 4]]}]
        assert one.log("replaced")[0]["whole"]
        assert (first.ready, one.state.registry.versions("toy")) == (False, [second])
        one.process._renewal = lambda _: ReloadPlan(unchanged=[("toy", 1)])
        told = http.post("/v2/repository/models/toy/load")
        assert told.json() == {"name": "toy", "loaded": [], "unchanged": ["1"], "unloaded": []}
        assert [it["model"] for it in one.log("unchanged")] == ["toy"]


def test_names_of_several_parts() -> None:
    names = ["org/toy", "org", "ready"]
    with running([toy_model(ModelKind.tensors, name) for name in names]) as one:
        triton = tritonclient.http.InferenceServerClient(one.url.removeprefix("http://"))
        client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
        assert [it.id for it in client.models.list()] == names
        for name in names:
            assert client.models.retrieve(name).id == name
            assert triton.is_model_ready(name)
            assert triton.is_model_ready(name, "1")
            assert triton.get_model_metadata(name, "1")["name"] == name
            x = tritonclient.http.InferInput("x", [1, 2], "FP32")
            x.set_data_from_numpy(np.array([[1, 2]], np.float32))
            for version in ("", "1"):
                assert triton.infer(name, [x], version).as_numpy("y").tolist() == [[2, 4]]
            for path in (name, f"{name}/versions/1"):
                assert ask(one, path, {"inputs": [[1, 2]]}) == {"outputs": [[2, 4]]}
        with one.client() as http:
            # As clients that quote the whole name write it.
            quoted = "org%2Ftoy"
            assert http.get(f"/v2/models/{quoted}").json()["name"] == "org/toy"
            assert http.get(f"/v1/models/{quoted}/metadata").status_code == 200
            assert http.get("/v2/models/org/other").status_code == 404
            assert http.get("/v2/models/org/toy/infer").status_code == 405
    with running([echo_model("org/chat")]) as one:
        client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
        made = client.completions.create(model="org/chat", prompt="hello", max_tokens=6)
        assert (made.model, made.choices[0].text) == ("org/chat", "hello")
