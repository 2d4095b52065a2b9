"""The platforms by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter

from systolic.core.errors import OptionError, nearest
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
"""Name, as ``--via`` takes it, to the function that writes its files."""
READS: Mapping[str, Sequence[str]] = {
    "local": (),
    "tpu-vm": ("project", "zone", "network", "service_account", "reservation"),
    "gke": ("zone", "namespace", "service_account", "queue", "claim", "reservation"),
    "skypilot": ("zone",),
    "slurm": ("queue", "account"),
    "docker": (),
}
"""Platform to what it reads of :class:`Site`."""
FEWER = ("local", "tpu-vm")
"""Platforms on which a script of ours can start fewer slices."""


def prepare(via: str, launch: Launch) -> Prepared:
    """The files and commands of a launch on a platform.

    Raises:
        OptionError: there is no such platform, it lacks the slice or does not go on with fewer, or a name is against
            its rules.
    """
    if via not in PLATFORMS:
        raise OptionError(
            f"via is {via!r}{nearest(via, PLATFORMS)}; it takes {', '.join(PLATFORMS)}"
        )
    check_fewer(via, launch)
    if launch.site.zone and "zone" in READS[via]:
        check_zone(launch.site.zone)
    refuse_secrets((*launch.options, *launch.made_by, launch.run, launch.slurm.setup))
    prepared = PLATFORMS[via](launch)
    if "zone" in READS[via]:
        prepared = replace(prepared, notes=(*tpu_vm.zone_notes(launch), *prepared.notes))
    unread = [each.name for each in fields(Site) if each.name not in READS[via]]
    given = [f"--{name.replace('_', '-')}" for name in unread if attrgetter(name)(launch.site)]
    if not given:
        return prepared
    note = f"{', '.join(given)} changes nothing through {via}; give it to the client's own configuration, where it has such a setting"
    return replace(prepared, notes=(*prepared.notes, note))


def check_fewer(via: str, launch: Launch) -> None:
    """Checks that a platform can leave out slices.

    Raises:
        OptionError: it can't, there are not more slices than those it may go on with, or a time is given without a number.
    """
    fewest, on = launch.min_slices, launch.on
    if fewest is None:
        if launch.rejoin_seconds is not None:
            raise OptionError(
                f"rejoin-seconds is {launch.rejoin_seconds}, and no slice is ever left out; add --min-slices, or leave it out"
            )
        return
    if via not in FEWER:
        raise OptionError(
            f'min-slices is {fewest}, and {via} starts as many machines as its file says; leave it out, and when a slice does not come back stop the launch and give it again with fewer in --on and --train="--for-devices {on.num_devices}"; {" and ".join(FEWER)} do that by themselves'
        )
    if fewest >= on.num_slices:
        has = f"{on.num_slices} slices" if on.num_slices > 1 else "one slice"
        raise OptionError(
            f"min-slices is {fewest} and {on.name} has {has}, so that none could be left out; give fewer than that, or leave it out"
        )
