"""``systolic train RECIPE [options]``, ``--resume RUN``, ``--replay BATCH``, ``--rehearse SLICE``."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from systolic import __version__, recipes
from systolic.artifact import paths
from systolic.artifact.access import Access
from systolic.artifact.run import JOB, Run
from systolic.cli import own
from systolic.cli.flags import kept, settled
from systolic.cli.output import bounded_workers, print_json
from systolic.cli.planned import (
    check_machine,
    check_rehearsal,
    expected,
    is_planned,
    planned,
    resumed,
)
from systolic.cli.target import Request, first, plan_of, request, request_for
from systolic.core.digest import digest
from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.job import Batch, Job
from systolic.train.ledger import Ledger

INIT = "init_from"
"""The entry of job.json with the checkpoint whose weights a run began with."""

USAGE = """usage: systolic train RECIPE [options]
       systolic train RECIPE --plan plan.json [options]
       systolic train --resume RUN [options]
       systolic train --replay RUN/bad/step-N.npz [--json]
       systolic train RECIPE --rehearse SLICE [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function.
--plan takes what systolic plan found: slice, layout, batch, precision, steps and compiler flags; with
--candidate 2 those of the second in its ranking.
--resume continues from the newest intact checkpoint; options that are given replace the run's own, and
what changes is listed; another model, data or seed is refused.
--replay makes the train step again on the batch of a bad step and says what is wrong with it.
Both execute the run's recipe.py, if it is yours; of another user's run only with --trust.
systolic train RECIPE --help shows the recipe's options."""


def options(
    run: Path | None = None,
    rehearse: str | None = None,
    plan: Path | None = None,
    candidate: Annotated[int, COUNT] = 1,
    init_from: Path | None = None,
    executable: Path | None = None,
    flags: str = "",
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    diagnose: Annotated[int | None, NOT_NEGATIVE] = None,
    profile: Annotated[int, NOT_NEGATIVE] = 0,
    log_every: Annotated[int | None, COUNT] = None,
    json: bool = False,
) -> None:
    """The verb's own options.

    Args:
        run: The run's directory; by default runs/NAME-TIME.
        rehearse: Run a few real steps on virtual CPU devices with this slice's mesh, then stop.
        plan: What systolic plan wrote: trains its best candidate with the options that were planned, and shows the forecast beside what is measured.
        candidate: Which of the plan's candidates, by rank.
        init_from: Begin with the weights of this run (its best checkpoint) or of RUN/checkpoints/STEP; the optimizer starts afresh.
        executable: The compiled train step that systolic forecast --save kept, instead of compiling it.
        flags: Of the compiler, on top of the set that jobs on these devices share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        workers: Processes that read and transform data; 0 uses threads.
        diagnose: Steps between looks at gradients by layer, for systolic explain; 0 never looks, by default as often as 1 % of the time allows.
        profile: Steps to trace with XLA's profiler after warm-up, into RUN/profile, for systolic explain RUN/profile.
        log_every: Steps between records, each the mean of its steps; by default a 400th of the job.
        json: Print the summary as one JSON object on stdout.
    """


def resume_options(
    resume: Path,
    executable: Path | None = None,
    flags: str | None = None,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    diagnose: Annotated[int | None, NOT_NEGATIVE] = None,
    profile: Annotated[int, NOT_NEGATIVE] = 0,
    log_every: Annotated[int | None, COUNT] = None,
    trust: bool = False,
    json: bool = False,
) -> None:
    """The verb's own options with a run.

    Args:
        resume: The run's directory.
        executable: The compiled train step that systolic forecast --save kept, instead of compiling it.
        flags: Of the compiler, in place of those that the run was started with; none for XLA's defaults.
        workers: Processes that read and transform data; 0 uses threads.
        diagnose: Steps between looks at gradients by layer, for systolic explain; 0 never looks, by default as often as 1 % of the time allows.
        profile: Steps to trace with XLA's profiler after warm-up, into RUN/profile, for systolic explain RUN/profile.
        log_every: Steps between records, each the mean of its steps; by default a 400th of the job.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print the summary as one JSON object on stdout.
    """


def run(args: Sequence[str]) -> int:
    """The verb."""
    ledger = Ledger()
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    word, _, value = args[0].partition("=")
    if word in ("--resume", "--replay"):
        rest = ([value] if value else []) + list(args[1:])
        path, rest = first(rest, "train", f"a path after {word}")
        return resume(Path(path), rest, ledger) if word == "--resume" else replay(Path(path), rest)
    target, rest = first(args, "train", "a recipe")
    if "--resume" in rest:
        raise OptionError(
            "--resume takes a run and no recipe: systolic train --resume RUN; the run knows its recipe and options"
        )
    if is_planned(rest):
        asked = planned(target, rest, options)
    else:
        asked = request(target, rest, "train", options)
    asked = replace(asked, options=paths.absolute(dict(asked.options)))
    if asked.verb["rehearse"] is not None:
        from systolic.cli.rehearse import rehearse

        if asked.verb["executable"] is not None:
            raise OptionError(
                "--executable is for the devices at hand and --rehearse makes virtual ones; leave one of them out"
            )
        if asked.chosen is not None:
            check_rehearsal(asked.chosen, asked.verb["rehearse"])
        return rehearse(asked)
    from systolic.train.setup import set_up

    join(asked.verb)
    if asked.chosen is not None:
        check_machine(asked.chosen)
    flags = settled(asked.verb["flags"], asked.chosen)
    setup = replace(set_up(asked.job, flags=flags["compiler"]), expected=expected(asked.chosen))
    setup.check_metric()
    setup, source = begun(setup, asked.verb["init_from"])
    description = describe(asked, setup.job, flags) | {INIT: source}
    loaded = load(setup, asked.verb, ledger)
    files = own.files(asked.recipe, setup.job)
    with create(asked.verb["run"], description, files) as directory:
        return session(setup, directory, ledger, asked.verb, loaded=loaded)


def begun(setup: Any, source: Path | str | None) -> tuple[Any, str | None]:
    """The set-up with the weights of ``--init-from``, before a run is made, and the checkpoint they are of."""
    if source is None:
        return setup, None
    from systolic.artifact.weights import begin_with

    path = Path(source).absolute()
    found = begin_with(path, setup.steps)
    for line in found.skipped:
        print(f"systolic: {line}; using step {found.step}", file=sys.stderr)
    folder = path / "checkpoints" if (path / JOB).is_file() else path.parent
    return replace(setup, initial=found), str(folder / str(found.step))


def load(setup: Any, verb: Mapping[str, Any], ledger: Ledger) -> Any:
    """The train step of ``--executable``, before a run is made; None where it is to be compiled."""
    if verb["executable"] is None:
        return None
    with ledger.spend("compile"):
        return setup.load(verb["executable"])


def join(verb: Mapping[str, Any]) -> None:
    """Joins the other processes of the job, if there are any."""
    from systolic.train import hosts

    if hosts.belongs(os.environ) and verb["json"]:
        # Libraries between processes (Gloo, NCCL) print to stdout, which belongs to one JSON object.
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    hosts.join()


def create(path: Path | None, description: Mapping[str, Any], files: Mapping[str, bytes]) -> Run:
    """The run of this job, made by the first of its processes and opened for reading by the others."""
    from systolic.train import hosts

    made: Run | None = None
    if hosts.is_first():
        try:
            made = Run.create(path, description, files=files)
        except Exception:
            hosts.share("")
            raise
    shared = hosts.share("" if made is None else str(made.path))
    if made is not None:
        return made
    if not shared:
        raise RunError("the first process could not make the run; see its message")
    return Run.open(shared)


def resume(path: Path, args: Sequence[str], ledger: Ledger) -> int:
    """``systolic train --resume RUN``: goes on from the newest intact checkpoint."""
    from systolic.train import hosts

    join({"json": "--json" in args})
    access = Access.write if hosts.is_first() else Access.read
    with Run.open(path, access=access) as directory:
        record = directory.read_job()
        recipe, _, saved = own.rebuild(directory, trust_code="--trust" in args)
        asked = request_for(recipe, ["--resume", str(path), *args], "train", resume_options, saved)
        asked = replace(asked, options=paths.absolute(dict(asked.options)))
        changed = {name for name, value in asked.options.items() if value != saved.get(name)}
        asked = replace(asked, chosen=resumed(plan_of(record), changed))
        flags = kept(record, asked.chosen, asked.verb["flags"])
        job, description = continued(asked, record, saved, flags)
        if "tokenizer" not in changed:
            job = replace(job, data=own.with_tokenizer(directory, job.data))
        summary = finished(directory, job, changed=asked.options != saved)
        if summary is not None:
            if asked.verb["json"]:
                print_json(summary)
            ignored = ", ".join(changes(asked.options, saved))
            print(
                f"systolic: {path} is finished at step {summary['steps']}{ignored and f', so {ignored} is ignored'}; give --steps a larger number to go on, or use it: {summary['next']}",
                file=sys.stderr,
            )
            return 0
        from systolic.train.setup import set_up

        setup = replace(set_up(job, flags=flags["compiler"]), expected=expected(asked.chosen))
        setup.check_metric()
        source = record.get(INIT)
        if source is not None and not any(directory.checkpoints.glob("[0-9]*")):
            setup, _ = begun(setup, source)
        description |= {INIT: source}
        loaded = load(setup, asked.verb, ledger)

        def go_on() -> None:
            if told := ", ".join(changes(asked.options, saved)):
                print(f"systolic: {path} continues with {told}", file=sys.stderr)
            directory.drop_summary()
            if asked.options != saved or flags != record.get("flags"):
                directory.write_job(description)

        return session(
            setup, directory, ledger, asked.verb, resume=True, accept=go_on, loaded=loaded
        )


def changes(options: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The options that differ from a run's own, as ``--steps 20 (was 10)``."""
    after, before = flat(recipes.plain(options)), flat(recipes.plain(saved))
    return [
        f"--{name.replace('_', '-')} {value} (was {before[name]})"
        for name, value in after.items()
        if name in before and str(value) != str(before[name])  # a NaN is one as before
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        found |= {f"{prefix}{name}": value} if inner is None else inner
    return found


def continued(
    asked: Request,
    record: Mapping[str, Any],
    saved: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> tuple[Job, dict[str, Any]]:
    """The job that goes on and its job.json: on other devices, with the batch that it started with."""
    job = asked.job
    spread = {name: value for name, value in asked.options.items() if value != saved.get(name)}
    same_batch = not any("batch" in name or name == "layout" for name in spread)
    layout = record["layout"]
    if same_batch and job.batch.per_device is not None:
        total = job.batch.resolve(replace(job.layout, **layout))
        job = replace(job, batch=Batch(total=total))
    description = describe(asked, job, flags, asked.verb["resume"])
    return job, {**description, "layout": layout} if same_batch else description


def finished(directory: Run, job: Job, *, changed: bool) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; ``None`` for one that has."""
    try:
        summary = directory.read_summary()
    except NotFoundError:
        return None
    early = bool(summary["stopped"]) and not changed
    done = summary["steps"] >= job.steps or early
    return summary if done and not summary["interrupted"] else None


def session(
    setup: Any,
    directory: Run,
    ledger: Ledger,
    verb: Mapping[str, Any],
    *,
    resume: bool = False,
    accept: Callable[[], None] = lambda: None,
    loaded: Any = None,
) -> int:
    """Trains under watch, writes the report, prints the summary; the exit code.

    A run that can't go on so is left as it was: ``accept`` and all else that writes comes after the checks.
    """
    from systolic.report.live import Live, Quiet
    from systolic.report.summary import print_summary
    from systolic.report.tensorboard import TensorBoard
    from systolic.train.programs import compiler_cache
    from systolic.train.trainer import Trainer

    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    compiler_cache(str(cache / "systolic" / "xla"))
    tells = directory.access is Access.write
    watchers: list[Any] = []
    accepted = False

    def begin() -> None:
        nonlocal accepted
        accepted = True
        if tells:
            accept()
            directory.write_environment([*map(str, setup.machine.devices)], setup.flags)

    if tells:
        view = Quiet() if verb["json"] else Live()
        watchers = [view, TensorBoard(directory.tensorboard)]
    trainer = Trainer(
        setup=setup,
        run=directory,
        watchers=watchers,
        workers=bounded_workers(verb["workers"]),
        ledger=ledger,
        loaded=loaded,
        diagnose=verb["diagnose"],
        profile=verb["profile"],
        log_every=verb["log_every"],
        accept=begin,
    )
    try:
        summary = trainer.train(resume)
    finally:
        for watcher in watchers:
            watcher.close()
        if tells and accepted:
            report(directory)
    if tells and verb["json"]:
        print_json(summary)
    elif tells:
        print_summary(directory.path)
    return exit_code(summary, tells)


def report(directory: Run) -> None:
    """Writes the page; that it can't be written must not hide how the run ended."""
    from systolic.report.run_html import write_report

    try:
        write_report(directory.path)
    except (SystolicError, OSError) as error:
        print(f"systolic: there is no report: {error}", file=sys.stderr)


def exit_code(summary: Mapping[str, Any], tells: bool) -> int:
    """0, or after a signal 128 and its number, as a shell has it."""
    name = summary["interrupted"]
    if name is None:
        return 0
    if tells:
        at = f"step {summary['steps']}, which is saved"
        print(
            f"systolic: stopped by {name} at {at if summary['checkpoint'] else 'the start'}; go on with {summary['next']}",
            file=sys.stderr,
        )
    return 128 + signal.Signals[name]


def replay(path: Path, args: Sequence[str]) -> int:
    """``systolic train --replay RUN/bad/step-N.npz``: the train step on a kept batch."""
    from systolic.cli.parse import arguments

    def verb(trust: bool = False, json: bool = False) -> None:
        """Makes the train step again on the batch of a bad step and says what is wrong with it.

        Args:
            trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
            json: Print one JSON object.
        """

    asked = arguments(verb, args, "systolic train --replay")
    if not path.is_file():
        raise NotFoundError(f"{path} is not a file; give RUN/bad/step-N.npz")
    with Run.open(path.parent.parent) as directory:
        _, job, _ = own.rebuild(directory, trust_code=asked.get("trust", False))
        record = directory.read_job()
        flags = kept(record, plan_of(record), None)
        from systolic.train.replay import replay as again
        from systolic.train.setup import set_up

        result = again(set_up(job, flags=flags["compiler"]), directory, path)
    if asked.get("json"):
        print_json(result)
        return 0
    print(f"{path} with the weights of step {result['weights']}")
    for name, value in result["metrics"].items():
        print(f"  {name:<14} {value:.6g}")
    for name, text in result["arrays"].items():
        print(f"  batch {name:<8} {text}")
    for name in result["not_finite"]:
        print(f"  not finite: {name}")
    return 0


def describe(
    asked: Request, job: Job, flags: Mapping[str, Any], run: Path | None = None
) -> dict[str, Any]:
    """The content of job.json, of a new run or of one that is there; ``flags`` are the compiler's as :mod:`systolic.cli.flags` has them."""
    plain = job.to_json()
    return {
        "systolic": __version__,
        "revision": own.REVISION,
        "recipe": asked.recipe.target,
        "options": own.options(asked, job, run),
        "job": plain,
        "plan": None if asked.chosen is None else asked.chosen.to_json(),
        "layout": job.layout.mesh_shape,
        "flags": dict(flags),
        "digest": digest(plain),
    }
