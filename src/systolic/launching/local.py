"""``--via local``: the hosts of a slice as processes on this machine, each with its share of virtual CPU devices."""

import json
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from systolic.chips import ChipKind, Slice
from systolic.core.errors import OptionError
from systolic.launching.launch import Launch, Prepared
from systolic.launching.names import check_name, choices, is_bucket, number_of

LONGEST = 60
MOST_PROCESSES = 16
"""Maximum number of processes; with more, their compilers would only wait for each other."""
SETTINGS = "local.json"
"""File with the supervisor's settings."""


class RemainingSettings(Struct, frozen=True, kw_only=True):
    """Arguments of :class:`~systolic.launching.supervisor.Remaining`."""

    slices: int = 1
    min_slices: int | None = None
    rejoin_seconds: float = 0.0


class SupervisorSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of :class:`~systolic.launching.supervisor.Supervisor`: the content of ``local.json``."""

    made_by: Sequence[str]
    command: Sequence[str]
    directory: str
    processes: int
    devices: int
    restarts: int
    remaining: RemainingSettings | None = None
    """Absent if no slice is ever dropped."""


def prepare(launch: Launch) -> Prepared:
    """Prepares the settings of the supervisor.

    Raises:
        OptionError: there are too many processes, they do not divide the devices, or the slice has GPUs.
    """
    check_name(launch.name, LONGEST, "a folder's name here")
    on = launch.on
    count = on.num_hosts if launch.processes is None else launch.processes
    some = choices(on.num_devices, MOST_PROCESSES)
    if count > MOST_PROCESSES:
        number = f"--processes is {count}" if launch.processes else f"{on.name} has {count} hosts"
        instead = "give" if launch.processes else "choose a smaller slice, or give --processes"
        raise OptionError(
            f"{number}, but local starts at most {MOST_PROCESSES} processes; {instead} {some}"
        )
    if on.num_devices % count:
        raise OptionError(
            f"--processes is {count}, which does not divide the {number_of(on.num_devices, 'device')} of {on.name}; give {some}"
        )
    if launch.min_slices is not None and count % on.num_slices:
        raise OptionError(
            f"--processes is {count}, but {on.name} has {on.num_slices} slices, and with --min-slices each has its own processes; give a multiple of {on.num_slices}"
        )
    if on.chip.kind is ChipKind.gpu:
        raise OptionError(
            f"{on.name} has GPUs, but local uses virtual CPU devices; give --on 8xcpu, or run systolic train on a machine with GPUs"
        )
    if is_bucket(launch.run):
        raise OptionError(f"--run is {launch.run}, but local trains into a folder; give --run DIR")
    remaining = None
    if launch.min_slices is not None:
        remaining = RemainingSettings(
            slices=on.num_slices,
            min_slices=launch.min_slices,
            rejoin_seconds=launch.patience_seconds,
        )
    settings = SupervisorSettings(
        made_by=launch.made_by,
        command=launch.command(),
        directory=launch.directory,
        processes=count,
        devices=on.num_devices // count,
        restarts=launch.restarts,
        remaining=remaining,
    )
    python = ("python", "-m", "systolic.launching.supervisor", ".")
    return Prepared(
        files={SETTINGS: json.dumps(msgspec.to_builtins(settings), indent=2) + "\n"},
        submit=(python,),
        status=(),
        logs=(),
        follow=(),
        stop=(),
        detached=True,
        notes=_notes(on, count),
        hosts=count,
    )


def _notes(on: Slice, count: int) -> tuple[str, ...]:
    if on.chip.kind is ChipKind.cpu:
        return ()
    processes = number_of(count, "process")
    devices = number_of(on.num_devices // count, "virtual CPU device")
    stand = " each stand" if count > 1 else " stands"
    hosts = "hosts" if on.num_hosts > 1 else "host"
    return (f"{processes} with {devices}{stand} in for the {hosts} of {on.name}",)
