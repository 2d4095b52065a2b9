"""Place of a TPU machine among the others, which ``host.sh`` takes from a metadata server with recorded answers."""

import http.server
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launching.made import executable
from tests.launching.test_tpu_vm import host

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "platforms.json").read_text())
NAMES = ("worker-network-endpoints", "tpu-env", "agent-worker-number")

pytestmark = pytest.mark.skipif(
    not (shutil.which("setsid") and shutil.which("curl")), reason="a Linux script with curl"
)


@contextmanager
def metadata(machine: str, failing: str = "", status: int = 500) -> Iterator[str]:
    """Serves the metadata of a recorded machine, with an error for one attribute; yields the address."""
    attributes = RECORDED[machine]["metadata"]

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, name = self.path.partition("/computeMetadata/v1/instance/attributes/")
            known = name in attributes and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(status if name == failing else 200 if known else 404)
            self.end_headers()
            self.wfile.write(attributes[name].encode() if known and name != failing else b"Error")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def start(folder: Path, server: str) -> subprocess.CompletedProcess[str]:
    """Runs ``host.sh install`` and ``start`` with the machine's own curl, which tries once."""
    command, environ = host(folder, {})
    # Without the pauses between its tries.
    executable(folder / "curl", f'#!/bin/sh\nexec {shutil.which("curl")} "$@" --retry 0\n')
    environ |= {"GCE_METADATA_IP": server, "NO_PROXY": "*"}
    steps = [*command, "install start"]
    return subprocess.run(steps, env=environ, text=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("cloud-tpu", "['10.130.0.10:8476', '2', '1', 'tpu,cpu']"),
        ("cloud-tpu-slices", "['10.130.0.10:8476', '4', '2', 'tpu,cpu']"),
        ("cloud-tpu-one", "[None, None, None, 'tpu,cpu']"),
    ],
)
def test_a_machine_finds_its_place(tmp_path: Path, machine: str, expected: str) -> None:
    with metadata(machine) as server:
        done = start(tmp_path, server)
    assert done.returncode == 0, done.stderr
    while not (tmp_path / "code_of_exit").exists():
        time.sleep(0.02)
    assert expected in (tmp_path / "host.log").read_text()


@pytest.mark.parametrize("status", [404, 403])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_fails_ends_the_script(tmp_path: Path, name: str, status: int) -> None:
    """Without tpu-env the machines of two slices would train as two jobs of one slice."""
    with metadata("cloud-tpu-slices", name, status) as server:
        done = start(tmp_path, server)
    assert done.returncode != 0
    told = f"the metadata server {server} does not answer for {name} (curl's exit code 22)"
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "pid").exists()
    assert not (tmp_path / "host.log").exists()


def test_a_server_that_does_not_answer_ends_the_script(tmp_path: Path) -> None:
    done = start(tmp_path, "127.0.0.1:1")
    assert done.returncode != 0
    assert "does not answer for worker-network-endpoints (curl's exit code 7)" in done.stderr
    assert not (tmp_path / "host.log").exists()
