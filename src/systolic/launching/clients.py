"""Clients of the platforms on this machine, and calls of them."""

import codecs
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from systolic.core.errors import RunError

PYTHON = "python"
CLIENTS: Mapping[str, str] = {
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
    "gcloud": "https://cloud.google.com/sdk/docs/install",
    "docker": "https://docs.docker.com/engine/install",
    "sky": "pip install 'skypilot[gcp]' in an environment of its own",
    "sbatch": "run this where Slurm's commands are",
}
"""Client to where it is from."""
NEEDS: Mapping[str, Sequence[str]] = {
    "tpu-vm": ("bash", "gcloud"),
    "skypilot": ("bash", "sky"),
    "docker": ("bash",),
}
"""Platform to clients that its scripts call."""
CHUNK_BYTES = 1 << 16


def check_client(client: str) -> None:
    """Checks that a client is on this machine.

    Raises:
        RunError: it is not.
    """
    if client != PYTHON and shutil.which(client) is None:
        where = CLIENTS.get(client, "install it")
        raise RunError(
            f"{client} is not installed on this machine, and submits this launch: {where}"
        )


def call(folder: Path, words: Sequence[str]) -> None:
    """Runs a command of the client in a launch's folder, with its output on stderr.

    Raises:
        RunError: the client is missing or fails.
    """
    check_client(words[0])
    if code := code_of(folder, words):
        raise failed(folder, words, code)


def code_of(folder: Path, words: Sequence[str]) -> int:
    """Runs a command of the client in a launch's folder, with its output on stderr; returns its exit code."""
    return subprocess.run(here(words), cwd=folder, stdout=sys.stderr, check=False).returncode


def failed(folder: Path, words: Sequence[str], code: int) -> RunError:
    """Error of a command that failed."""
    return RunError(
        f"{shlex.join(words)} failed with exit code {code} in {folder}; its output is above"
    )


def here(words: Sequence[str]) -> list[str]:
    """Words of a command, with this interpreter for :data:`PYTHON`."""
    return [sys.executable, *words[1:]] if words[0] == PYTHON else list(words)


def streamed(folder: Path, words: Sequence[str]) -> Iterator[str]:
    """Output of a command of the client in a launch's folder, as it comes; the command ends with the iterator.

    Raises:
        RunError: the client fails, after its output.
    """
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with subprocess.Popen(here(words), cwd=folder, stdout=subprocess.PIPE, env=environ) as client:
        assert client.stdout is not None
        try:
            while raw := os.read(client.stdout.fileno(), CHUNK_BYTES):
                yield decoder.decode(raw)
            yield decoder.decode(b"", final=True)
        except BaseException:
            client.terminate()
            raise
    if client.returncode:
        raise RunError(f"{shlex.join(words)} failed in {folder}; its output is above")
