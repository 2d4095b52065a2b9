"""Readiness, draining, deadlines, refusals, keys, rates, logs, metrics, traces."""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.serving.http.keys import HttpLimits, Keys, TokenBucket, duration, new_key
from systolic.serving.request import ModelKind
from tests.serving.http.running import Running, echo_model, running, toy_model, wait

ASKED = {"model": "echo", "prompt": "hello", "max_tokens": 5}


def test_ready_only_while_the_loop_turns() -> None:
    served = echo_model()
    with running([served], limits=HttpLimits(heartbeat_seconds=0.05)) as one, one.client() as http:
        for path in ("/health", "/readyz", "/livez", "/v2/health/ready", "/v2/health/live"):
            assert http.get(path).status_code == 200
        served.engine.hung = True
        wait(lambda: http.get("/health").status_code == 503)
        assert not http.get("/v2/health/ready").json()["ready"]
        wait(lambda: http.get("/livez").status_code == 503)
        served.engine.hung = False
        wait(lambda: http.get("/health").status_code == 200)


def test_head_is_answered_as_get_without_a_body(server: Running) -> None:
    with server.client() as http:
        for path in ("/", "/health", "/readyz", "/livez", "/v2/health/ready", "/metrics", "/v1/models/echo"):  # fmt: skip
            found, whole = http.head(path), http.get(path)
            assert (found.status_code, found.content) == (200, b""), path
            assert found.headers.get("content-type") == whole.headers.get("content-type")
        assert http.head("/v1/nothing").status_code == 404
        found = http.head("/v1/completions")
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
        paths = http.get("/openapi.json").json()["paths"]
    assert all("head" not in one for one in paths.values())


def test_routes_of_requests_that_are_refused_at_the_door() -> None:
    with running([echo_model(), toy_model(ModelKind.tensors, "toy")]) as one, one.client() as http:
        http.get("/openapi.json")
        http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
        late = {"X-Request-Timeout": "never"}
        http.post("/v1/models/toy/versions/1:predict", json={}, headers=late)
        http.post("/v2/models/toy/versions/1/infer", json={}, headers=late)
        http.get("/v2/models/toy:surprise/infer")
        http.get("/nothing", headers=late)
        page = http.get("/metrics").text
        routes = [line["route"] for line in one.log("request")]
    expected = [
        ("/openapi.json", 200),
        ("/v1/completions", 415),
        ("/v1/models/{name}:predict", 400),
        ("/v2/models/{name}/versions/{version}/infer", 400),
        ("/v2/models/{name}/infer", 405),
        ("unknown", 400),
    ]
    assert routes == [route for route, _ in expected]
    for route, status in expected:
        assert f'http_requests_total{{route="{route}",status="{status}"}} 1.0' in page


def test_not_ready_before_it_is_warm() -> None:
    served = echo_model()
    warm = threading.Event()
    start = served.engine.start
    served.engine.start = lambda: (warm.wait(10), start())
    with running([served], ready=False) as one, one.client() as http:
        assert http.get("/health").status_code == 503
        assert http.get("/livez").status_code == 200
        found = http.post("/v1/completions", json=ASKED)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "not_ready")
        warm.set()
        wait(lambda: http.get("/health").status_code == 200)
        assert [line["model"] for line in one.log("warm")] == ["echo"]


def test_a_model_that_is_ready_answers_while_others_are_not() -> None:
    first, second = echo_model(), toy_model(ModelKind.embedding, "embedding")
    warm, start = threading.Event(), second.model.start
    second.model.start = lambda: (warm.wait(10), start())
    with running([first, second], ready=False) as one, one.client() as http:
        wait(lambda: http.get("/v2/models/echo/ready").status_code == 200)
        assert http.post("/v1/completions", json=ASKED).status_code == 200
        assert http.get("/health").status_code == 503
        assert http.get("/v2/models/embedding/ready").status_code == 503
        unknown = http.get("/v2/models/nothing").json()["error"]
        assert unknown == "there is no model 'nothing'; served are: echo, embedding"
        # Another version of a model that is opened is none that comes.
        body = {"inputs": []}
        later = http.post("/v2/models/embedding/versions/7/infer", json=body)
        assert later.status_code == 404
        assert later.json()["error"] == "embedding has no version 7; served are: 1"
        states = {"echo": True, "embedding": False}
        told = http.get("/v2/health/ready").json()
        assert (told["ready"], {it["name"]: it["ready"] for it in told["models"]}) == (
            False,
            states,
        )
        listed = http.get("/v1/models").json()["data"]
        assert {it["id"]: it["ready"] for it in listed} == states
        index = http.post("/v2/repository/index").json()
        assert [it["state"] for it in index] == ["READY", "LOADING"]
        assert http.get("/v1/models/embedding").status_code == 503
        # What can be judged without the model is.
        for body, status, code in (
            ({"model": "embedding", "input": "x"}, 503, "not_ready"),
            ({"model": "nothing", "input": "x"}, 404, "model_not_found"),
            ({"model": "embedding"}, 400, None),
            ({"input": "x"}, 400, None),
        ):
            found = http.post("/v1/embeddings", json=body)
            assert (found.status_code, found.json()["error"]["code"]) == (status, code), body
        warm.set()
        wait(lambda: http.get("/health").status_code == 200)
        body = {"model": "embedding", "input": "x"}
        assert http.post("/v1/embeddings", json=body).status_code == 200


def test_what_was_accepted_ends_when_the_server_does() -> None:
    with running([echo_model(step_seconds=0.01)]) as one:
        texts: list[str] = []

        def ask() -> None:
            with one.client() as http:
                found = http.post("/v1/completions", json={**ASKED, "max_tokens": 60})
                texts.append(found.json()["choices"][0]["text"])

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        wait(lambda: one.state.in_flight == 4)
        one.process.end()
        wait(lambda: one.state.draining)
        with one.client() as http:
            assert http.get("/health").status_code == 503
            late = http.post("/v1/completions", json=ASKED)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            assert late.headers["retry-after"] == "5"
        for thread in asking:
            thread.join()
        assert [len(text) for text in texts] == [50] * 4
    assert one.log("ended")[0]["cut"] == 0


def test_streams_that_outlast_the_grace_time_end_with_an_error() -> None:
    with running([echo_model(step_seconds=0.01)], grace_seconds=0.1) as one, one.client() as http:
        body = {**ASKED, "max_tokens": 4000, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            one.process.end()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place_at_once(server: Running, stream: bool) -> None:
    engine = server.state.registry.newest()[0].engine
    before = len(engine.everything)
    body = json.dumps({**ASKED, "max_tokens": 4000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(head.encode() + body)
        wait(lambda: len(engine.everything) > before and engine.everything[-1].done > 3)
        left = time.monotonic()
    found = engine.everything[-1]
    wait(found.cancelled.is_set)
    assert found.cancelled_at - left < 1.0
    wait(lambda: server.state.in_flight == 0)
    wait(lambda: server.log("request")[-1]["status"] == 499)


def test_a_batch_request_is_dropped_when_its_client_leaves() -> None:
    served = toy_model(ModelKind.tensors, "toy")
    served.model.delay_seconds = 0.3
    with running([served]) as one:
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.1) as http:
            http.post(f"{one.url}/v1/models/toy:predict", json={"instances": [[1, 2]]})
        wait(served.model.cancelled.is_set)


def test_deadlines(server: Running) -> None:
    body = {**ASKED, "max_tokens": 4000}
    with server.client(headers={"X-Request-Timeout": "0.1"}) as http:
        found = http.post("/v1/completions", json=body)
        assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline")
        assert found.headers["x-should-retry"] == "false"
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text
        assert '"code":"deadline"' in streamed.split("\n\n")[-2]
        wrong = http.post("/v1/completions", json=ASKED, headers={"X-Request-Timeout": "nan"})
        assert wrong.status_code == 400
    limits, headers = HttpLimits(deadline_seconds=0.1), {"X-Request-Timeout": "100"}
    with running([echo_model()], limits=limits) as one, one.client(headers=headers) as http:
        assert http.post("/v1/completions", json=body).status_code == 504


def test_a_full_queue_says_when_to_come_back() -> None:
    with running([echo_model(most=0)]) as one, one.client() as http:
        for stream in (False, True):
            found = http.post("/v1/completions", json={**ASKED, "stream": stream})
            assert (found.status_code, found.headers["retry-after"]) == (429, "2")
            assert found.headers["x-should-retry"] == "true"
        with (
            openai.OpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(model="echo", prompt="x")


def test_choices_that_are_refused_cancel_the_others() -> None:
    served = echo_model(most=2)
    with running([served]) as one, one.client() as http:
        found = http.post("/v1/completions", json={**ASKED, "n": 3, "max_tokens": 4000})
        assert found.status_code == 429
        wait(lambda: not served.engine.streams)


def test_more_requests_than_are_answered_at_once() -> None:
    slow, body = echo_model(step_seconds=0.01), {**ASKED, "max_tokens": 4000, "stream": True}
    with (
        running([slow], limits=HttpLimits(requests=1)) as one,
        one.client() as http,
        one.client() as other,
        http.stream("POST", "/v1/completions", json=body),
    ):
        found = other.post("/v1/completions", json=ASKED)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "overloaded")
        assert other.get("/health").status_code == 200


def test_bodies_that_are_too_large_or_too_slow() -> None:
    limits = HttpLimits(body_bytes=1000, body_seconds=0.2)
    with running([echo_model()], limits=limits) as one, one.client() as http:
        assert http.post("/v1/completions", content=b"x" * 1001).status_code == 413
        # Without a length, in chunks.
        assert http.post("/v1/completions", content=iter([b"x" * 600] * 2)).status_code == 413
        assert http.post("/v2/models/x/infer", content=b"x" * 1001).json() == {
            "error": "the body is larger than this server's limit of 1000 bytes; send less"
        }
        with socket.create_connection(("127.0.0.1", one.port)) as link:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab")
            assert link.recv(100).startswith(b"HTTP/1.1 408 ")


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first, second = new_key(file, "one"), new_key(file, "two")
    assert file.stat().st_mode & 0o777 == 0o600
    assert first not in file.read_text()
    with (
        running([echo_model()], keys=Keys(file=file, fresh_seconds=0.05)) as one,
        one.client() as http,
    ):
        for path in ("/health", "/metrics", "/v2/health/live"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer sk-no"}, {"Authorization": f"Basic {first}"}):
            found = http.get("/v1/models", headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get("/v2/models/echo").json()["error"].startswith("no API key was given")
        for key in (first, second):
            assert (
                http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
                == 200
            )
        assert http.get("/v1/models", headers={"X-API-Key": first}).status_code == 200
        with (
            openai.OpenAI(base_url=f"{one.url}/v1", api_key="no") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        assert {line.get("key") for line in one.log("request")} == {None, "one", "two"}
        # A removed key is refused without a restart.
        file.write_text(file.read_text().splitlines()[1])
        gone = {"Authorization": f"Bearer {first}"}
        wait(lambda: http.get("/v1/models", headers=gone).status_code == 401)
        file.unlink()
        last = {"X-API-Key": second}
        wait(lambda: http.get("/v1/models", headers=last).status_code == 401)
        (warned,) = one.log("warning")
        assert "all requests are refused" in warned["message"]


def test_a_revoked_key_is_refused_whatever_else_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first, second = new_key(file, "first"), new_key(file, "second")
    keys = Keys(file=file, fresh_seconds=0.0)
    told: list[str] = []

    def names() -> list[str | None]:
        return [
            key and key.name for key in (keys.find(one, told.append) for one in (first, second))
        ]

    assert (names(), told) == (["first", "second"], [])
    # Beside a typo in another line.
    kept = file.read_text().splitlines()[1]
    file.write_text(f"{kept}\nthird sha256:oops\n")
    assert names() == [None, "second"]
    assert names() == [None, "second"]
    (line,) = told
    assert line == f"{file}: line 2 is no key; lines are NAME sha256:HEX [rate=N] [tokens=N]"
    # The last one.
    file.write_text("# all are revoked\n")
    assert (names(), told[1:]) == ([None, None], [f"{file} has no key; all requests are refused"])
    third = new_key(file, "third")
    added = keys.find(third, told.append)
    assert added is not None
    assert added.name == "third"
    # A file that others can write can hold their keys.
    file.write_text(f"{kept}\n")
    os.chmod(file, 0o666)
    assert names() == [None, None]
    assert "writable by all" in told[2]
    os.chmod(file, 0o600)
    assert names() == [None, "second"]
    file.unlink()
    assert (names(), len(told)) == ([None, None], 4)
    assert told[3].startswith(f"{file} can't be read")
    file.write_text(f"{kept}\n")
    os.chmod(file, 0o600)
    assert names() == [None, "second"]


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(NotFoundError, match="--new-key NAME"):
        Keys(file=file)
    with pytest.raises(OptionError, match="letters"):
        new_key(file, "a b")
    new_key(file, "a")
    with pytest.raises(OptionError, match="has a key a"):
        new_key(file, "a")
    os.chmod(file, 0o666)
    with pytest.raises(DataError, match="writable by all"):
        Keys(file=file)
    os.chmod(file, 0o600)
    file.write_text("nonsense\n")
    with pytest.raises(DataError, match="line 1"):
        Keys(file=file)


def test_rates_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "one")
    file.write_text(file.read_text().strip() + " rate=2\n")
    with running([echo_model()], keys=Keys(file=file, rate_per_minute=1000)) as one:
        with one.client(headers={"Authorization": f"Bearer {key}"}) as http:
            found = [http.get("/v1/models") for _ in range(3)]
        assert [one.status_code for one in found] == [200, 200, 429]
        # A new one comes every 30 s.
        assert 28 <= int(found[2].headers["retry-after"]) <= 30
    assert [one.headers["x-ratelimit-remaining-requests"] for one in found] == ["1", "0", "0"]
    assert found[0].headers["x-ratelimit-limit-requests"] == "2"
    assert 29 < float(found[0].headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
    bucket = TokenBucket(per_minute=60, left=1.0, at=100.0)
    assert (bucket.take(100.0), bucket.take(100.25)) == (0.0, 0.75)
    assert bucket.take(101.0) == 0.0


def test_token_rates_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    own, common = new_key(file, "own"), new_key(file, "common")
    lines = file.read_text().splitlines()
    file.write_text(f"{lines[0]} rate=100 tokens=20\n{lines[1]}\n")
    with running([echo_model()], keys=Keys(file=file, tokens_per_minute=1000)) as one:
        client = openai.OpenAI(base_url=f"{one.url}/v1", api_key=own, max_retries=0)
        # 6 tokens of a prompt that counts once, and 2 x 5 new ones; the key has 20.
        made = client.completions.with_raw_response.create(**ASKED, n=2)
        assert made.headers["x-ratelimit-limit-tokens"] == "20"
        assert made.headers["x-ratelimit-remaining-tokens"] == "4"
        # Some are left, so that the next one is taken, and leaves a debt of 7.
        list(client.completions.create(**ASKED, stream=True))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**ASKED)
        assert "used up its tokens" in caught.value.message
        # One token comes every 3 s.
        assert 21 <= int(caught.value.response.headers["retry-after"]) <= 24
        other = openai.OpenAI(base_url=f"{one.url}/v1", api_key=common, max_retries=0)
        found = other.completions.with_raw_response.create(**ASKED)
        assert found.headers["x-ratelimit-remaining-tokens"] == "989"
        assert "x-ratelimit-limit-requests" not in found.headers


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.012, "12ms"), (1.5, "1.5s"), (360.0, "6m0s"), (0.0, "0ms")]
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_logs_hold_no_prompts_unless_asked(server: Running) -> None:
    with server.client() as http:
        http.post("/v1/completions", json={**ASKED, "prompt": "a secret"})
    line = server.log("request")[-1]
    assert "secret" not in server.lines.getvalue()
    assert (line["route"], line["status"], line["model"]) == ("/v1/completions", 200, "echo")
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish"]) == (9, 5, "length")
    with running([echo_model()], log_prompts=True) as one, one.client() as http:
        http.post("/v1/completions", json={**ASKED, "prompt": "a secret"})
        assert one.log("request")[-1]["prompt"] == "a secret"


def test_metrics() -> None:
    with running([echo_model()]) as one, one.client() as http:
        http.post("/v1/completions", json=ASKED)
        http.get("/v1/nothing")
        text = http.get("/metrics").text
    at = '{engine="0",model_name="echo",version="1"}'
    for line in (
        f"systolic:num_requests_running{at} 0.0",
        f"systolic:num_requests_waiting{at} 0.0",
        f"systolic:kv_cache_usage_perc{at} 0.0",
        f"systolic:prompt_tokens_total{at} 6.0",
        f"systolic:generation_tokens_total{at} 5.0",
        f"systolic:padding_tokens_total{at} 15.0",
        f"systolic:useful_tokens_total{at} 5.0",
        f"systolic:recompile_after_ready_total{at} 0.0",
        f"systolic:time_to_first_token_seconds_count{at} 1.0",
        'systolic:bucket_selected_total{bucket="echo",engine="0",model_name="echo",version="1"} 5.0',
        'systolic:request_success_total{engine="0",finished_reason="length",model_name="echo",version="1"} 1.0',
        'systolic:http_requests_total{route="/v1/completions",status="200"} 1.0',
        'systolic:http_requests_total{route="unknown",status="404"} 1.0',
        "systolic:ready 1.0",
    ):
        assert line in text, line


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Spans of this test. The provider stays the process's: what is not stopped keeps the spans of later tests."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    yield spans
    spans.shutdown()
    spans.clear()


def test_spans_of_requests(server: Running, spans: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with server.client(headers={"traceparent": parent}) as http:
        http.post("/v1/completions", json={**ASKED, "n": 2})
    *phases, span = spans.get_finished_spans()
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    found: Any = span.attributes
    assert found["http.response.status_code"] == 200
    assert (found["gen_ai.request.model"], found["gen_ai.usage.output_tokens"]) == ("echo", 10)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    # Each text's phases follow each other within the request.
    assert [one.name for one in phases] == ["queue", "prefill", "decode"] * 2
    for one in phases:
        assert one.parent is not None
        assert one.parent.span_id == span.context.span_id
    for before, after in itertools.pairwise(phases[:3]):
        assert before.end_time == after.start_time
    first, last = phases[0].start_time, phases[2].end_time
    assert None not in (first, last)
    assert first < last


def test_the_first_byte_follows_the_first_token(server: Running) -> None:
    engine = server.state.registry.newest()[0].engine
    late = []
    with server.client() as http:
        for _ in range(30):
            body = {**ASKED, "max_tokens": 3, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_raw())
                late.append(time.monotonic() - engine.everything[-1].made[0])
    # The client's own reading is in it. A tenth of a second would be Nagle's wait for an acknowledgement.
    assert sorted(late)[len(late) // 2] < 0.04


def test_a_stream_that_was_read_to_its_end_is_no_cancel() -> None:
    with running([echo_model()]) as one:
        for _ in range(20):
            # The official client leaves at [DONE], before the connection's last byte.
            with openai.OpenAI(base_url=f"{one.url}/v1", api_key="none") as client:
                list(client.completions.create(**ASKED, stream=True))
        wait(lambda: len(one.log("request")) == 20)
        assert {line["status"] for line in one.log("request")} == {200}
