"""Checks on a run's files before it resumes, before JAX is imported and anything is compiled."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from systolic import recipes
from systolic.core.errors import DataError, OptionError, SystolicError
from systolic.core.option_words import plain_words, typed
from systolic.core.ranges import dashed
from systolic.data.fingerprint import contents_of, difference
from systolic.job import Job, Split
from systolic.job.data import Contents
from systolic.recipes import Recipe
from systolic.runs import manifest
from systolic.runs.job_record import JobRecord
from systolic.runs.plan_choice import Chosen
from systolic.runs.run import Run

Result = TypeVar("Result")


def check_resume(
    run: Run, record: JobRecord, job: Job, options: Mapping[str, Any]
) -> dict[str, Contents]:
    """Checks that a run can resume with a job; returns the fingerprint of the job's data by split.

    Args:
        run: The run.
        record: The run's job.json.
        job: The job to resume with.
        options: The recipe's options that made the job, as plain values.

    Raises:
        OptionError: an option that is fixed for a run has changed, or the run has more steps than the job.
        DataError: the run's data has changed, or can't be read.
    """
    plain = json.loads(json.dumps(job.to_json()))
    _same_settings(run, record.job, plain, job, flat(options))
    newest = max((int(path.name) for path in _checkpoints(run)), default=0)
    if newest > job.steps:
        raise OptionError(too_few(job.steps, run, newest))
    now = contents_of(job.data)
    for split in Split:
        old, new = record.data.get(split.value), now.get(split.value)
        if old is None:
            continue
        # Held-out data may be replaced: the model was not trained on it.
        if split is not Split.train and (new is None or new.where != old.where):
            continue
        what = "no data" if new is None else difference(old, new)
        if what is not None:
            where = old.where if new is None else new.where
            raise DataError(
                f"the {split.value} data of {run.path} has changed since it was trained: {where} has {what}; restore it, or train a new run with init-from {shlex.quote(str(run.path))}"
            )
    return now


def check_begun(
    run: Run, record: JobRecord, recipe: Recipe, chosen: Chosen | None, init_from: Path | None
) -> None:
    """Refuses to continue a run by a command that would have begun another one, in all processes of the job.

    Args:
        run: The run.
        record: Its job.json.
        recipe: The command's recipe: a run keeps the code that it began with.
        chosen: What the command's plan decides; None without a plan.
        init_from: The command's ``--init-from``.

    Raises:
        OptionError: the recipe, its code, the plan or the start differs from the run's.
    """

    def check() -> None:
        if difference := _other_start(run, record, recipe, chosen, init_from):
            raise OptionError(
                f"{difference}; give another --run, or continue it as it is: systolic train --resume {shlex.quote(str(run.path))}"
            )

    agreed(check)


def _other_start(
    run: Run, record: JobRecord, recipe: Recipe, chosen: Chosen | None, init_from: Path | None
) -> str:
    """How a command differs from the one that began a run, or nothing."""
    began = "a Job" if record.recipe is None else record.recipe
    if recipe.file is None or record.recipe is None or not run.recipe.is_file():
        if recipe.target != record.recipe:
            return f"{run.path} began with {began}, not with {recipe.target}"
    elif recipes.split(recipe.target)[1] != recipes.split(record.recipe)[1]:
        return f"{run.path} began with the function of {began}, not with {recipe.target}"
    elif changed := _changed_code(run, recipe):
        return f"{run.path} began with other code in {', '.join(changed)}, of which it keeps a copy"
    settings, planned = ({} if plan is None else plan.settings for plan in (chosen, record.plan))
    if chosen is not None and dict(settings) != dict(planned):
        return f"{run.path} began without the settings of {chosen.path}"
    if init_from is not None and record.init_from is None:
        return f"{run.path} did not begin with the weights of {init_from}"
    return ""


def _changed_code(run: Run, recipe: Recipe) -> list[str]:
    """Files of a recipe that are not those that the run keeps."""
    assert recipe.file is not None
    now = {recipe.file.name: (run.recipe, recipe.source)}
    now |= {name: (run.modules / name, content) for name, content in recipe.modules.items()}
    return [
        name
        for name, (kept, content) in now.items()
        if not kept.is_file() or kept.read_bytes() != content
    ]


def too_few(steps: int, run: Run, newest: int) -> str:
    """Message for a job with fewer steps than its run."""
    return f"steps is {steps}, but {run.path} has a checkpoint of step {newest}; give --steps {newest} or more"


def agreed(check: Callable[[], Result]) -> Result:
    """Runs a check in all processes of a job; fails in all if it fails in one. Collective.

    Raises:
        SystolicError: the check raised it in a process.
    """
    from systolic.training import distributed

    if not distributed.joined():
        return check()
    try:
        checked = check()
    except SystolicError as error:
        distributed.exchange(str(error))
        raise
    for process, text in enumerate(distributed.exchange("")):
        if text:
            raise DataError(f"process {process}: {text}")
    return checked


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    options: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        options |= {f"{prefix}{name}": value} if inner is None else inner
    return options


def _same_settings(
    run: Run,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    job: Job,
    options: Mapping[str, Any],
) -> None:
    kept = {
        "model": ("type", *sorted(job.model.lasting())),
        "data": ("type", *sorted(job.data.lasting())),
        "adapter": ("kind", "rank", "alpha", "targets"),
        "optimizer": ("kind",),
        "dtypes": ("parameters", "moments"),
    }
    old = {"seed": before["seed"]}
    for part, names in kept.items():
        # Runs of earlier versions lack some parts and fields.
        known = {name: before[part][name] for name in names if name in before.get(part, {})}
        old |= flat(known, f"{part}.")
    new = flat(now)
    changed = [
        f"{_option(name, new.get(name), options)} (was {plain_words(value)})"
        for name, value in old.items()
        if value != new.get(name)
    ]
    if changed:
        them = "that option" if len(changed) == 1 else "these options"
        raise OptionError(
            f"{', '.join(changed)} can't change in {run.path}; leave {them} out, or train a new run"
        )


def _option(name: str, value: Any, options: Mapping[str, Any]) -> str:
    """Setting of a job as a command-line option if the recipe has one of that name, else by its own name."""
    last = name.rpartition(".")[2]
    for option in (name, last):
        if option in options and options[option] == value:
            return typed(option, value)
    return f"{dashed(name)} {plain_words(value)}"


def _checkpoints(run: Run) -> list[Any]:
    return [
        path.parent
        for path in run.checkpoints.glob(f"[0-9]*/{manifest.NAME}")
        if path.parent.name.isdigit()
    ]
