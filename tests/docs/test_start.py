"""Commands in ``docs/start``: those that a CPU runs in a minute are run in the order of the page, and their output is compared.

A ``console`` block shows commands and output, an ``sh`` block is a script, and a ``python`` block a file. Blocks whose first line
begins with ``# not`` or ``# takes``, and those that install packages, are left out. A command in the background (``&``) is a server:
what follows waits until it is ready. Of shown output the words have to occur, whatever the numbers are.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.own_programs

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start"
BLOCK = re.compile(
    r"^(<!-- varies -->\n)?```(console|sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
"""Block of commands; below the comment, output depends on the machine."""
WORD = re.compile(r"[A-Za-z][A-Za-z_-]{2,}")
LEFT_OUT = ("# not", "# takes", "pip install", "python3 -m venv")
PORT = "8000"
"""Port in the pages; tests take a free one in its place."""
LIMIT = 400
"""Seconds that a command may take on a machine that others use, too."""


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of the page's blocks that are run."""
    for match in BLOCK.finditer((START / page).read_text()):
        varies, language, text = match.groups()
        if not text.startswith(LEFT_OUT):
            shown = "".join(line for line in text.splitlines(True) if line.startswith("$ "))
            yield language, shown if varies else text


def commands(console: str) -> Iterator[tuple[str, list[str]]]:
    """Commands of a console block, each with the lines that it prints."""
    command, shown = "", []
    for line in [*console.replace("\\\n", "").splitlines(), "$ "]:
        if not line.startswith("$ "):
            shown.append(line)
            continue
        if command:
            yield command, shown
        command, shown = line[2:], []


class Reader:
    """Whoever follows a page, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        programs = folder / ".bin"
        programs.mkdir()
        for name in ("systolic", "python"):
            module = " -m systolic" if name == "systolic" else ""
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
            (programs / name).chmod(0o755)
        self.environ = {
            **{name: text for name, text in os.environ.items() if name != "XLA_FLAGS"},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_STATE_HOME": str(folder / ".state"),
            "XDG_CONFIG_HOME": str(folder / ".config"),
            "OPENAI_API_KEY": "none",
            "COLUMNS": "120",
        }
        self.servers: list[subprocess.Popen[Any]] = []

    def run(self, command: str, shown: list[str]) -> None:
        """Runs a command of a console block; a message of ``systolic:`` alone is that of a refusal."""
        refused = [line for line in shown if line.startswith("systolic: ")] == shown != []
        made = self._run(["bash", "-c", command])
        told = made.stdout + made.stderr
        assert (made.returncode != 0) == refused, f"{command}\n{told}"
        words = set(WORD.findall(told))
        for line in shown:
            missing = set(WORD.findall(re.sub(r"\S*…", "", line))) - words
            assert not missing, f"{command}\ndoes not print {missing} of\n{line}\nbut\n{told}"

    def script(self, text: str) -> None:
        """Runs a block of commands without output; those that end in ``&`` are servers."""
        *_, last = lines = text.strip().splitlines()
        if last.endswith("&"):
            self._serve("\n".join(lines).removesuffix("&"))
            return
        made = self._run(["bash", "-ec", text])
        assert made.returncode == 0, f"{text}\n{made.stdout}{made.stderr}"

    def python(self, text: str) -> None:
        """Runs a block of Python."""
        made = self._run([sys.executable, "-c", text])
        assert made.returncode == 0, f"{text}\n{made.stdout}{made.stderr}"

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._here(word) for word in command],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    def _here(self, text: str) -> str:
        return re.sub(rf"\b{PORT}\b", self.port, text)

    def _serve(self, command: str) -> None:
        log = (self.folder / "server.log").open("w")
        server = subprocess.Popen(
            ["bash", "-c", f"exec {self._here(command)}"],
            cwd=self.folder,
            env=self.environ,
            stdout=log,
            stderr=log,
        )
        log.close()
        self.servers.append(server)
        end = time.monotonic() + LIMIT
        while server.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health").close()
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        raise AssertionError((self.folder / "server.log").read_text())

    def end(self) -> None:
        """Ends the servers."""
        for server in self.servers:
            server.terminate()
            server.wait(60)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.end()


def follow(reader: Reader, page: str) -> None:
    for language, text in blocks(page):
        if language == "console":
            for command, shown in commands(text):
                reader.run(command, shown)
        elif language == "sh":
            reader.script(text)
        else:
            reader.python(text)


PAGES = ["first-hour.md", "cloud-slice.md", "team-gke.md", "serve-a-model.md", "choose-hardware.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != "team-gke.md"])
def test_a_reader_can_follow_the_page(reader: Reader, page: str) -> None:
    follow(reader, page)


@pytest.mark.slow
def test_a_reader_can_follow_the_page_of_gke_whose_objects_pass_the_schemas(reader: Reader) -> None:
    import yaml

    models = pytest.importorskip("kubeflow_trainer_api.models")
    kubernetes = pytest.importorskip("kubernetes_validate")
    follow(reader, "team-gke.md")
    found = yaml.safe_load((reader.folder / "launches/lm-v5e-16/jobset.yaml").read_text())
    assert models.JobsetV1alpha2JobSet.from_dict(found).to_dict()["spec"]["suspend"] is True
    served = (reader.folder / "launches/chat-v5e-8/serve.yaml").read_text()
    for one in yaml.safe_load_all(served):
        if one["kind"] != "PodMonitoring":  # not of Kubernetes
            kubernetes.validate(one, "1.31", strict=True)


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_only_options_that_exist(page: str) -> None:
    """Verbs of the commands, also of those that are not run."""
    from systolic.cli.main import VERBS

    text = (START / page).read_text()
    for verb in re.findall(
        r"^\s*(?:\$ )?systolic (\w+)", "".join(m[3] for m in BLOCK.finditer(text)), re.M
    ):
        assert verb in VERBS, verb


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_as_long_as_a_page(page: str) -> None:
    prose = BLOCK.sub("", (START / page).read_text())
    assert 300 <= len(re.findall(r"[\w'’./-]+", prose)) <= 900
