"""Checks before a launch writes anything: the training command, and options that the platform does not use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from systolic.cli.main import VERBS
from systolic.cli.parse import asks_help
from systolic.cli.target import Request, request_for
from systolic.core.errors import OptionError
from systolic.core.ranges import dashed
from systolic.training.session import check_data

if TYPE_CHECKING:
    from systolic.cli.launch import LaunchOptions
    from systolic.job import Job
    from systolic.launching import Launch
    from systolic.session.launching import LaunchRequest

INSTEAD = {
    "--run": "give --run to systolic launch",
    "--continue": "leave it out",
    "--plan": "give --plan to systolic launch",
    "--candidate": "give --candidate to systolic launch",
    "--rehearse": "to rehearse here, run systolic train RECIPE --rehearse SLICE",
    "--coordinator": "leave it out, each machine gets it from the platform",
    "--processes": "leave it out, --on sets the number",
    "--process": "leave it out, each machine gets it from the platform",
}
"""Options of ``systolic train`` that the launch sets itself, and what to do instead."""

OF: Mapping[str, Sequence[str]] = {
    "quick": ("tpu-vm", "gke", "skypilot"),
    "spot": ("tpu-vm", "gke", "skypilot"),
    "reserved": ("tpu-vm", "gke"),
    "image": ("gke",),
    "time": ("slurm",),
    "gpus_per_node": ("slurm",),
    "setup": ("slurm",),
    "sbatch": ("slurm",),
    "processes": ("local",),
    "keep": ("tpu-vm",),
}
"""Platforms that use each option, in addition to those in :data:`~systolic.launching.platforms.READS`."""


def check_platform(options: "LaunchOptions") -> None:
    """Checks that the platform uses all given options.

    Raises:
        OptionError: the platform does not use an option, or a candidate is given without a plan.
    """
    from systolic.launching.platforms import READS

    default = vars(type(options)(via=options.via))
    site = {name for reads in READS.values() for name in reads}
    of = {name: [via for via, reads in READS.items() if name in reads] for name in sorted(site)}
    for name, platforms in {**OF, **of}.items():
        if vars(options)[name] != default[name] and options.via not in platforms:
            raise OptionError(
                f"--{dashed(name)} is not used by {options.via}; leave it out, or choose --via {' or '.join(platforms)}"
            )
    if options.candidate != default["candidate"] and options.plan is None:
        raise OptionError(
            f"--candidate is {options.candidate}, but no plan is given; add --plan plan.json, or leave it out"
        )


def trained(request: "LaunchRequest", made: "Launch") -> "Job":
    """Job that a launch trains, checked as ``systolic train`` checks it on the machines.

    Raises:
        OptionError: an option in ``--train`` is unknown, out of range, or set by the launch.
        LayoutError: the layout does not divide the slice, the model or the batch.
    """
    if asks_help(request.train):
        raise OptionError("--train has --help; systolic train --help shows the options")
    fewer = {} if made.min_slices is None else {"--for-devices": "leave it out"}
    for word in request.train:
        option = dashed(word.partition("=")[0])
        if (instead := {**INSTEAD, **fewer}.get(option)) is not None:
            raise OptionError(f"--train has {option}, which the launch sets; {instead}")
    asked = request_for(
        request.recipe, made.options, "train", VERBS["train"].forms[0].options.read, {}
    )
    job = asked.job
    check_data(job)
    job.check_effects()
    check_sizes(request, asked, job)
    return job


def under_plan(
    request: "LaunchRequest", made: "Launch", job: "Job", warn: Callable[[str], None]
) -> "LaunchRequest":
    """Request with the plan's forecast dropped if options in ``--train`` change the step.

    Args:
        request: The request.
        made: Its launch.
        job: Job with the options in ``--train``.
        warn: Called if the forecast does not apply to the step that is trained.

    Raises:
        OptionError: an option in ``--train`` contradicts the plan.
    """
    from systolic.recipes.jobs.plan import kept_choice

    chosen = request.chosen
    if chosen is None or not request.train:
        return request
    words = made.options[: len(made.options) - len(request.train)]
    before = request_for(request.recipe, words, "train", VERBS["train"].forms[0].options.read, {})
    kept = kept_choice(chosen, before.job, job, steps_given=True, warn=warn)
    flags = request_for(
        request.recipe, made.options, "train", VERBS["train"].forms[0].options.read, {}
    ).verb.flags
    if flags != before.verb.flags:
        if chosen.flags:
            raise OptionError(
                f"the flags are set by {chosen.path}; leave --flags out of --train, or plan again with these flags"
            )
        warn(f"{chosen.path} has a forecast without these flags, so the bill has no time")
        kept = replace(kept, forecast={})
    return replace(request, chosen=kept)


def check_sizes(request: "LaunchRequest", asked: Request[Any], job: "Job") -> None:
    """Checks that the layout divides the slice, the model and the batch, also on fewer slices down to ``--min-slices``.

    Raises:
        LayoutError: the layout does not divide one of them.
    """
    on, devices = request.on, asked.verb.for_devices
    if request.via == "local":
        # The processes form one slice of CPU devices, whatever slices they stand in for.
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
