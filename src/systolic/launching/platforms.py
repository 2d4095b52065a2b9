"""Platforms by name, their clients on this machine, and calls of them."""

import codecs
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

from systolic.core.errors import OptionError, RunError, nearest
from systolic.launching import docker, gke, local, skypilot, slurm, tpu_vm
from systolic.launching.launch import Launch, Prepared, Site
from systolic.launching.names import check_zone, refuse_secrets

PLATFORMS: Mapping[str, Callable[[Launch], Prepared]] = {
    "local": local.prepare,
    "tpu-vm": tpu_vm.prepare,
    "gke": gke.prepare,
    "skypilot": skypilot.prepare,
    "slurm": slurm.prepare,
    "docker": docker.prepare,
}
"""Function that prepares the files, by the platform's name in ``--via``."""
READS: Mapping[str, Sequence[str]] = {
    "local": (),
    "tpu-vm": ("project", "zone", "network", "service_account", "reservation"),
    "gke": ("zone", "namespace", "service_account", "queue", "claim", "reservation"),
    "skypilot": ("zone",),
    "slurm": ("queue", "account"),
    "docker": (),
}
"""Fields of :class:`Site` that each platform uses."""
FEWER = ("local", "tpu-vm")
"""Platforms where a script of this package can start fewer slices."""
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


def prepare(via: str, launch: Launch) -> Prepared:
    """Prepares the files and commands of a launch on a platform.

    Raises:
        OptionError: the platform does not exist, lacks the slice or can't continue with fewer, or a name is invalid.
    """
    if via not in PLATFORMS:
        raise OptionError(
            f"--via is {via!r}{nearest(via, PLATFORMS)}; it takes {', '.join(PLATFORMS)}"
        )
    check_fewer(via, launch)
    if launch.site.zone and "zone" in READS[via]:
        check_zone(launch.site.zone)
    refuse_secrets((*launch.options, *launch.made_by, launch.run, launch.slurm.setup))
    prepared = PLATFORMS[via](launch)
    if "zone" in READS[via]:
        prepared = replace(prepared, notes=(*tpu_vm.zone_notes(launch), *prepared.notes))
    unread = [each.name for each in fields(Site) if each.name not in READS[via]]
    unused = [f"--{name.replace('_', '-')}" for name in unread if attrgetter(name)(launch.site)]
    if not unused:
        return prepared
    note = f"{', '.join(unused)} is not used by {via}; set it in the client's own configuration, if it has such a setting"
    return replace(prepared, notes=(*prepared.notes, note))


def check_fewer(via: str, launch: Launch) -> None:
    """Checks that a platform can drop slices, if that is requested.

    Raises:
        OptionError: the platform can't, ``min_slices`` is not below the number of slices, or ``rejoin_seconds`` is given without it.
    """
    fewest, on = launch.min_slices, launch.on
    if fewest is None:
        if launch.rejoin_seconds is not None:
            raise OptionError(
                f"--rejoin-seconds is {launch.rejoin_seconds}, but no slice is dropped without --min-slices; add --min-slices, or leave it out"
            )
        return
    if via not in FEWER:
        raise OptionError(
            f'--min-slices is {fewest}, but {via} starts a fixed number of machines; leave it out, and if a slice does not come back, stop the launch and launch again with fewer in --on and --train="--for-devices {on.num_devices}" ({" and ".join(FEWER)} do this automatically)'
        )
    if fewest >= on.num_slices:
        has = f"{on.num_slices} slices" if on.num_slices > 1 else "one slice"
        raise OptionError(
            f"--min-slices is {fewest}, but {on.name} has {has}, so none could be dropped; give fewer, or leave it out"
        )


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
