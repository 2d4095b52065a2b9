"""``systolic train RECIPE [options]``, ``--resume RUN``, ``--replay BATCH``, ``--rehearse SLICE``."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.cli.output import print_json
from systolic.cli.parse import known, parse, print_verb_help
from systolic.cli.target import Request, first, planned_request, request_for
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, dashed

if TYPE_CHECKING:
    from systolic.session.job_source import JobSource
    from systolic.session.training import Audience, SessionOptions, TrainResult
    from systolic.training.ledger import Ledger

FORMS = """usage: systolic train RECIPE [options]
       systolic train RECIPE --plan plan.json [options]
       systolic train RECIPE --rehearse SLICE [options]
       systolic train --resume RUN [options]
       systolic train --replay RUN/bad/step-N.npz [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function.
--plan takes what systolic plan found: slice, layout, batch, precision, steps and compiler flags; with
--candidate 2 those of the second in its ranking.
--resume continues from the newest intact checkpoint; options that are given replace the run's own, and
the changes are listed; another model, data or seed is refused.
--replay computes the train step of a bad step's batch again and reports what is wrong with it.
Both execute the run's recipe.py, if it is yours; another user's only with --trust.
systolic train RECIPE --help shows the recipe's options."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a new run.

    Args:
        run: The run's directory, or s3://BUCKET/FOLDER or gs://BUCKET/FOLDER; by default runs/NAME-TIME.
        continue_: Continue the run of --run where it has begun, from its newest checkpoint; start it otherwise. For machines that start the same command again.
        rehearse: Run a few real steps on virtual CPU devices with this slice's mesh, then stop.
        plan: What systolic plan wrote: trains its best candidate with the options that were planned, and shows the forecast beside what is measured.
        candidate: Which of the plan's candidates, by rank.
        init_from: Begin with the weights of this run (its best checkpoint) or of RUN/checkpoints/STEP; the optimizer starts afresh.
        executable: The compiled train step that systolic forecast --save kept, instead of compiling it.
        flags: Compiler flags on top of the set that jobs on these devices share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        workers: Processes that read and transform data; 0 uses threads.
        diagnose: Steps between gradient probes by layer, for systolic explain; 0 never probes, by default as often as 1 % of the time allows.
        profile: Steps to trace with XLA's profiler after warm-up, into RUN/profile, for systolic explain RUN/profile; at the end their ops are set beside the forecast of the program.
        log_every: Steps between records, each the mean of its steps; by default a 400th of the job.
        for_devices: Devices that layout and batch are for: on fewer, each step has the same batch in more passes.
        coordinator: HOST:PORT of the first of several processes, where Cloud TPU, GKE, Slurm or MPI don't tell it.
        processes: How many processes train together, with --coordinator.
        process: Number of this one, from 0.
        json: Print the summary as one JSON object on stdout.
    """

    run: Path | None = None
    continue_: bool = False
    rehearse: str | None = None
    plan: Path | None = None
    candidate: Annotated[int, COUNT] = 1
    init_from: Path | None = None
    executable: Path | None = None
    flags: str = ""
    workers: Annotated[int, NOT_NEGATIVE] = 0
    diagnose: Annotated[int | None, NOT_NEGATIVE] = None
    profile: Annotated[int, NOT_NEGATIVE] = 0
    log_every: Annotated[int | None, COUNT] = None
    for_devices: Annotated[int | None, COUNT] = None
    coordinator: str | None = None
    processes: Annotated[int | None, COUNT] = None
    process: Annotated[int | None, NOT_NEGATIVE] = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Continues a run; options of its recipe may follow, in place of its own.

    Args:
        resume: The run's directory, or s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.
        executable: The compiled train step that systolic forecast --save kept, instead of compiling it.
        flags: Compiler flags in place of those that the run was started with; none for XLA's defaults.
        workers: Processes that read and transform data; 0 uses threads.
        diagnose: Steps between gradient probes by layer, for systolic explain; 0 never probes, by default as the run was started.
        profile: Steps to trace with XLA's profiler after warm-up, into RUN/profile, for systolic explain RUN/profile; at the end their ops are set beside the forecast of the program.
        log_every: Steps between records, each the mean of its steps; by default as the run was started.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        for_devices: Devices that layout and batch are for: on fewer, each step has the same batch in more passes.
        coordinator: HOST:PORT of the first of several processes, where Cloud TPU, GKE, Slurm or MPI don't tell it.
        processes: How many processes train together, with --coordinator.
        process: Number of this one, from 0.
        json: Print the summary as one JSON object on stdout.
    """

    resume: Path
    executable: Path | None = None
    flags: str | None = None
    workers: Annotated[int, NOT_NEGATIVE] = 0
    diagnose: Annotated[int | None, NOT_NEGATIVE] = None
    profile: Annotated[int, NOT_NEGATIVE] = 0
    log_every: Annotated[int | None, COUNT] = None
    for_devices: Annotated[int | None, COUNT] = None
    coordinator: str | None = None
    processes: Annotated[int | None, COUNT] = None
    process: Annotated[int | None, NOT_NEGATIVE] = None
    trust: bool = False
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Computes the train step of a bad step's batch again and reports what is wrong with it.

    Args:
        replay: RUN/bad/step-N.npz.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object.
    """

    replay: Path
    trust: bool = False
    json: bool = False


OPTIONS = (TrainOptions, ResumeOptions, ReplayOptions)
"""Classes of which ``systolic train --help`` lists the options."""


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, *OPTIONS)
    from systolic.training.ledger import Ledger

    ledger = Ledger()
    form = args[0].partition("=")[0]
    if form == "--resume":
        return resume(args, ledger)
    if form == "--replay":
        return replay(parse(ReplayOptions, args, "systolic train"))
    target, rest = first(args, "train", "a recipe")
    if "--resume" in rest:
        raise OptionError(
            "--resume takes a run and no recipe: systolic train --resume RUN; the run knows its recipe and options"
        )
    asked = requested(target, rest)
    if asked.verb.rehearse is not None:
        from systolic.cli.rehearse import rehearse

        return rehearse(source_of(asked), asked.verb)
    return train(asked, ledger)


def requested(target: str, args: Sequence[str]) -> Request[TrainOptions]:
    """A recipe's options and the verb's; under a plan, the options that were planned where they are not given."""
    return planned_request(target, args, "train", TrainOptions, tell)


def train(asked: Request[TrainOptions], ledger: "Ledger") -> int:
    """Trains in a new run; returns the exit code."""
    from systolic.session.training import start

    options = asked.verb
    join(options)
    if options.continue_ and begun(options.run):
        return again(asked, ledger)
    return show(
        start(
            source_of(asked),
            session_options(options),
            audience(json=options.json),
            run=options.run,
            init_from=options.init_from,
            ledger=ledger,
        ),
        json=options.json,
    )


def begun(run: Path | None) -> bool:
    """Whether the run of ``--continue`` has begun, as the first process of the job sees it.

    Raises:
        OptionError: no run is given.
    """
    from systolic.artifact.buckets import has
    from systolic.artifact.run import JOB
    from systolic.training import distributed

    if run is None:
        raise OptionError("--continue needs the run; add --run DIR, the same at every start")
    found = (not distributed.joined() or distributed.is_first()) and has(run, JOB)
    return bool(distributed.share("begun" if found else "")) if distributed.joined() else found


def again(asked: Request[TrainOptions], ledger: "Ledger") -> int:
    """Continues the run with the options that are given; returns the exit code.

    Raises:
        OptionError: the run began with another recipe, plan or start than the command has.
    """
    options = asked.verb
    args = ["--resume", str(options.run), *asked.typed]
    for name in ("workers", "diagnose", "profile", "log_every", "for_devices", "executable"):
        value = vars(options)[name]
        if value is not None:
            args += [f"--{dashed(name)}", str(value)]
    if options.flags:
        args.append(f"--flags={options.flags}")
    return resume([*args, *(["--json"] if options.json else [])], ledger, asked)


def resume(
    args: Sequence[str], ledger: "Ledger", begun_by: Request[TrainOptions] | None = None
) -> int:
    """Continues a run; returns the exit code.

    Args:
        args: ``--resume RUN`` and options.
        ledger: Opened when the command started.
        begun_by: The command of ``--continue``, which has to be the one that the run began with.
    """
    from systolic.session.resume_checks import check_begun
    from systolic.session.resuming import continue_run, opened

    # The run's recipe says which options follow, and it takes these to open the run.
    given, _ = known(ResumeOptions, args, "systolic train")
    own = ResumeOptions(**given)
    join(own)
    with opened(own.resume, trust=own.trust) as run:
        if begun_by is not None:
            init_from = begun_by.verb.init_from
            check_begun(run.directory, run.record, begun_by.recipe, begun_by.chosen, init_from)
        target = shlex.join(["--resume", str(own.resume)])
        asked = request_for(run.recipe, args, "train", ResumeOptions, run.saved, target=target)
        result = continue_run(
            run,
            run.source(asked.options),
            session_options(asked.verb),
            audience(json=own.json),
            ledger=ledger,
        )
    return show(result, json=own.json)


def replay(options: ReplayOptions) -> int:
    """Computes the train step on a kept batch again; returns the exit code."""
    from systolic.session.training import replay as again

    result = again(options.replay, trust=options.trust)
    if options.json:
        print_json(result)
        return 0
    print(f"{options.replay} with the weights of step {result['weights']}")
    for name, value in result["metrics"].items():
        print(f"  {name:<14} {value:.6g}")
    for name, text in result["arrays"].items():
        print(f"  batch {name:<8} {text}")
    for name in result["not_finite"]:
        print(f"  not finite: {name}")
    return 0


def source_of(asked: Request[TrainOptions]) -> "JobSource":
    """What the job is made from; no path depends on the working directory."""
    from systolic.artifact import paths
    from systolic.session.job_source import JobSource

    options = paths.absolute(dict(asked.options))
    return JobSource(recipe=asked.recipe, options=options, chosen=asked.chosen)


def session_options(verb: TrainOptions | ResumeOptions) -> "SessionOptions":
    """The options that say how the session runs."""
    from systolic.session.training import SessionOptions

    return SessionOptions(
        **{field.name: vars(verb)[field.name] for field in fields(SessionOptions)}
    )


def audience(*, json: bool) -> "Audience":
    """A live view, none with ``--json``; warnings go to stderr."""
    from systolic.report.run.live import Live, Quiet
    from systolic.session.training import Audience

    return Audience(watchers=(Quiet() if json else Live(),), tell=tell, shows_events=True)


def tell(text: str) -> None:
    """One line on stderr."""
    print(f"systolic: {text}", file=sys.stderr)


def join(options: TrainOptions | ResumeOptions) -> None:
    """Joins the other processes of the job, if there are any."""
    from systolic.training import distributed

    distributed.describe(options.coordinator, options.processes, options.process)
    if distributed.belongs(os.environ) and options.json:
        # Libraries between processes (Gloo, NCCL) print to stdout, which belongs to one JSON object.
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    distributed.join()


def show(result: "TrainResult", *, json: bool) -> int:
    """Prints the summary in the first process; returns the exit code: after a signal 128 and its number, as a shell has it."""
    from systolic.report.explain.beside import beside_json, print_beside
    from systolic.report.run.summary import print_summary
    from systolic.training import distributed

    first = distributed.is_first()
    if json and (first or not result.trained):
        more = {} if result.beside is None else {"profile": beside_json(result.beside)}
        print_json({**result.summary, **more})
    elif first and result.trained:
        print_summary(result.run)
        if result.beside is not None:
            print_beside(result.beside)
    name = result.interrupted
    if name is None:
        return 0
    if first:
        at = f"step {result.summary['steps']}, which is saved"
        at = at if result.summary["checkpoint"] else "the start"
        tell(f"stopped by {name} at {at}; continue with {result.summary['next']}")
    return 128 + signal.Signals[name]
