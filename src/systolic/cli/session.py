"""A training session from the command line: what it begins with, how it is watched, and how it ends."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic import __version__
from systolic.artifact.access import Access
from systolic.artifact.revision import REVISION
from systolic.artifact.run import JOB, Run
from systolic.cli.output import bounded_workers, print_json
from systolic.cli.target import Request
from systolic.core.digest import digest
from systolic.core.errors import SystolicError
from systolic.job import Job
from systolic.session import run_files
from systolic.training.ledger import Ledger, Spent

INIT = "init_from"
"""The entry of job.json with the checkpoint whose weights a run began with."""
RECORDED = ("log_every", "diagnose")
"""Options of ``train`` that job.json keeps under their names, so that a run that goes on is recorded as before."""


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
    with ledger.spend(Spent.compile):
        return setup.load(verb["executable"])


def join(verb: Mapping[str, Any]) -> None:
    """Joins the other processes of the job, if there are any."""
    from systolic.training import hosts

    if hosts.belongs(os.environ) and verb["json"]:
        # Libraries between processes (Gloo, NCCL) print to stdout, which belongs to one JSON object.
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    hosts.join()


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
    from systolic.report.run.live import Live, Quiet
    from systolic.report.run.summary import print_summary
    from systolic.report.run.tensorboard import TensorBoard
    from systolic.training.programs import compiler_cache
    from systolic.training.trainer import Trainer

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
    from systolic.report.run.page import write_report

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


def describe(
    asked: Request, job: Job, flags: Mapping[str, Any], run: Path | None = None
) -> dict[str, Any]:
    """The content of job.json, of a new run or of one that is there; ``flags`` are the compiler's as :mod:`systolic.session.run_flags` has them."""
    plain = job.to_json()
    return {
        "systolic": __version__,
        "revision": REVISION,
        "recipe": asked.recipe.target,
        "options": run_files.options(asked.options, job, run),
        "job": plain,
        "plan": None if asked.chosen is None else asked.chosen.to_json(),
        "layout": job.layout.mesh_shape,
        "flags": dict(flags),
        **{name: asked.verb[name] for name in RECORDED},
        "digest": digest(plain),
    }
