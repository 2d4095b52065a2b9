"""TensorFlow Serving's REST as its clients write it."""

import base64
import json
import math
import re
from typing import Any

import pytest

from systolic.core.errors import DataError
from systolic.serving.batch.request import ModelKind
from systolic.serving.served import Served
from tests.serving.http.running import Running, running, toy_model, wait


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
        import threading

        answers: list[Any] = []
        slow = threading.Thread(
            target=lambda: answers.append(ask(one, "toy", {"instances": [[1, 2]]}))
        )
        slow.start()
        while not one.desk.in_flight:
            pass
        one.desk.shelf.put(second)
        assert one.desk.shelf.retire("toy", 1, 5.0)
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
        one.process._renewal = lambda _: ([lambda: second], [("toy", 1)])
        one.process.renew()
        wait(lambda: one.log("retired"))
        assert one.log("retired")[0]["whole"]
        wait(lambda: started() == ["2"])
        states = http.get("/v1/models/toy").json()["model_version_status"]
        assert [state["version"] for state in states] == ["2"]

        def damaged() -> Served:
            raise DataError("version 3 is damaged")

        one.process._renewal = lambda _: ([damaged], [("toy", 2)])
        one.process.renew()
        wait(lambda: one.log("failed"))
        assert ask(one, "toy", {"instances": [[1, 2]]}) == {"predictions": [[2, 4]]}
