"""The platforms by name."""

from collections.abc import Callable, Mapping

from systolic.core.errors import OptionError, nearest
from systolic.launching import docker, gke, local, skypilot, slurm, tpu_vm
from systolic.launching.launch import Launch, Prepared
from systolic.launching.names import refuse_secrets

PLATFORMS: Mapping[str, Callable[[Launch], Prepared]] = {
    "local": local.prepare,
    "tpu-vm": tpu_vm.prepare,
    "gke": gke.prepare,
    "skypilot": skypilot.prepare,
    "slurm": slurm.prepare,
    "docker": docker.prepare,
}
"""Name, as ``--via`` takes it, to the function that writes its files."""


def prepare(via: str, launch: Launch) -> Prepared:
    """The files and commands of a launch on a platform.

    Raises:
        OptionError: there is no such platform, it lacks the slice, or a name is against its rules.
    """
    if via not in PLATFORMS:
        raise OptionError(
            f"via is {via!r}{nearest(via, PLATFORMS)}; it takes {', '.join(PLATFORMS)}"
        )
    refuse_secrets((*launch.options, *launch.made_by, launch.run, launch.slurm.setup))
    return PLATFORMS[via](launch)
