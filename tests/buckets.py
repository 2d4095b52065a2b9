"""A real object store server for tests: moto's, which speaks S3."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager

import pytest

PATIENCE_SECONDS = 60


@contextmanager
def s3_server(bucket: str) -> Generator[dict[str, str]]:
    """A server with a bucket; the variables by which it is found."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        server.kill()
        server.wait()
