"""What a launch refuses before anything is written: a command that its machines would refuse, and options of other platforms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from systolic.cli.parse import asks_help
from systolic.cli.target import Request, request_for
from systolic.cli.train import TrainOptions
from systolic.core.errors import OptionError
from systolic.core.ranges import dashed

if TYPE_CHECKING:
    from systolic.cli.launch import LaunchOptions
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
"""Option to the platforms that read it, beside those that :data:`~systolic.launching.platforms.READS` lists."""


def check_platform(options: "LaunchOptions") -> None:
    """Checks that the platform reads all options that are given.

    Raises:
        OptionError: it does not read one, or a candidate is chosen without a plan.
    """
    from systolic.launching.platforms import READS

    default = vars(type(options)(via=options.via))
    site = {name for reads in READS.values() for name in reads}
    of = {name: [via for via, reads in READS.items() if name in reads] for name in sorted(site)}
    for name, platforms in {**OF, **of}.items():
        if vars(options)[name] != default[name] and options.via not in platforms:
            raise OptionError(
                f"--{dashed(name)} means nothing to {options.via}; leave it out, or choose --via {' or '.join(platforms)}"
            )
    if options.candidate != default["candidate"] and options.plan is None:
        raise OptionError(
            f"candidate is {options.candidate}, and no plan is given; add --plan plan.json, or leave it out"
        )


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


def under_plan(
    request: "LaunchRequest", made: "Launch", job: "Job", warn: Callable[[str], None]
) -> "LaunchRequest":
    """The request, whose plan has no forecast where words of ``--train`` make another step.

    Args:
        request: What is launched.
        made: The launch of it.
        job: With the words of ``--train``.
        warn: Called where the forecast is of another step than the one that is trained.

    Raises:
        OptionError: a word of ``--train`` contradicts what the plan decides.
    """
    from systolic.session.planned import kept_choice

    chosen = request.chosen
    if chosen is None or not request.train:
        return request
    words = made.options[: len(made.options) - len(request.train)]
    before = request_for(request.recipe, words, "train", TrainOptions, {})
    kept = kept_choice(chosen, before.job, job, steps_given=True, warn=warn)
    flags = request_for(request.recipe, made.options, "train", TrainOptions, {}).verb.flags
    if flags != before.verb.flags:
        if chosen.flags:
            raise OptionError(
                f"the flags are what {chosen.path} decides; leave --flags out of --train, or plan again with them"
            )
        warn(f"{chosen.path} forecast a step without these flags, so there is no time in the bill")
        kept = replace(kept, forecast={})
    return replace(request, chosen=kept)


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
