"""``systolic launch RECIPE --on SLICE --via PLATFORM``: writes a platform's files, shows the bill, submits."""

import enum
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.cli.parse import print_verb_help
from systolic.cli.target import Request, first, planned_request
from systolic.core.arguments import Required
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.report.output import print_json, warn

if TYPE_CHECKING:
    from systolic.job import Job
    from systolic.launching import Launch, LaunchBill, Prepared, Purchase
    from systolic.session.launched import Launched
    from systolic.session.launching import LaunchRequest

FORMS = """usage: systolic launch RECIPE --on SLICE --via PLATFORM [options]
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
STEPS = ("--submit", "--show")
"""Options that say what this command does, not what is launched."""
VIA = Required("a platform; add --via tpu-vm, gke, skypilot, slurm, docker or local")


class Output(enum.Enum):
    """Output of a launch."""

    summary = "summary"
    files = "files"
    """The summary and the texts of the files."""
    json = "json"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of a launch.

    Args:
        on: Slice to train on, such as v5e-16, v5p-128, 2xv5e-256 or 8xh100; by default the plan's.
        via: Platform: tpu-vm, gke, skypilot, slurm, docker or local.
        submit: Run the platform's client now; otherwise the files are only written.
        show: Print the files.
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
        json: Print one JSON object.
    """

    on: str = ""
    via: Annotated[str, VIA]
    submit: bool = False
    show: bool = False
    plan: Path | None = None
    candidate: Annotated[int, COUNT] = 1
    quick: bool = False
    spot: bool = False
    reserved: bool = False
    reservation: str = ""
    name: str = ""
    out: Path | None = None
    run: str = ""
    restarts: Annotated[int | None, NOT_NEGATIVE] = None
    min_slices: Annotated[int | None, COUNT] = None
    rejoin_seconds: Annotated[int | None, NOT_NEGATIVE] = None
    train: str = ""
    image: str = ""
    project: str = ""
    zone: str = ""
    network: str = ""
    service_account: str = ""
    namespace: str = ""
    queue: str = ""
    account: str = ""
    time: str = ""
    gpus_per_node: Annotated[int | None, COUNT] = None
    setup: str = ""
    sbatch: str = ""
    claim: str = ""
    processes: Annotated[int | None, COUNT] = None
    keep: bool = False
    json: bool = False

    @property
    def purchase(self) -> "Purchase":
        """How the chips are paid for.

        Raises:
            OptionError: both spot and reserved are given.
        """
        from systolic.launching import Purchase

        reserved = self.reserved or bool(self.reservation)
        if self.spot and reserved:
            raise OptionError("--spot and --reserved exclude each other; leave one of them out")
        if reserved:
            return Purchase.reserved
        return Purchase.spot if self.spot else Purchase.on_demand


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, LaunchOptions)
    if args[0] == "serve":
        from systolic.cli import launch_serve

        return launch_serve.run(args[1:])
    target, rest = first(args, "launch", "a recipe")
    return launch(planned_request(target, rest, "launch", LaunchOptions, warn), args)


def launch(asked: Request[LaunchOptions], args: Sequence[str]) -> int:
    """Writes and shows a launch, submits it with ``--submit``; returns the exit code."""
    from systolic.cli.launch_checks import check_platform, trained, under_plan
    from systolic.launching import prepare
    from systolic.session import launched, launching
    from systolic.training.session import check_data

    options = asked.verb
    request = request_of(asked, args)
    launching.check_paths(request)
    made = launching.describe(request)
    made = launched.as_before(made, folder_of(made, options.out))
    if not options.train:
        check_data(asked.job)  # before what the platform asks for; --train may give it yet
    prepared = prepare(options.via, made)
    check_platform(options)
    job = trained(request, made)
    request = under_plan(request, made, job, warn)
    prepared = replace(prepared, notes=(*prepared.notes, *launching.notes(request)))
    record, shown = finish(
        made,
        prepared,
        bill_of(asked, request, job),
        via=options.via,
        out=options.out,
        command=made.command(),
        submit=options.submit,
        output=output(show=options.show, json=options.json),
    )
    if options.json:
        print_json(shown)
    else:
        print("\n".join(following(record, args)))
    return 0


def finish(
    made: "Launch",
    prepared: "Prepared",
    bill: "LaunchBill",
    *,
    via: str,
    out: Path | None,
    command: Sequence[str],
    submit: bool,
    output: Output,
) -> "tuple[Launched, dict[str, Any]]":
    """Writes the files of a launch, prints its summary unless JSON is asked for, submits if ``submit``; returns the record and its JSON."""
    from systolic.session import launch_submit, launched, launching

    folder = folder_of(made, out)
    launch_submit.check_free(made, folder, via)
    files = launching.write(made, prepared, folder)
    record = launched.record(via, made, prepared, bill, folder)
    if output is not Output.json:
        summarize(made, prepared, bill, files, command, folder=folder, output=output)
    if submit:
        record = launch_submit.submit(record)
    notes = list(prepared.notes)
    return record, {**record.to_json(), "notes": notes, "files": [str(path) for path in files]}


def output(*, show: bool, json: bool) -> Output:
    """Output that the options ask for.

    Raises:
        OptionError: both ``--show`` and ``--json`` are given.
    """
    if show and json:
        raise OptionError(
            "--show prints text, but --json prints one JSON object, which names the files; leave one of them out"
        )
    return Output.json if json else Output.files if show else Output.summary


def without_steps(args: Sequence[str]) -> list[str]:
    """Command line of a launch without ``--submit`` and ``--show``."""
    return [word for word in args if word not in STEPS]


def folder_of(made: "Launch", out: Path | None) -> Path:
    """Folder for the files of a launch."""
    from systolic.session.launched import FOLDERS

    return out or Path(FOLDERS) / made.name


def request_of(asked: Request[LaunchOptions], args: Sequence[str]) -> "LaunchRequest":
    """Launch request of the command line.

    Raises:
        OptionError: neither a slice nor a plan is given, or ``--train`` does not parse.
        NotFoundError: the slice does not exist.
    """
    from systolic.chips import slice
    from systolic.launching import Site, SlurmOptions
    from systolic.session.launching import LaunchRequest

    options = asked.verb
    on = options.on or (asked.chosen.slice if asked.chosen is not None else "")
    if not on:
        raise OptionError(
            "systolic launch needs a slice; add --on v5e-16 (systolic chips lists slices)"
        )
    return LaunchRequest(
        recipe=asked.recipe,
        options=asked.options,
        on=slice(on),
        via=options.via,
        made_by=("systolic", "launch", *without_steps(args)),
        typed=asked.names,
        chosen=asked.chosen,
        train=words("train", options.train),
        name=options.name,
        run=options.run,
        image=options.image,
        purchase=options.purchase,
        site=Site(
            project=options.project,
            zone=options.zone,
            namespace=options.namespace,
            service_account=options.service_account,
            queue=options.queue,
            account=options.account,
            network=options.network,
            claim=options.claim,
            reservation=options.reservation,
        ),
        slurm=SlurmOptions(
            time=options.time,
            gpus_per_node=options.gpus_per_node,
            setup=options.setup,
            options=tuple(words("sbatch", options.sbatch)),
            programs=str(Path(sys.executable).parent),
        ),
        restarts=options.restarts,
        min_slices=options.min_slices,
        rejoin_seconds=options.rejoin_seconds,
        processes=options.processes,
        keep=options.keep,
    )


def words(option: str, text: str) -> list[str]:
    """Splits an option's text as a shell does.

    Raises:
        OptionError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise OptionError(f"--{option} is {text!r}, which is not valid shell: {error}") from error


def bill_of(asked: Request[LaunchOptions], request: "LaunchRequest", job: "Job") -> "LaunchBill":
    """Bill before the launch; with ``--quick`` from a forecast of the step."""
    from systolic.report.progress import ProgressLine
    from systolic.session import launching

    seconds = None
    if asked.verb.quick and asked.chosen is None:
        with ProgressLine(sys.stderr, "forecasting") as progress:
            seconds = launching.quick_step_seconds(
                job, request.on, lambda stage: progress.told("", sys.stderr, stage)
            )
    return launching.bill(request, job.steps, seconds)


def summarize(
    made: "Launch",
    prepared: "Prepared",
    bill: "LaunchBill",
    files: Sequence[Path],
    command: Sequence[str],
    *,
    folder: Path,
    output: Output,
) -> None:
    """Prints a summary of the launch with its bill and its files; ends with their texts if asked for."""
    from systolic.launching.names import number_of

    texts = {folder / name: text for name, text in prepared.files.items()}
    lines = {
        path: f" ({number_of(len(text.splitlines()), 'line')})" for path, text in texts.items()
    }
    shown = f"--show prints {', '.join(prepared.files)}"
    on = made.on
    kind = ("chip", on.num_chips) if on.platform == "tpu" else ("device", on.num_devices)
    chips, hosts = (number_of(count, what) for what, count in (kind, ("host", prepared.hosts)))
    rows = [
        ("launch", f"{made.name} on {on.name}: {chips}, {hosts}"),
        ("command", shlex.join(command)),
        *((("run" if command[1] == "train" else "bundle", made.run),) if made.run else ()),
        ("bill", bill.text()),
        *(("file", f"{path}{lines.get(path, '')}") for path in files),
        *((("", shown),) if output is Output.summary else ()),
        *(("note", note) for note in prepared.notes),
    ]
    for title, text in rows:
        print(f"{title:<8} {text}")
    if output is Output.files:
        for path, text in texts.items():
            print(f"\n── {path}\n{text.rstrip()}")
        print()


def following(record: "Launched", args: Sequence[str]) -> list[str]:
    """Lines that show the next commands."""
    if record.submitted is None:
        asked = [] if record.place else record.commands["asked"]
        place = "".join(f" --{one['what']}={one['what'].upper()}" for one in asked)
        commands = (*record.commands["checks"], *record.commands["submit"])
        words = [shlex.join(words) + place for words in commands]
        by_hand = " && ".join([f"cd {shlex.quote(record.folder)}", *words])
        again = shlex.join(["systolic", "launch", *without_steps(args), "--submit"])
        return [f"submit   {again}", f"         or: {by_hand}"]
    return [
        f"submitted; next: systolic status {record.name}, systolic logs -f {record.name}, systolic stop {record.name}"
    ]
