"""``systolic train RECIPE [options]``, ``--resume RUN``, ``--replay BATCH``, ``--rehearse SLICE``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from systolic.artifact import paths
from systolic.artifact.run import Run
from systolic.cli.output import print_json
from systolic.cli.planned import is_planned, planned
from systolic.cli.resume import resume
from systolic.cli.session import INIT, begun, describe, join, load, session
from systolic.cli.target import first, request
from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.session import run_files
from systolic.session.planned import check_machine, check_rehearsal, expected, plan_of
from systolic.session.resume_checks import DATA, told
from systolic.session.run_flags import kept, settled
from systolic.training.ledger import Ledger

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
    from systolic.training.setup import set_up

    join(asked.verb)
    if asked.chosen is not None:
        check_machine(asked.chosen)
    flags = settled(asked.verb["flags"], asked.chosen)
    setup = replace(set_up(asked.job, flags=flags["compiler"]), expected=expected(asked.chosen))
    setup.check_metric()
    setup, source = begun(setup, asked.verb["init_from"])
    description = describe(asked, setup.job, flags) | {
        INIT: source,
        DATA: told(setup.job),
        run_files.LABELS: list(setup.job.data.labels()),
    }
    loaded = load(setup, asked.verb, ledger)
    files = run_files.files(asked.recipe, asked.options, setup.job)
    with create(asked.verb["run"], description, files) as directory:
        return session(setup, directory, ledger, asked.verb, loaded=loaded)


def create(path: Path | None, description: Mapping[str, Any], files: Mapping[str, bytes]) -> Run:
    """The run of this job, made by the first of its processes and opened for reading by the others."""
    from systolic.training import hosts

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
        _, job, _ = run_files.rebuild(directory, trust_code=asked.get("trust", False))
        record = directory.read_job()
        flags = kept(record, plan_of(record), None)
        from systolic.training.replay import replay as again
        from systolic.training.setup import set_up

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
