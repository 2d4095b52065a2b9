"""Requests that nobody would send on purpose."""

import contextlib
import random
import socket
import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from systolic.serving.http import process
from systolic.serving.http.keys import HttpLimits
from tests.serving.http.running import Running, echo_model, running, wait

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
    wait(lambda: server.state.in_flight == 0)
    with server.client() as http:
        assert http.get("/health").status_code == 200
    assert server.log("failed") == []


ASKED = b'{"model": "echo", "prompt": "hello", "max_tokens": 5}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED
REFUSED = {
    "a header of a megabyte": POST + b"X: " + b"x" * (1 << 20),
    "a hundred thousand headers": POST + b"X: 1\r\n" * 100_000 + b"\r\n",
    "a path of a megabyte": b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "a chunk's size that is no number": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a huge chunk's size": CHUNKED + b"f" * 60 + b"\r\nhello\r\n",
    "a chunk without its end": CHUNKED + b"5\r\nhelloXX0\r\n\r\n",
    "a chunk that is too large for a body": CHUNKED + b"fffffff\r\n" + b"x" * 1000,
    "a length and chunks": POST
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a length of a thousand digits": POST + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n",
    "another transfer encoding": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a folded header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n X: y\r\nA\r\n\r\n",
    "zeros in a header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: \0\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "blank lines": b"\r\n" * 50_000,
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
def test_what_is_no_request_is_refused_or_closed(server: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
        with contextlib.suppress(OSError):
            link.sendall(raw)
            link.shutdown(socket.SHUT_WR)
        found = everything_from(link)
    assert found == b"" or found.startswith(b"HTTP/1.1 4"), found
    answers(server)


def test_requests_in_one_piece_are_answered_in_their_order(server: Running) -> None:
    several = [
        WHOLE,
        WHOLE.replace(b"hello", b"world"),
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
        link.sendall(b"".join(several * 10) + WHOLE.replace(b"Host", b"Connection: close\r\nHost"))
        found = everything_from(link)
    assert found.count(b"HTTP/1.1 200 ") == 31
    places = [found.find(word) for word in (b'"text":"hell', b'"text":"worl', b'"object":"list"')]
    assert places == sorted(places)
    assert found.count(b'"text":"worl') == 10
    # What follows a wrong request is not read as one.
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
        link.sendall(REFUSED["a chunk without its end"] + WHOLE)
        assert everything_from(link).count(b"HTTP/1.1 2") == 0
    answers(server)


def test_silent_connections_do_not_hold_up_others(server: Running) -> None:
    links = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(300)]
    try:
        for number, link in enumerate(links):
            link.sendall(WHOLE[: number % 60])
            if number % 3 == 0:
                link.shutdown(socket.SHUT_WR)
        answers(server)
        # Those whose request is incomplete can still complete it.
        links[58].sendall(WHOLE[58:])
        assert links[58].recv(20).startswith(b"HTTP/1.1 200")
    finally:
        for link in links:
            link.close()
    wait(lambda: not server.process.server_state.connections)


def test_headers_and_bodies_byte_by_byte_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEADER_SECONDS", 0.15)
    with running([echo_model()], limits=HttpLimits(body_seconds=0.15)) as one:
        head = POST + b"Content-Length: 5000\r\n\r\n"
        for raw in (b"", POST + b"X: " + b"x" * 200, head + b"x" * 200):
            with socket.create_connection(("127.0.0.1", one.port), timeout=10) as link:
                begun = raw.startswith(head)
                link.sendall(head if begun else b"")
                with contextlib.suppress(ConnectionError):
                    for byte in raw[len(head) if begun else 0 :]:
                        link.sendall(bytes([byte]))
                        time.sleep(0.002)
                with contextlib.suppress(ConnectionError):
                    found = everything_from(link)
                    assert found.startswith(b"HTTP/1.1 408 ") if begun else found == b""
        # A connection waits for its next request as before.
        with socket.create_connection(("127.0.0.1", one.port), timeout=10) as link:
            for _ in range(2):
                link.sendall(WHOLE)
                answer = b""
                while not answer.endswith(b"}}}"):  # headers and body may come apart
                    answer += link.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200")
                time.sleep(0.25)
        answers(one)


def everything_from(link: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := link.recv(65536):
            found += part
    return found


def answers(server: Running) -> None:
    with server.client() as http:
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", content=ASKED).status_code == 200
    wait(lambda: server.state.in_flight == 0)
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
