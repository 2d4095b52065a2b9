"""A real object store server for tests: moto's, which speaks S3, or another one that is running.

``SYSTOLIC_TEST_S3=http://KEY:SECRET@127.0.0.1:7480`` names the other one, such as Ceph's gateway (Debian's ``radosgw``), which
unlike moto checks signatures. Buckets of the tests are emptied there.
"""

import atexit
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import pytest

PATIENCE_SECONDS = 60


@contextmanager
def s3_server(bucket: str) -> Generator[dict[str, str]]:
    """A server with an empty bucket alone; the variables by which it is found. It starts once and ends with this process."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    if given := os.environ.get("SYSTOLIC_TEST_S3"):
        yield _emptied(given, bucket)
        return
    url = _started()
    for path, method in (("moto-api/reset", "POST"), (bucket, "PUT")):
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", method=method)):
            pass
    yield {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


@cache
def _started() -> str:
    """Address of this process's server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    @atexit.register
    def end() -> None:
        server.kill()
        server.wait()

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url):
                return url
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _emptied(address: str, bucket: str) -> dict[str, str]:
    """An empty bucket of a server that runs already; the variables by which it is found."""
    import boto3  # comes with moto

    parts = urllib.parse.urlsplit(address)
    url = f"{parts.scheme}://{parts.hostname}:{parts.port}"
    found = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": parts.username or "",
        "AWS_SECRET_ACCESS_KEY": parts.password or "",
    }
    made = boto3.resource(
        "s3",
        endpoint_url=url,
        aws_access_key_id=parts.username,
        aws_secret_access_key=parts.password,
        region_name="us-east-1",
    ).Bucket(bucket)
    made.create()
    made.objects.delete()
    return found
