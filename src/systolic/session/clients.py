"""Clients of the platforms on this machine."""

import shutil
from collections.abc import Mapping, Sequence

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
NEEDS: Mapping[str, Sequence[str]] = {"tpu-vm": ("bash", "gcloud"), "skypilot": ("bash", "sky")}
"""Platform to clients that its scripts call."""


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
