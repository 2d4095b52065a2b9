"""``systolic train RECIPE [options]``, ``systolic train --resume RUN``, ``--rehearse SLICE``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from systolic import __version__, recipes
from systolic.artifact.access import Access
from systolic.artifact.run import Run
from systolic.cli.output import print_json
from systolic.cli.target import Request, first, rebuild, request
from systolic.core.digest import digest
from systolic.core.errors import OptionError, RunError
from systolic.job import Job

USAGE = """usage: systolic train RECIPE [options]
       systolic train --resume RUN [--json]
       systolic train RECIPE --rehearse SLICE [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function.
systolic train RECIPE --help shows the recipe's options."""


def options(
    run: Path | None = None, rehearse: str | None = None, workers: int = 0, json: bool = False
) -> None:
    """The verb's own options.

    Args:
        run: The run's directory; by default runs/NAME-TIME.
        rehearse: Run a few real steps on virtual CPU devices with this slice's mesh, then stop.
        workers: Processes that read and transform data; 0 uses threads.
        json: Print the summary as one JSON object on stdout.
    """


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if args[0] == "--resume" or args[0].startswith("--resume="):
        return resume(args)
    target, rest = first(args, "train", "a recipe")
    if "--resume" in rest:
        raise OptionError(
            "--resume takes a run and no recipe: systolic train --resume RUN; the run knows its recipe and options"
        )
    asked = request(target, rest, "train", options)
    if asked.verb["rehearse"] is not None:
        from systolic.cli.rehearse import rehearse

        return rehearse(asked)
    job = asked.job
    from systolic.train.ledger import Ledger
    from systolic.train.setup import set_up

    ledger = Ledger()
    setup = set_up(job)
    description = describe(asked, setup.job)
    with Run.create(asked.verb["run"], description) as directory:
        if asked.recipe.file is not None:
            directory.write_recipe(asked.recipe.file.read_text())
        return session(
            setup,
            directory,
            ledger,
            workers=asked.verb["workers"],
            json=asked.verb["json"],
            resume=False,
        )


def resume(args: Sequence[str]) -> int:
    """``systolic train --resume RUN``: goes on from the newest intact checkpoint."""
    from systolic.cli.parse import arguments

    def verb(resume: Path, workers: int = 0, json: bool = False) -> None:
        """Goes on with a run from its newest intact checkpoint.

        Args:
            resume: The run's directory.
            workers: Processes that read and transform data; 0 uses threads.
            json: Print the summary as one JSON object on stdout.
        """

    asked = arguments(verb, args, "systolic train")
    with Run.open(asked["resume"], access=Access.write) as directory:
        _, job, _ = rebuild(directory)
        from systolic.train.ledger import Ledger
        from systolic.train.setup import set_up

        ledger = Ledger()
        return session(
            set_up(job),
            directory,
            ledger,
            workers=asked.get("workers", 0),
            json=asked.get("json", False),
            resume=True,
        )


def session(
    setup: Any, directory: Run, ledger: Any, *, workers: int, json: bool, resume: bool
) -> int:
    """Trains under watch, writes the report, prints the summary; the exit code."""
    from systolic.report.live import Live
    from systolic.report.run_html import write_report
    from systolic.report.tensorboard import TensorBoard
    from systolic.train.programs import compiler_cache
    from systolic.train.trainer import Trainer

    compiler_cache(
        str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "systolic" / "xla")
    )
    directory.write_environment([str(device) for device in setup.machine.devices])
    watchers = [Live(), TensorBoard(directory.tensorboard)]
    try:
        summary = Trainer(
            setup=setup, run=directory, watchers=watchers, workers=workers, ledger=ledger
        ).train(resume)
    finally:
        for watcher in watchers:
            watcher.close()
        write_report(directory.path)
    if json:
        print_json(summary)
    if summary["interrupted"]:
        raise RunError(
            f"stopped by {summary['interrupted']} at step {summary['steps']}, which is saved; go on with systolic train --resume {directory.path}"
        )
    return 0


def describe(asked: Request, job: Job) -> dict[str, Any]:
    """The content of job.json."""
    plain = job.to_json()
    return {
        "systolic": __version__,
        "recipe": asked.recipe.target,
        "options": recipes.plain(asked.options),
        "job": plain,
        "layout": job.layout.mesh_shape,
        "digest": digest(plain),
    }
