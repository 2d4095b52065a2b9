"""Signals and TLS, with a server in a process of its own."""

import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from systolic.core.errors import OptionError
from systolic.serving.http.process import Address
from tests.serving.http.running import wait

ASKED: dict[str, Any] = {"model": "echo", "prompt": "hello", "max_tokens": 100}


@contextmanager
def process(*words: object) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """A server of the echo that listens; its port."""
    line = [sys.executable, "-m", "tests.serving.http.echo_process", *map(str, words)]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield int(server.stdout.readline()), server
    finally:
        server.kill()
        server.communicate()


def events(server: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """The log of a server that has ended."""
    assert server.stderr is not None
    return [json.loads(line) for line in server.stderr.read().splitlines()]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.slow
def test_streams_in_flight_end_whole_after_a_signal_over_tls(
    certificate: tuple[Path, Path],
) -> None:
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    with process(0.01, 60, *certificate) as (port, server):
        url = f"https://127.0.0.1:{port}"
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health")
        with httpx.Client(verify=trust, base_url=url) as http:
            wait(lambda: http.get("/health").status_code == 200)
            client = openai.OpenAI(
                base_url=f"{url}/v1", api_key="x", max_retries=0, http_client=http
            )
            texts, begun = [""] * 3, threading.Barrier(4)

            def read(number: int) -> None:
                for count, part in enumerate(client.completions.create(**ASKED, stream=True)):
                    texts[number] += part.choices[0].text
                    if count == 0:
                        begun.wait(20)

            readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
            for reader in readers:
                reader.start()
            begun.wait(20)  # Each stream has begun, and none has ended.
            server.send_signal(signal.SIGTERM)
            wait(lambda: http.get("/health").status_code == 503)
            with pytest.raises(openai.InternalServerError, match="ending"):
                client.completions.create(**ASKED)
            for reader in readers:
                reader.join()
        # A hundred tokens, of which every sixth has no text.
        assert [text[:10] for text in texts] == ["hellohello"] * 3
        assert [len(text) for text in texts] == [83] * 3
        assert server.wait(20) == 0
        log = events(server)
    assert [one["event"] for one in log][:4] == ["listening", "warm", "ready", "draining"]
    assert log[-1]["event"] == "ended"
    assert (log[3]["in_flight"], log[-1]["cut"]) == (3, 0)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(first: signal.Signals) -> None:
    # The stream would take 40 s, and the grace time allows it.
    with process(0.01, 600) as (port, server), httpx.Client() as http:
        url = f"http://127.0.0.1:{port}"
        wait(lambda: http.get(f"{url}/health").status_code == 200)
        body = {**ASKED, "max_tokens": 4000, "stream": True}
        with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            parts = answer.iter_raw()
            next(parts)
            server.send_signal(first)
            with httpx.Client() as other:
                wait(lambda: other.get(f"{url}/health").status_code == 503)
            server.send_signal(signal.SIGINT)
            server.wait(20)
            # It says so to whoever still reads.
            last = [line for line in b"".join(parts).decode().split("\n\n") if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"


def test_certificates_that_can_not_be_used_are_one_line(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    text, other, locked = (tmp_path / name for name in ("text.pem", "other.pem", "locked.pem"))
    text.write_text("no certificate")
    made = "openssl genpkey -algorithm ec -pkeyopt ec_paramgen_curve:prime256v1 -out"
    subprocess.run([*made.split(), other], check=True, capture_output=True)
    encrypt = "openssl pkey -aes256 -passout pass:secret -in"
    subprocess.run([*encrypt.split(), key, "-out", locked], check=True, capture_output=True)
    Address(port=0, grace_seconds=0, tls_cert=cert, tls_key=key)
    for one, two, told in (
        (text, key, "give a certificate chain and its private key, both PEM"),
        (key, cert, "give a certificate chain and its private key, both PEM"),
        (cert, other, "the key belongs to another certificate"),
        (cert, locked, "is encrypted, and a server has nobody to ask"),
    ):
        with pytest.raises(OptionError, match=told):
            Address(port=0, grace_seconds=0, tls_cert=one, tls_key=two)
