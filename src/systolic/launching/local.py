"""``--via local``: the hosts of a slice as processes on this machine, each with its share of virtual devices."""

import json

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching.launch import Launch, Prepared
from systolic.launching.names import check_name, is_bucket

LONGEST = 60
MOST_PROCESSES = 16
"""More would only wait for each other's compiler."""
SETTINGS = "local.json"
"""What the supervisor reads."""


def prepare(launch: Launch) -> Prepared:
    """The settings of a supervisor.

    Raises:
        OptionError: the slice has more hosts than a machine can stand in for, or its devices do not divide.
    """
    check_name(launch.name, LONGEST, "a folder's name here")
    on = launch.on
    count = on.num_hosts if launch.processes is None else launch.processes
    if count > MOST_PROCESSES:
        raise OptionError(
            f"{on.name} has {count} hosts and local starts {MOST_PROCESSES} processes at most; try the mesh on a smaller slice, or give --processes"
        )
    if on.num_devices % count:
        raise OptionError(
            f"processes is {count}, which does not divide the {on.num_devices} devices of {on.name}"
        )
    if launch.min_slices is not None and count % on.num_slices:
        raise OptionError(
            f"processes is {count} and {on.name} has {on.num_slices} slices; with --min-slices each has processes of its own: give a multiple of {on.num_slices}"
        )
    if on.chip.kind is ChipKind.gpu:
        raise OptionError(
            f"{on.name} is of GPUs, and local stands in for hosts with virtual CPU devices; give --on 8xcpu, or on a machine with GPUs systolic train"
        )
    if is_bucket(launch.run):
        raise OptionError(f"run is {launch.run}, and local trains into a folder; give --run DIR")
    settings = {
        "made_by": list(launch.made_by),
        "command": list(launch.command()),
        "directory": launch.directory,
        "processes": count,
        "devices": on.num_devices // count,
        "restarts": launch.restarts,
    }
    if launch.min_slices is not None:
        settings["remaining"] = {
            "slices": on.num_slices,
            "min_slices": launch.min_slices,
            "rejoin_seconds": launch.patience_seconds,
        }
    notes = []
    if on.chip.kind is not ChipKind.cpu:
        notes.append(
            f"{count} processes with {on.num_devices // count} virtual CPU devices each stand in for the hosts of {on.name}"
        )
    python = ("python", "-m", "systolic.launching.supervisor", ".")
    return Prepared(
        files={SETTINGS: json.dumps(settings, indent=2) + "\n"},
        submit=(python,),
        status=(),
        logs=(),
        follow=(),
        stop=(),
        detached=True,
        notes=tuple(notes),
        hosts=count,
    )
