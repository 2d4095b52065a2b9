"""``--via tpu-vm``: a queued resource of Cloud TPU, and the training command on all of its machines over SSH.

After a preemption the script requests the slices again; they are new machines, and the run continues from its last
checkpoint. The machines are deleted when the training has ended, whether it succeeded or failed.
"""

import shlex
from collections.abc import Mapping, Sequence

from systolic.core.errors import OptionError
from systolic.launching.launch import ClientDefault, Launch, Prepared, Purchase, rendered
from systolic.launching.names import (
    check_name,
    check_project,
    check_service_account,
    check_shared,
    check_word,
    in_bucket,
)

LONGEST = 58
"""Maximum length of a name: 63 characters, less five for the index of a slice's node."""
SCRIPT, HOST = "tpu.sh", "host.sh"
LABEL = "systolic_launch"
PROJECT = ClientDefault(
    what="project",
    words=("gcloud", "config", "get", "project"),
    otherwise="add --project PROJECT",
)
"""Default project of gcloud."""
REFUSED = 64
"""Exit code of ``host.sh`` if the training rejects its command line."""
TRIES = 10
"""Maximum number of SSH connections that fail in a row; gcloud takes about a minute for each."""

RUNTIMES: Mapping[str, str] = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""Runtime versions for JAX by chip: Google Cloud documentation, 'TPU software versions',
https://docs.cloud.google.com/tpu/docs/runtimes. SkyPilot 0.14.1 (sky/resources.py) uses the same for v5p and v6e.
"""
ZONES: Mapping[str, Sequence[str]] = {
    "v2": ("us-central1-a", "us-central1-b", "us-central1-c"),
    "v3": ("us-central1-a", "us-central1-b"),
    "v4": ("us-central2-b",),
    "v5e": ("us-west4-a", "us-central1-a", "us-south1-a", "us-west1-c"),
    "v5p": ("us-east5-a", "us-central1-a"),
    "v6e": ("us-east5-b", "us-central1-b", "us-east1-d", "us-east5-a"),
}
"""Zones in the United States by chip, without those for one customer: Google Cloud documentation, 'TPU regions and
zones', https://docs.cloud.google.com/tpu/docs/regions-zones. Other continents are not listed here.
"""
API_NAMES: Mapping[str, str] = {"v5e": "v5litepod"}
"""Names in accelerator types by chip, where they differ."""
TOPOLOGIES = ("v2", "v3", "v4")
"""Chips for which ``gcloud`` takes a topology instead of an accelerator type (Google Cloud SDK 528.0.0)."""


def prepare(launch: Launch) -> Prepared:
    """Prepares a script for this machine and one for the TPU machines.

    Raises:
        OptionError: Cloud TPU lacks the slice, the zone is missing, the run's folder is lost with the machines, or a
            name is invalid.
    """
    site = launch.site
    check_slice(launch)
    check_name(launch.name, LONGEST, "a TPU's name")
    if not site.zone:
        raise OptionError(
            f"tpu-vm needs a zone; add --zone {ZONES[launch.on.chip.name][0]} (gcloud compute tpus locations list shows all)"
        )
    check_project(site.project)
    check_word(site.network, "network")
    check_service_account(site.service_account)
    hosts = launch.on.num_hosts
    check_shared(launch.run, hosts)
    bucket, at = in_bucket(launch.run)
    fields = {
        "name": launch.name,
        "id": launch.id,
        "project": site.project,
        "refused": REFUSED,
        "tries": TRIES,
        "scope": _scope(launch),
        "create": shlex.join(create_flags(launch, launch.on.num_slices)),
        "fewer": _fewer(launch),
        "slices": launch.on.num_slices,
        "min_slices": launch.min_slices,
        "rejoin_seconds": launch.patience_seconds,
        "keep": "yes" if launch.keep else "",
        "restarts": launch.restarts,
        "command": shlex.join(launch.command(code="code", run=f"bucket/{at}")),
        "bucket": bucket,
        "folder": f"systolic/{launch.name}",
    }
    script = ("bash", SCRIPT)
    return Prepared(
        files={
            SCRIPT: rendered(SCRIPT, launch.header(), fields),
            HOST: rendered(HOST, launch.header(), fields),
        },
        checks=((*script, "check"),),
        submit=((*script, "run"),),
        status=(*script, "status"),
        logs=(*script, "logs"),
        follow=(*script, "follow"),
        stop=((*script, "stop"),),
        detached=True,
        notes=_notes(launch),
        hosts=hosts,
        ships=True,
        asked=() if site.project else (PROJECT,),
    )


def check_slice(launch: Launch) -> None:
    """Checks that Cloud TPU offers the slice as virtual machines, and does not need a reservation's name.

    Raises:
        OptionError: it does not offer the slice, or a reservation is named.
    """
    if launch.site.reservation:
        raise OptionError(
            f"--reservation is {launch.site.reservation}, but Cloud TPU's client can't select one by name; give --reserved, which uses any reservation of the project"
        )
    on = launch.on
    if on.chip.name == "tpu7x":
        raise OptionError(
            f"{on.name} is available through GKE only, not as Cloud TPU VMs; give --via gke"
        )
    if on.chip.name not in RUNTIMES:
        raise OptionError(
            f"{on.name} is not a slice of Cloud TPU, which has {', '.join(RUNTIMES)}; give one of those to --on"
        )
    if ":" in on.name and on.chip.name not in TOPOLOGIES:
        raise OptionError(
            f"{on.name} has no accelerator type in Cloud TPU, which takes topologies for {', '.join(TOPOLOGIES)} only; choose a slice that systolic chips {on.chip.name} lists, or --via gke"
        )


def accelerator_type(launch: Launch) -> str:
    """Accelerator type of one slice: ``v5litepod-16``, ``v5p-8``."""
    slice_name = launch.on.name.partition("x")[2] if launch.on.num_slices > 1 else launch.on.name
    _, _, number = slice_name.rpartition("-")
    return f"{API_NAMES.get(launch.on.chip.name, launch.on.chip.name)}-{number}"


def create_flags(launch: Launch, slices: int) -> list[str]:
    """Flags of ``gcloud compute tpus queued-resources create`` for a number of slices, without name, zone and project."""
    on, site = launch.on, launch.site
    if ":" in on.name:
        shape = "x".join(map(str, on.topology))
        flags = [f"--type={on.chip.name}", f"--topology={shape}"]
    else:
        flags = [f"--accelerator-type={accelerator_type(launch)}"]
    flags.append(f"--runtime-version={RUNTIMES[on.chip.name]}")
    if slices > 1:
        flags += [f"--node-count={slices}", f"--node-prefix={launch.name}"]
    else:
        flags.append(f"--node-id={launch.name}")
    if launch.purchase is Purchase.spot:
        flags.append("--spot")
    if launch.purchase is Purchase.reserved:
        flags.append("--reserved")
    flags.append(f"--labels={LABEL}={launch.id}")
    if site.network:
        flags.append(f"--network={site.network}")
    if site.service_account:
        flags.append(f"--service-account={site.service_account}")
    return flags


def _fewer(launch: Launch) -> list[tuple[int, str]]:
    """Numbers of slices that may be requested, each with its flags; empty if the script always requests all."""
    if launch.min_slices is None:
        return []
    numbers = range(launch.on.num_slices, launch.min_slices - 1, -1)
    return [(number, shlex.join(create_flags(launch, number))) for number in numbers]


def _scope(launch: Launch) -> str:
    flags = [f"--zone={launch.site.zone}"]
    if launch.site.project:
        flags.append(f"--project={launch.site.project}")
    return shlex.join(flags)


def zone_notes(launch: Launch) -> tuple[str, ...]:
    """Note if a zone in the United States may lack the chip; zones elsewhere are not known."""
    zone, chip = launch.site.zone, launch.on.chip.name
    known, reserved = ZONES.get(chip, ()), launch.purchase is Purchase.reserved
    if reserved or not known or not zone.startswith("us-") or zone in known:
        return ()
    return (f"{zone} may have no {chip}; Google lists it in {', '.join(known)}",)


def _notes(launch: Launch) -> tuple[str, ...]:
    notes = []
    if launch.keep:
        notes.append("the machines keep running, and cost money, until systolic stop deletes them")
    else:
        notes.append(
            f"this machine waits for the training and then deletes the TPUs; if it is turned off before, delete them with systolic stop {launch.name}"
        )
    notes.append(
        f"the TPUs' service account needs access to {launch.run}; use a bucket with a hierarchical namespace, where renaming a folder is atomic"
    )
    return tuple(notes)
