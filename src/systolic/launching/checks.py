"""Checks before a launch writes anything: the training command, and options that the platform does not use."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from systolic.cli.forms import Request, request_for
from systolic.cli.main import VERBS
from systolic.cli.parse import asks_help, parse
from systolic.core.errors import OptionError
from systolic.core.ranges import dashed
from systolic.core.reporter import reporter
from systolic.job import Job, on_fewer
from systolic.launching.launch import Launch
from systolic.launching.platforms import READS
from systolic.launching.request import LaunchRequest, words_of
from systolic.recipes.jobs import kept_choice

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
TAKEN = ("--host", "--port", "--keys", "--new-key", "--grace-seconds", "--log", "--json")
"""Options of ``systolic serve`` that the launch sets."""


def check_platform(via: str, options: Mapping[str, Any]) -> None:
    """Checks that the platform uses all given options.

    Args:
        via: The platform.
        options: Options of :func:`systolic.launch`, by name.

    Raises:
        OptionError: the platform does not use an option, or a candidate is given without a plan.
    """
    site = {name for reads in READS.values() for name in reads}
    of = {name: [via for via, reads in READS.items() if name in reads] for name in sorted(site)}
    for name, platforms in {**OF, **of}.items():
        if options[name] and via not in platforms:
            raise OptionError(
                f"--{dashed(name)} is not used by {via}; leave it out, or choose --via {' or '.join(platforms)}"
            )
    if options["candidate"] != 1 and options["plan"] is None:
        raise OptionError(
            f"--candidate is {options['candidate']}, but no plan is given; add --plan plan.json, or leave it out"
        )


def trained(request: LaunchRequest, description: Launch) -> Job:
    """Job that a launch trains, checked as ``systolic train`` checks it on the machines.

    Raises:
        OptionError: an option in ``--train`` is unknown, out of range, or set by the launch.
        LayoutError: the layout does not divide the slice, the model or the batch.
    """
    from systolic.training.session import check_data

    if asks_help(request.train):
        raise OptionError("--train has --help; systolic train --help shows the options")
    fewer = {} if description.min_slices is None else {"--for-devices": "leave it out"}
    for word in request.train:
        option = dashed(word.partition("=")[0])
        if (instead := {**INSTEAD, **fewer}.get(option)) is not None:
            raise OptionError(f"--train has {option}, which the launch sets; {instead}")
    command = train_request(request, description.options)
    job = command.job
    check_data(job)
    job.check_effects()
    check_sizes(request, command, job)
    return job


def train_request(request: LaunchRequest, words: Sequence[str]) -> Request[Any]:
    """Request that ``systolic train`` reads from words after the recipe.

    Raises:
        OptionError: an option is unknown or out of its range.
    """
    return request_for(request.recipe, words, "train", VERBS["train"].forms[0].options.read, {})


def under_plan(request: LaunchRequest, description: Launch, job: Job) -> LaunchRequest:
    """Request with the plan's forecast dropped, and a warning, if options in ``--train`` change the step.

    Args:
        request: The request.
        description: Its launch.
        job: Job with the options in ``--train``.

    Raises:
        OptionError: an option in ``--train`` contradicts the plan.
    """
    chosen, warn = request.chosen, reporter().warn
    if chosen is None or not request.train:
        return request
    words = description.options[: len(description.options) - len(request.train)]
    before = train_request(request, words)
    kept = kept_choice(chosen, before.job, job, steps_given=True, warn=warn)
    flags = train_request(request, description.options).verb.flags
    if flags != before.verb.flags:
        if chosen.flags:
            raise OptionError(
                f"the flags are set by {chosen.path}; leave --flags out of --train, or plan again with these flags"
            )
        warn(f"{chosen.path} has a forecast without these flags, so the bill has no time")
        kept = replace(kept, forecast={})
    return replace(request, source=replace(request.source, chosen=kept))


def check_sizes(request: LaunchRequest, command: Request[Any], job: Job) -> None:
    """Checks that the layout divides the slice, the model and the batch, also on fewer slices down to ``--min-slices``.

    Raises:
        LayoutError: the layout does not divide one of them.
    """
    on, devices = request.on, command.verb.for_devices
    if request.via == "local":
        # The processes form one slice of CPU devices, whatever slices they stand in for.
        _check_layout(job, on.num_devices, 1, devices)
    elif devices is None or devices <= on.num_devices:
        job.for_slice(on)
    else:
        _check_layout(job, on.num_devices, on.num_slices, devices)
    for left in range(request.min_slices or on.num_slices, on.num_slices):
        slices = 1 if request.via == "local" else left
        _check_layout(job, on.num_devices // on.num_slices * left, slices, on.num_devices)


def _check_layout(job: Job, num_devices: int, num_slices: int, intended: int | None) -> None:
    fewer = None if intended is None else on_fewer(job, intended, num_devices, num_slices)
    (job if fewer is None else fewer.job).on(num_devices, num_slices)


def served_words(serve: str | Sequence[str]) -> list[str]:
    """Options for ``systolic serve``, checked as that verb checks them.

    Raises:
        OptionError: an option is unknown, out of range, or set by the launch.
    """
    words = words_of("serve", serve)
    for word in words:
        if word.partition("=")[0] in TAKEN:
            raise OptionError(
                f"--serve has {word}, which the launch sets; leave it out, or give --grace-seconds or --keys-secret to launch serve"
            )
    if models := parse(VERBS["serve"].forms[0].options.read, words, "systolic serve").models:
        raise OptionError(
            f"--serve has {models[0]!r}, which is not an option; the model is the Bundle"
        )
    return words
