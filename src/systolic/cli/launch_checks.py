"""What a launch refuses before anything is written: a command that its machines would refuse, and options of other platforms."""

from typing import TYPE_CHECKING

from systolic.cli.parse import asks_help
from systolic.cli.target import Request, request_for
from systolic.cli.train import TrainOptions
from systolic.core.errors import OptionError
from systolic.core.ranges import dashed

if TYPE_CHECKING:
    from systolic.job import Job
    from systolic.launching import Launch
    from systolic.session.launching import LaunchRequest

INSTEAD = {
    "--run": "--run of the launch gives it",
    "--continue": "leave it out",
    "--plan": "--plan of the launch has its settings written out",
    "--candidate": "--candidate of the launch chooses it",
    "--rehearse": "systolic train RECIPE --rehearse SLICE rehearses here",
    "--coordinator": "the platform tells each machine; leave it out",
    "--processes": "--on says how many",
    "--process": "the platform tells each machine; leave it out",
}
"""Options of ``systolic train`` that the launch sets itself, to what changes them."""


def trained(request: "LaunchRequest", made: "Launch") -> "Job":
    """The job that the machines of a launch train, checked as ``systolic train`` would there.

    Raises:
        OptionError: a word of ``--train`` is unknown, out of range, or set by the launch.
        LayoutError: the layout does not divide the slice, the model or the batch.
    """
    if asks_help(request.train):
        raise OptionError("train asks for help; systolic train --help shows its options")
    fewer = {} if made.min_slices is None else {"--for-devices": "the launch sets it to its own"}
    for word in request.train:
        option = dashed(word.partition("=")[0])
        if (instead := {**INSTEAD, **fewer}.get(option)) is not None:
            raise OptionError(f"train has {option}, which the launch sets; {instead}")
    asked = request_for(request.recipe, made.options, "train", TrainOptions, {})
    job = asked.job
    job.check_effects()
    check_sizes(request, asked, job)
    return job


def check_sizes(request: "LaunchRequest", asked: Request[TrainOptions], job: "Job") -> None:
    """Checks that the layout divides the slice, what ``--min-slices`` may leave of it, the model and the batch.

    Raises:
        LayoutError: it does not.
    """
    on, devices = request.on, asked.verb.for_devices
    if request.via == "local":
        # Its processes are one CPU, whatever they stand in for.
        _settle(job, on.num_devices, 1, devices)
    elif devices is None or devices <= on.num_devices:
        job.settle(on)
    else:
        _settle(job, on.num_devices, on.num_slices, devices)
    for left in range(request.min_slices or on.num_slices, on.num_slices):
        slices = 1 if request.via == "local" else left
        _settle(job, on.num_devices // on.num_slices * left, slices, on.num_devices)


def _settle(job: "Job", num_devices: int, num_slices: int, meant: int | None) -> None:
    from systolic.job import on_fewer

    fewer = None if meant is None else on_fewer(job, meant, num_devices, num_slices)
    (job if fewer is None else fewer.job).on(num_devices, num_slices)
