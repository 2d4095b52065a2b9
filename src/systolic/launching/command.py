"""``systolic launch``, ``runs``, ``status``, ``logs`` and ``stop``, and the functions of :mod:`systolic`: of these names, and ``launches``."""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from systolic.chips import Slice
from systolic.core.arguments import OptionWords, Partner, Required, TextWord, Wording, command_of
from systolic.core.option_words import command_line, option_words, path_text
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.reporter import reporter
from systolic.recipes.jobs import JobSource

if TYPE_CHECKING:
    from systolic.launching.launch import Launch, LaunchBill, Prepared
    from systolic.launching.lifecycle import Stopped
    from systolic.launching.record import WrittenLaunch
    from systolic.launching.state import LaunchState
    from systolic.planning.plan import Plan

RECIPE = Wording("the name of a recipe or path/to/file.py:function, which other machines can read")
VIA = Required("a platform; add --via tpu-vm, gke, skypilot, slurm, docker or local")
TEXT = OptionWords(str)

USAGE = """usage: systolic launch RECIPE --on SLICE --via PLATFORM [options]
       systolic launch RECIPE --plan plan.json --via PLATFORM [options]
       systolic launch serve BUNDLE --via gke [options]

Writes the platform's files and shows the bill; --show prints the files, --submit runs the platform's own client.
RECIPE is a name that systolic recipes lists, or path/to/file.py:function, whose file is included.
PLATFORM is one of:
  tpu-vm    Cloud TPU VMs: requests a queued resource, trains on all of its machines, then deletes it
  gke       Google Kubernetes Engine: a JobSet with a job per slice
  skypilot  machines rented by SkyPilot: a managed job, on TPUs or GPUs
  slurm     a GPU cluster: a batch script with a task per GPU
  docker    an image, built and run on this machine
  local     the slice's hosts as processes on this machine, with virtual CPU devices
Every host runs the same command, which starts the run or continues it, so losing a machine loses only the training
since the last checkpoint. systolic runs lists launches; systolic status, logs and stop take a launch's name.
systolic launch RECIPE --help shows the recipe's options."""
SERVE_USAGE = """usage: systolic launch serve BUNDLE --via gke [options]

Writes the objects that serve a Bundle on Google Kubernetes Engine, and shows the price per hour. --show prints them,
--submit applies them. systolic status, logs and stop take the launch's name."""

STEPS = ("--submit", "--show", "--quiet")
"""Options that say what this command does, not what is launched."""
NAME = Wording("the name of a launch or its folder")


@command_of
def launch(  # noqa: PLR0913  the options of systolic launch
    job: Annotated[JobSource | str, RECIPE],
    *,
    on: str | Slice = "",
    via: Annotated[str, VIA],
    submit: bool = False,
    plan: Annotated["Plan | Path | str | None", OptionWords(Path | None)] = None,
    candidate: Annotated[int, COUNT, Partner("plan")] = 1,
    quick: bool = False,
    spot: bool = False,
    reserved: bool = False,
    reservation: str = "",
    name: str = "",
    out: Path | str | None = None,
    run: Annotated[Path | str, TEXT] = "",
    restarts: Annotated[int | None, NOT_NEGATIVE] = None,
    min_slices: Annotated[int | None, COUNT] = None,
    rejoin_seconds: Annotated[int | None, NOT_NEGATIVE] = None,
    train: Annotated[str | Sequence[str], TEXT] = "",
    image: str = "",
    project: str = "",
    zone: str = "",
    network: str = "",
    service_account: str = "",
    namespace: str = "",
    queue: str = "",
    account: str = "",
    time: str = "",
    gpus_per_node: Annotated[int | None, COUNT] = None,
    setup: str = "",
    sbatch: Annotated[str | Sequence[str], TEXT] = "",
    claim: str = "",
    processes: Annotated[int | None, COUNT] = None,
    keep: bool = False,
    **options: Any,
) -> "WrittenLaunch":
    """Writes a platform's files that train a recipe on a slice; with ``submit`` submits them.

    A reporter's ``update`` gets the launch when its files are written, before it is submitted.

    Args:
        job: Recipe to train.
        on: Slice to train on, such as v5e-16, v5p-128, 2xv5e-256 or 8xh100; by default the plan's.
        via: Platform: tpu-vm, gke, skypilot, slurm, docker or local.
        submit: Run the platform's client now; otherwise the files are only written.
        plan: File written by systolic plan: gives slice, layout, batch, steps and compiler flags of its best candidate, and the time for the bill.
        candidate: Rank of the plan's candidate.
        quick: Without a plan: forecast the step time for the bill, as systolic forecast --quick does; refuses a job that does not fit.
        spot: Use spot chips, which are cheaper and can be preempted at any time.
        reserved: Use chips of a reservation.
        reservation: gke: name of the reservation.
        name: Name of the launch; by default the recipe and the slice.
        out: Folder for the files; by default launches/NAME.
        run: Folder of the run: gs://BUCKET/FOLDER, which the machines mount; gke: or a path on the volume of --claim; local, slurm, docker: a local folder, by default runs/NAME.
        restarts: Restarts after a failure or a lost machine; by default 10, or 100 for tpu-vm and gke with --spot, where preemptions count.
        min_slices: local, tpu-vm: continue with at least this many slices when others do not come back; the batch per step stays the same.
        rejoin_seconds: With --min-slices: time for a slice to come back before it is dropped; by default 300.
        train: More options for systolic train, as one argument: --train="--workers 4 --profile 10".
        image: gke: container image with Systolic.
        project: tpu-vm: Google Cloud project; by default the client's.
        zone: tpu-vm, gke, skypilot: Google Cloud zone; tpu-vm requires it.
        network: tpu-vm: Google Cloud network.
        service_account: tpu-vm, gke: service account of the machines or pods.
        namespace: gke: Kubernetes namespace.
        queue: gke: Kueue local queue; slurm: partition.
        account: slurm: account to charge.
        time: slurm: time limit of a job, such as 24:00:00 or 7-00; at the limit the job is requeued and continues.
        gpus_per_node: slurm: GPUs of a node; by default the catalogue's number.
        setup: slurm: shell line to run before the training, such as "module load cuda".
        sbatch: slurm: more options for sbatch, as one argument: --sbatch="--qos=long --constraint=h100".
        claim: gke: PersistentVolumeClaim to mount at /runs.
        processes: local: number of processes; by default the number of hosts of the slice.
        keep: tpu-vm: keep the machines after the training has ended.
        options: Options of the recipe.

    Raises:
        OptionError: an option is wrong, contradicts another, or is not used by the platform.
        NotFoundError: there is no such recipe or slice.
        LayoutError: the layout does not divide the slice, the model or the batch.
        TakenError: the folder holds something else.
        RunError: a launch of that name is running; or with ``submit`` the client is missing or fails.
    """
    values = {**locals()}
    from systolic.launching import prepare, request
    from systolic.launching.checks import check_platform, trained, under_plan
    from systolic.launching.record import as_before

    source = request.source_of(job, options, request.plan_path(plan), candidate)
    words = made_by(launch, [source.recipe.target], values, source.words)
    launch_request = request.request_of(source, values, words)
    request.check_paths(launch_request)
    description = request.describe(launch_request)
    folder = folder_of(description, out)
    description = as_before(description, folder)
    if not train:
        from systolic.training.session import check_data

        check_data(source.job)  # before what the platform asks for; --train may give it yet
    prepared = prepare(via, description)
    check_platform(via, values)
    trained_job = trained(launch_request, description)
    launch_request = under_plan(launch_request, description, trained_job)
    prepared = replace(prepared, notes=(*prepared.notes, *request.notes(launch_request)))
    seconds = None
    if quick and source.chosen is None:
        seconds = request.quick_step_seconds(trained_job, launch_request.on)
    bill = request.bill(launch_request, trained_job.steps, seconds)
    return written(description, prepared, bill, via, folder, description.command(), submit=submit)


@command_of
def launch_server(  # noqa: PLR0913  the options of systolic launch serve
    bundle: Annotated[
        Path | str, Wording("a Bundle's folder, or gs://BUCKET/FOLDER"), TextWord("BUNDLE")
    ],
    *,
    via: Annotated[Literal["gke"], Required("a platform; add --via gke")],
    on: str | Slice = "v5e-8",
    submit: bool = False,
    image: str = "",
    variant: str = "deployment",
    model: str = "",
    name: str = "",
    out: Path | str | None = None,
    replicas: Annotated[int, COUNT] = 1,
    max_replicas: Annotated[int, COUNT] = 4,
    metric: str = "http_requests_in_flight",
    target: Annotated[int, COUNT] = 32,
    grace_seconds: Annotated[int, NOT_NEGATIVE] = 45,
    keys_secret: str = "",
    serve: Annotated[str | Sequence[str], TEXT] = "",
    spot: bool = False,
    namespace: str = "",
    service_account: str = "",
) -> "WrittenLaunch":
    """Writes the objects that serve a Bundle on Google Kubernetes Engine; with ``submit`` applies them.

    A pod is a server on one TPU machine. The number of pods follows the load.

    Args:
        bundle: Bundle that the image contains, or gs://BUCKET/FOLDER, which the pods mount.
        via: Platform: gke.
        on: Slice of each pod, with one host: v5e-1, v5e-8, v6e-8 or v5p-8.
        submit: Run kubectl now; otherwise the file is only written.
        image: Container image, for example one built with systolic export BUNDLE --to docker --for tpu.
        variant: deployment, or kserve for a KServe InferenceService.
        model: Name of the model for clients; by default the Bundle's folder.
        name: Name of the launch; by default the model and the slice.
        out: Folder for the file; by default launches/NAME.
        replicas: Minimum number of pods.
        max_replicas: Maximum number of pods.
        metric: Gauge of the server that the autoscaler follows; those with num_ are for language models.
        target: Target of the gauge per pod.
        grace_seconds: Time for requests in flight when a pod is terminated.
        keys_secret: Kubernetes Secret with keys.txt, the file of API keys' hashes.
        serve: More options for systolic serve, as one argument: --serve="--context 8192 --rows 32".
        spot: Use spot chips, which are cheaper and can be preempted at any time.
        namespace: Kubernetes namespace.
        service_account: Service account of the pods.

    Raises:
        OptionError: an option is wrong, or the Bundle does not exist.
        NotFoundError: there is no such slice.
        TakenError: the folder holds something else.
        RunError: with ``submit``: the client is missing or fails.
    """
    values = {**locals()}
    from systolic.chips import slice
    from systolic.launching import Purchase, Site
    from systolic.launching.checks import served_words
    from systolic.launching.gke_serve import GkeServer, command, prepare
    from systolic.launching.record import as_before
    from systolic.launching.request import describe_server, server_bill

    server = GkeServer(
        variant=variant,
        grace_seconds=grace_seconds,
        replicas=replicas,
        most=max_replicas,
        metric=metric,
        target=target,
        keys_secret=keys_secret,
    )
    description = describe_server(
        path_text(bundle),
        on=slice(on) if isinstance(on, str) else on,
        words=served_words(serve),
        made_by=made_by(launch_server, ["serve", path_text(bundle)], values),
        names=(model, name),
        image=image,
        purchase=Purchase.spot if spot else Purchase.on_demand,
        site=Site(namespace=namespace, service_account=service_account),
    )
    folder = folder_of(description, out)
    description = as_before(description, folder)
    prepared = prepare(description, server)
    bill = server_bill(description, server)
    return written(
        description, prepared, bill, via, folder, command(description, server), submit=submit
    )


def made_by(
    function: Callable[..., Any],
    words: Sequence[str],
    options: Mapping[str, Any],
    more: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command that makes a launch: as it was typed, or from Python's values; without what is done beyond writing files.

    Args:
        function: The public function.
        words: Words before the options.
        options: Arguments of the function.
        more: Words after its options.
    """
    if typed := command_line():
        return tuple(word for word in typed if word not in STEPS)
    parameters = inspect.signature(function).parameters
    keywords = [
        name for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    plain = {name: _plain(options[name]) for name in keywords}
    own = option_words(function, plain, without=("submit",))
    return ("systolic", "launch", *words, *own, *more)


def _plain(value: Any) -> Any:
    """A value as an option gives it."""
    if isinstance(value, Slice):
        return value.name
    return shlex.join(value) if isinstance(value, list | tuple) else value


def folder_of(description: "Launch", out: Path | str | None) -> Path:
    """Folder for the files of a launch."""
    from systolic.launching.record import FOLDERS

    return Path(FOLDERS) / description.name if out is None else Path(out)


def written(
    description: "Launch",
    prepared: "Prepared",
    bill: "LaunchBill",
    via: str,
    folder: Path,
    command: Sequence[str],
    *,
    submit: bool,
) -> "WrittenLaunch":
    """Writes the files of a launch, reports it, and submits it if ``submit``."""
    from systolic.launching import lifecycle, request
    from systolic.launching.record import WrittenLaunch, record

    lifecycle.check_free(description, folder, via)
    files = request.write(description, prepared, folder)
    result = WrittenLaunch(
        launch=description,
        prepared=prepared,
        bill=bill,
        folder=folder,
        files=tuple(files),
        command=tuple(command),
        record=record(via, description, prepared, bill, folder),
    )
    reporter().update(result)
    return replace(result, record=lifecycle.submit(result.record)) if submit else result


@command_of
def launches() -> "list[LaunchState]":
    """Lists the launches of this account, newest first; run directories of train are not listed."""
    from systolic.launching import record
    from systolic.launching.state import state_of

    return [state_of(each) for each in record.launches()]


@command_of
def status(name: Annotated[Path | str, NAME, TextWord("NAME")]) -> "LaunchState":
    """Shows the state of a launch; asks the platform's client if the training is not on this machine.

    In Python, :meth:`LaunchState.ask_client` asks the client.

    Args:
        name: Name of the launch, as systolic runs lists it, or its folder.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
    """
    from systolic.launching.record import listed
    from systolic.launching.state import state_of

    return state_of(listed(path_text(name)))


@command_of
def logs(
    name: Annotated[Path | str, NAME, TextWord("NAME")],
    *,
    follow: Annotated[bool, OptionWords(bool, also="-f")] = False,
    lines: Annotated[int, COUNT] = 50,
    process: Annotated[int, NOT_NEGATIVE] = 0,
) -> Iterator[str]:
    """Prints the output of a launch: that of the first host, or of all hosts for tpu-vm.

    In Python, the iterator yields the text in pieces, with ``follow`` as it is written.

    Args:
        name: Name of the launch, as systolic runs lists it, or its folder.
        follow: Keep printing until the training ends; short form: -f.
        lines: Number of last lines to print.
        process: local: index of the process, from 0.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
        OptionError: the launch has no such process.
        RunError: the launch has no log yet, or its folder is missing, or the client is missing or fails.
    """
    from systolic.launching.record import find
    from systolic.launching.state import output_of

    launched = find(path_text(name))
    return output_of(launched, path_text(name), follow=follow, last=lines, process=process)


@command_of
def stop(name: Annotated[Path | str, NAME, TextWord("NAME")]) -> "Stopped":
    """Stops a launch: asks the training to save, then releases the machines; fails if it was killed before it had saved.

    Args:
        name: Name of the launch, as systolic runs lists it, or its folder.

    Raises:
        NotFoundError: no launch has that name; the message suggests the nearest.
        RunError: the client is missing or fails, or the launch runs on another host.
    """
    from systolic.launching import lifecycle
    from systolic.launching.record import find

    return lifecycle.stop(find(path_text(name)))
