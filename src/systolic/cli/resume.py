"""``systolic train --resume RUN``: the job that a run goes on with, and what it can't go on with."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from systolic import recipes
from systolic.artifact import paths
from systolic.artifact.access import Access
from systolic.artifact.run import Run
from systolic.chips.flags import resolved
from systolic.cli.output import print_json
from systolic.cli.session import INIT, RECORDED, begun, describe, join, load, session
from systolic.cli.target import Request, existing, request_for
from systolic.core.errors import NotFoundError, RunError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.job import Batch, Job
from systolic.session import run_files
from systolic.session.command_line import plain_words, typed
from systolic.session.planned import expected, plan_of, resumed
from systolic.session.resume_checks import DATA, agreed, continues, flat
from systolic.session.run_flags import kept
from systolic.training.ledger import Ledger


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
        diagnose: Steps between looks at gradients by layer, for systolic explain; 0 never looks, by default as the run was started.
        profile: Steps to trace with XLA's profiler after warm-up, into RUN/profile, for systolic explain RUN/profile.
        log_every: Steps between records, each the mean of its steps; by default as the run was started.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print the summary as one JSON object on stdout.
    """


def resume(path: Path, args: Sequence[str], ledger: Ledger) -> int:
    """``systolic train --resume RUN``: goes on from the newest intact checkpoint."""
    from systolic.training import hosts

    join({"json": "--json" in args})
    access = Access.write if not hosts.joined() or hosts.is_first() else Access.read
    with Run.open(path, access=access) as directory:
        record = directory.read_job()
        recipe, _, saved = run_files.rebuild(directory, trust_code="--trust" in args)
        asked = request_for(recipe, ["--resume", str(path), *args], "train", resume_options, saved)
        asked = replace(asked, options=paths.absolute(dict(asked.options)))
        changed = {name for name, value in asked.options.items() if value != saved.get(name)}
        asked = replace(asked, chosen=resumed(plan_of(record), changed))
        resolved(asked.verb["flags"] or "", None)
        if asked.verb["executable"] is not None:
            existing(str(asked.verb["executable"]))
        summary = finished(directory, asked.job, changed=asked.options != saved)
        if summary is not None:
            if asked.verb["json"]:
                print_json(summary)
            ignored = ", ".join(changes(asked.options, saved))
            print(
                f"systolic: {path} is finished at step {summary['steps']}{ignored and f', so {ignored} is ignored'}; give --steps a larger number to go on, or use it: {summary['next']}",
                file=sys.stderr,
            )
            return 0
        asked = replace(asked, verb=as_recorded(asked.verb, record))
        plain = recipes.plain(asked.options)
        data = agreed(lambda: continues(directory, record, asked.job, plain))
        flags = kept(record, asked.chosen, asked.verb["flags"])
        job, description = continued(asked, record, saved, flags)
        if "tokenizer" not in changed:
            job = replace(job, data=run_files.with_tokenizer(directory, job.data))
        from systolic.training.setup import set_up

        setup = replace(set_up(job, flags=flags["compiler"]), expected=expected(asked.chosen))
        setup.check_metric()
        source = record.get(INIT)
        if source is not None and not any(directory.checkpoints.glob("[0-9]*")):
            setup, _ = begun(setup, source)
        description |= {
            INIT: source,
            DATA: data,
            run_files.LABELS: record.get(run_files.LABELS, []),
        }
        loaded = load(setup, asked.verb, ledger)

        def go_on() -> None:
            if told := ", ".join(changes(asked.options, saved)):
                print(f"systolic: {path} continues with {told}", file=sys.stderr)
            directory.drop_summary()
            same = ("flags", DATA, *RECORDED)
            if asked.options != saved or any(description[n] != record.get(n) for n in same):
                directory.write_job(description)

        return session(
            setup, directory, ledger, asked.verb, resume=True, accept=go_on, loaded=loaded
        )


def as_recorded(verb: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The verb's options, with those that job.json keeps where they are not given anew."""
    return {
        name: record.get(name) if value is None and name in RECORDED else value
        for name, value in verb.items()
    }


def changes(options: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The options that differ from a run's own, as ``--steps 20 (was 10)``."""
    after, before = flat(recipes.plain(options)), flat(recipes.plain(saved))
    return [
        f"{typed(name, value)} (was {plain_words(before[name])})"
        for name, value in after.items()
        if name in before and str(value) != str(before[name])  # a NaN is one as before
    ]


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
    """The summary of a run that has nothing left to do; ``None`` for one that has.

    A run whose summary is damaged goes on from its checkpoint, which writes the summary anew.
    """
    try:
        summary = directory.read_summary()
    except (NotFoundError, RunError):
        return None
    if not {"steps", "stopped", "interrupted"} <= set(summary):
        return None
    early = bool(summary["stopped"]) and not changed
    done = summary["steps"] >= job.steps or early
    return summary if done and not summary["interrupted"] else None
