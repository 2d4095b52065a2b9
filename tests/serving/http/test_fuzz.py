"""Requests that nobody would send on purpose."""

import random
import socket
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.serving.http.running import Running, wait

STARTS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=a\r\nContent-Length: 99\r\n\r\n--a\r\n",
    b"POST /v2/models/tensors/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 4\r\nContent-Length: 8\r\n\r\n{}  ",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def test_raw_bytes_never_end_it(server: Running) -> None:
    draw = random.Random(0)
    for _ in range(150):
        raw = bytearray(draw.choice(STARTS) + draw.randbytes(draw.randrange(80)))
        for _ in range(draw.randrange(6)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
            link.sendall(bytes(raw))
            link.shutdown(socket.SHUT_WR)
            found = link.recv(64)
            assert found == b"" or not found.startswith(b"HTTP/1.1 5"), bytes(raw)
    wait(lambda: server.desk.in_flight == 0)
    with server.client() as http:
        assert http.get("/health").status_code == 200
    assert server.log("failed") == []


@pytest.mark.slow
def test_no_request_of_the_description_fails_the_server(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    asked = sum(calls(result.ok()) for result in schema.get_all_operations())
    assert asked > 500
    assert server.log("failed") == []


def calls(operation: Any) -> int:
    """How many requests of one route were sent."""
    asked = 0

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        nonlocal asked
        asked += 1
        found = case.call()
        assert found.status_code < 500, (operation.label, found.status_code, found.text)

    send()
    return asked
