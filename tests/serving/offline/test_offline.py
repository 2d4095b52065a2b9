"""Each line of an input has one result, as the server would have answered it, whatever else is in the file."""

import asyncio
import gzip
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.serving.offline.batch import BatchRun
from systolic.serving.offline.files import (
    BatchInput,
    BatchOutput,
    BatchProgress,
    answer_line,
    answered_line,
    result_id,
)
from systolic.serving.registry import Served
from systolic.serving.request import ModelKind
from tests.serving.http.running import Running, echo_model, toy_model

CHAT: Any = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
TEXT: Any = {"model": "echo", "prompt": "hello", "max_tokens": 5}


def line(name: str | None, url: str, body: Any, **more: Any) -> str:
    given = {} if name is None else {"custom_id": name}
    return json.dumps({**given, "method": "POST", "url": url, "body": body, **more})


def batch(folder: Path, lines: list[str], served: Served | None = None) -> list[Any]:
    """The results of some lines, by a run that has to answer them all."""
    (folder / "in.jsonl").write_text("\n".join(lines))
    run(folder, served or echo_model())
    return results(folder)


def results(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def run(folder: Path, served: Served, in_flight: int = 4) -> BatchProgress:
    output = BatchOutput.open(folder / "out.jsonl", BatchInput.read(folder / "in.jsonl"))
    warned: list[str] = []
    try:
        served.start()
        made = BatchRun(output, served, in_flight, warned.append)
        asyncio.run(made.run(lambda _: None))
        return made.progress
    finally:
        served.drain(0.0)
        output.close()
        assert warned == []


@pytest.mark.parametrize("form", ["marked", "wide", "compressed"])
def test_a_first_line_behind_a_byte_order_mark_is_a_request(form: str, tmp_path: Path) -> None:
    """As editors of Windows write it; also in UTF-16, and compressed."""
    text = "\n".join(line(name, "/v1/completions", TEXT) for name in ("first", "second"))
    content = {
        "marked": b"\xef\xbb\xbf" + text.encode(),
        "wide": text.encode("utf-16"),
        "compressed": gzip.compress(text.encode()),
    }[form]
    (tmp_path / "in.jsonl").write_bytes(content)
    run(tmp_path, echo_model())
    assert sorted(one["custom_id"] for one in results(tmp_path)) == ["first", "second"]
    assert {one["response"]["status_code"] for one in results(tmp_path)} == {200}
    # The same command again has nothing left to do.
    assert run(tmp_path, echo_model()).earlier == 2


def test_results_are_the_answers_of_the_routes(tmp_path: Path) -> None:
    lines = [
        line("chat", "/v1/chat/completions", CHAT),
        line("text", "/v1/completions", {**TEXT, "n": 3, "logprobs": 1}),
        "",
        json.dumps(CHAT),
        json.dumps({"custom_id": "own", **TEXT}),
    ]
    found = {one["custom_id"]: one for one in batch(tmp_path, lines)}
    assert sorted(found) == ["chat", "line-4", "own", "text"]
    for one in found.values():
        assert set(one) == {"id", "custom_id", "response", "error"}
        assert set(one["response"]) == {"status_code", "request_id", "body"}
        assert (one["response"]["status_code"], one["error"]) == (200, None)
    assert len({one["id"] for one in found.values()}) == 4
    chat = ChatCompletion.model_validate(found["chat"]["response"]["body"], strict=True)
    assert chat.choices[0].message.content == "<user"
    text = Completion.model_validate(found["text"]["response"]["body"], strict=True)
    assert [one.text for one in text.choices] == ["hell"] * 3
    assert (
        found["line-4"]["response"]["body"]["choices"]
        == found["chat"]["response"]["body"]["choices"]
    )


def test_vectors_and_tensors(tmp_path: Path) -> None:
    body = {"model": "embedding", "input": ["four", "by"]}
    (tmp_path / "vectors").mkdir()
    served = toy_model(ModelKind.embedding, "embedding")
    (one,) = batch(tmp_path / "vectors", [line("e", "/v1/embeddings", body)], served)
    vectors = CreateEmbeddingResponse.model_validate(one["response"]["body"], strict=True)
    assert [row.embedding for row in vectors.data] == [[4, 0, 0, 3], [2, 0, 0, 3]]
    lines = [
        line("v2", "/v2/models/tensors/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}),
        line("tf", "/v1/models/tensors:predict", {"instances": [[1, 2]]}),
        line("raw", "/v2/models/tensors/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}], "parameters": {"binary_data_output": True}}),
    ]  # fmt: skip
    found = {
        one["custom_id"]: one
        for one in batch(tmp_path, lines, toy_model(ModelKind.tensors, "tensors"))
    }
    assert found["v2"]["response"]["body"]["outputs"][0]["data"] == [2, 4]
    assert found["tf"]["response"]["body"] == {"predictions": [[2, 4]]}
    assert found["raw"]["error"]["code"] == "invalid_answer"


def test_numbers_that_json_lacks_are_results_that_a_second_run_reads(tmp_path: Path) -> None:
    wide = {"instances": [[1e38, 1], [3e38, -3e38]]}
    lines = [line("tf", "/v1/models/tensors:predict", wide)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run(tmp_path, toy_model(ModelKind.tensors, "tensors"))
    written = (tmp_path / "out.jsonl").read_text()
    assert "[1e999, -1e999]" in written or "[1e999,-1e999]" in written
    (one,) = results(tmp_path)
    assert one["response"]["body"]["predictions"][1] == [math.inf, -math.inf]
    assert run(tmp_path, toy_model(ModelKind.tensors, "tensors")).earlier == 1
    (named,) = [answer_line(result_id(1, 5), "x", 200, "r", b'{"predictions": [NaN, "NaN"]}')]
    assert json.loads(named, parse_constant=pytest.fail)["response"]["body"] == {
        "predictions": [None, "NaN"]
    }
    assert answered_line(named) is not None


WRONG = {
    "{": "invalid_line",
    "[1]": "invalid_line",
    '{"custom_id": 7}': "invalid_line",
    '{"custom_id": "\\ud800"}': "invalid_line",
    "[" * 100_000: "invalid_line",
    "\udcff": "invalid_line",
    line("a", "/v1/completions", TEXT, method="GET"): "invalid_method",
    json.dumps({"custom_id": "b", "body": TEXT}): "invalid_url",
    line("c", "http://x/v1/completions", TEXT): "invalid_url",
    json.dumps({"custom_id": "d", "url": "/v1/completions"}): "invalid_body",
    line("e", "/v1/completions", {**TEXT, "stream": True}): "invalid_body",
    json.dumps({**CHAT, "prompt": "two"}): "invalid_url",
    line("f", "/v1/completions", {**TEXT, "model": "gpt-4"}): 404,
    line("g", "/v1/nothing", TEXT): 404,
    line("h", "/v1/completions", {**TEXT, "prompt": "x" * 5000}): 400,
    line("i", "/v1/completions", {**TEXT, "temperature": "hot"}): 400,
    line("j", "/v1/completions", None): 400,
    line("k", "/v1/completions", {**TEXT, "max_tokens": -1}): 400,
    line("l", "/v1/embeddings", {"input": "x"}): 400,
    line("m", "/metrics", TEXT): 405,
}


def test_wrong_lines_have_results_and_stop_nothing(tmp_path: Path) -> None:
    lines = [*WRONG, line("good", "/v1/completions", TEXT)]
    (tmp_path / "in.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    seen = run(tmp_path, echo_model())
    assert (seen.answered, seen.failed, seen.lines) == (len(lines), len(WRONG), len(lines))
    found = {int(one["id"].split("_")[2]): one for one in results(tmp_path)}
    assert sorted(found) == list(range(1, len(lines) + 1))
    for number, expected in enumerate(WRONG.values(), 1):
        one = found[number]
        if isinstance(expected, str):
            assert (one["response"], one["error"]["code"]) == (None, expected), one
        else:
            assert (one["response"]["status_code"], one["error"]) == (expected, None), one
            assert "message" in one["response"]["body"]["error"]


def test_errors_are_those_of_the_server(tmp_path: Path, server: Running) -> None:
    bodies = [{**TEXT, "model": "gpt-4"}, {**TEXT, "prompt": []}, {**TEXT, "suffix": "x"}, TEXT]
    lines = [line(str(n), "/v1/completions", body) for n, body in enumerate(bodies)]
    found = {one["custom_id"]: one["response"] for one in batch(tmp_path, lines)}
    with server.client() as http:
        for number, body in enumerate(bodies):
            online = http.post("/v1/completions", json=body)
            mine, other = found[str(number)]["body"], online.json()
            assert found[str(number)]["status_code"] == online.status_code
            for changing in ("id", "created"):
                mine.pop(changing, None), other.pop(changing, None)
            if number == 0:  # It names the models that are served.
                mine, other = mine["error"]["code"], other["error"]["code"]
            assert mine == other


def test_more_choices_than_the_queue_holds_wait_for_their_turn(tmp_path: Path) -> None:
    lines = [line(str(n), "/v1/completions", {**TEXT, "n": 6}) for n in range(8)]
    lines.append(line("never", "/v1/completions", {**TEXT, "n": 9}))
    found = {
        one["custom_id"]: one["response"] for one in batch(tmp_path, lines, echo_model(most=8))
    }
    assert found.pop("never")["status_code"] == 429
    assert {one["status_code"] for one in found.values()} == {200}
    assert len(found) == 8


def test_a_model_that_stops_leaves_its_lines_for_the_next_run(tmp_path: Path) -> None:
    lines = [line(str(n), "/v1/completions", {**TEXT, "max_tokens": 40}) for n in range(40)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    served = echo_model(step_seconds=0.001)
    engine = served.engine
    submit = engine.submit

    def failing(request: Any) -> Any:
        if len(engine.everything) == 20:
            engine.stop()
            engine.ready = False
        return submit(request)

    engine.submit = failing
    with pytest.raises(RunError, match=r"echo stopped before line .* run the same command again"):
        run(tmp_path, served)
    before = len(results(tmp_path))
    assert 0 < before < 40
    seen = run(tmp_path, echo_model())
    assert (seen.earlier, seen.answered, seen.failed) == (before, 40, 0)
    assert sorted(int(one["custom_id"]) for one in results(tmp_path)) == list(range(40))


def test_an_empty_input(tmp_path: Path) -> None:
    assert batch(tmp_path, []) == []
    assert batch(tmp_path, ["", "  ", ""]) == []


@pytest.mark.parametrize("cut", [1, 2, 40, 300])
def test_a_last_line_that_was_cut_is_asked_again(tmp_path: Path, cut: int) -> None:
    lines = [line(str(n), "/v1/completions", TEXT) for n in range(3)]
    batch(tmp_path, lines)
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    names = [one["custom_id"] for one in batch(tmp_path, lines)]
    assert sorted(names) == ["0", "1", "2"]
    # Of a loss of power: the file is as long as it was and ends with zeros.
    out.write_bytes(whole[: -cut - 1] + bytes(cut + 1))
    assert sorted(one["custom_id"] for one in batch(tmp_path, lines)) == ["0", "1", "2"]
    out.write_bytes(whole[:20])
    assert sorted(one["custom_id"] for one in batch(tmp_path, lines)) == ["0", "1", "2"]


def test_more_lines_and_lines_whose_results_were_deleted_are_asked(tmp_path: Path) -> None:
    lines = [line(str(n), "/v1/completions", TEXT) for n in range(3)]
    ids = [one["id"] for one in batch(tmp_path, lines)]
    out = tmp_path / "out.jsonl"
    kept = out.read_text().splitlines(keepends=True)
    out.write_text("".join(kept[1:]))
    found = batch(tmp_path, [*lines, line("new", "/v1/completions", TEXT)])
    assert sorted(one["id"] for one in found[:3]) == sorted(ids)
    assert [one["custom_id"] for one in found] != ["0", "1", "2"]
    assert len(found) == 4


def refused(folder: Path, kind: type[Exception], told: str) -> None:
    before = (folder / "out.jsonl").read_bytes()
    with pytest.raises(kind, match=told):
        BatchOutput.open(folder / "out.jsonl", BatchInput.read(folder / "in.jsonl"))
    assert (folder / "out.jsonl").read_bytes() == before


def test_an_output_of_something_else_is_refused_and_untouched(tmp_path: Path) -> None:
    lines = [line(str(n), "/v1/completions", TEXT) for n in range(3)]
    batch(tmp_path, lines)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    whole = out.read_text()
    source.write_text("\n".join([lines[1], lines[0], lines[2]]))
    refused(tmp_path, DataError, "answers another line [12] than")
    source.write_text(lines[0])
    refused(tmp_path, DataError, "answers another line [23] than")  # the first that was ready
    source.write_text("\n".join(lines))
    out.write_text(whole + whole.splitlines()[0] + "\n")
    refused(tmp_path, DataError, "a second time")
    for other in (b"text", b"text\n", b'{"id": "x"}\n', b"\x7fELF\0\0\0\0", bytes(9), b'{"a": 1'):
        out.write_bytes(other)
        refused(tmp_path, DataError, "line 1 is no result")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(NotFoundError, match="cannot be read"):
        BatchInput.read(source)
    same = line("same", "/v1/completions", TEXT)
    source.write_text(f"{same}\n\n{line('x', '/v1/completions', TEXT)}\n{same}")
    with pytest.raises(DataError, match="lines 1 and 4 have the custom_id 'same'"):
        BatchInput.read(source)
    source.write_text(same)
    lines = BatchInput.read(source)
    with pytest.raises(OptionError, match="is the input"):
        BatchOutput.open(source, lines)
    with pytest.raises(OptionError, match="is a directory"):
        BatchOutput.open(tmp_path, lines)
    first = BatchOutput.open(out, lines)
    with pytest.raises(RunError, match="another process writes"):
        BatchOutput.open(out, lines)
    first.close()
    source.write_text(same.replace("hello", "world"))
    with pytest.raises(RunError, match=r"line 1 of .* has changed"):
        next(lines.lines(bytearray(2)))


def test_lines_are_not_held_in_memory(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    body = line("NUMBER", "/v1/completions", {**TEXT, "prompt": "x" * 100})
    with source.open("w") as file:
        for number in range(20_000):
            file.write(body.replace("NUMBER", str(number)) + "\n")
    tracemalloc.start()
    lines = BatchInput.read(source)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines.count == 20_000
    # 8 bytes a line stay; 24 more while ids are compared.
    assert held < 20_000 * 12 + 20_000
    assert peak < 20_000 * 60
