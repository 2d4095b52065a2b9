"""What a run keeps of all that it was made from, and the job made again from that alone."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.artifact import paths, trust
from systolic.artifact.revision import check_revision
from systolic.artifact.run import MODULES, RECIPE, TOKENIZER, Run
from systolic.core.errors import NotFoundError, RunError
from systolic.data.text.text_data import TextData
from systolic.job import Data, Job
from systolic.recipes import Recipe
from systolic.session.planned import plan_of, under_plan

LABELS = "labels"
"""The entry of job.json with the names of the classes."""


def files(recipe: Recipe, options: Mapping[str, Any], job: Job) -> dict[str, bytes]:
    """The files that a new run holds: path in the run to content. What is too large is named on stderr.

    Args:
        recipe: The recipe.
        options: Its arguments.
        job: Made from them; what the recipe opens beside its file has been opened.

    Raises:
        DataError: the tokenizer's file has changed since it was read.
    """
    found: dict[str, bytes] = {}
    if recipe.reads is not None:
        recipe.reads.close()
        read, too_large = recipe.reads.kept(paths.named(dict(options)))
        found |= {f"{MODULES}/{name}": content for name, content in read.items()}
        for line in too_large:
            print(f"systolic: {line}", file=sys.stderr)
    if recipe.file is not None:
        found[RECIPE] = recipe.source
        found |= {f"{MODULES}/{name}": content for name, content in recipe.modules.items()}
    if isinstance(job.data, TextData):
        kept = job.data.get_tokenizer().files()
        found |= {f"{TOKENIZER}/{name}": content for name, content in kept.items()}
    return found


def options(given: Mapping[str, Any], job: Job, run: Path | None) -> dict[str, Any]:
    """A recipe's options for job.json: a tokenizer is that in the run.

    Args:
        given: The options.
        job: Made from them.
        run: The run's directory; None for one that is not there yet.
    """
    found = paths.absolute(dict(given))
    if run is not None:
        return recipes.plain(paths.saved(found, run))
    file = job.data.get_tokenizer().file() if isinstance(job.data, TextData) else None
    labels = job.data.labels()
    if labels and found.get("classes", labels) is None:
        # They were counted in the data, which may be gone when the run is used.
        found["classes"] = len(labels)
    if file is not None:
        sources = (file.absolute(), file.absolute().parent)
        found = {n: Path(TOKENIZER) if v in sources else v for n, v in found.items()}
        if "tokenizer" in found and found["tokenizer"] is None:
            # It came with the data, which may be gone when the run is used.
            found["tokenizer"] = Path(TOKENIZER)
    return recipes.plain(found)


def rebuild(run: Run, *, trust_code: bool = False) -> tuple[Recipe, Job, dict[str, Any]]:
    """The recipe, job and options that a run was made from, out of what the run itself holds.

    Args:
        run: The run.
        trust_code: ``--trust``: its recipe may be executed, now and later.

    Raises:
        TrustError: its recipe is not the user's own, see :mod:`systolic.artifact.trust`.
        RunError: it holds no copy of its recipe, the recipe no longer takes the run's options, or its
            weights mean something else in this version.
    """
    record = run.read_job()
    check_revision(run.path, record)
    recipe = _recipe(run, record["recipe"], trust_code=trust_code)
    typed = recipes.typed(recipe, record["options"])
    options = {name: paths.located(value, run.path, record) for name, value in typed.items()}
    job = under_plan(recipe(options), plan_of(record))
    if record.get(LABELS):
        job = replace(job, data=job.data.with_labels(tuple(record[LABELS])))
    return recipe, replace(job, data=with_tokenizer(run, job.data)), options


def _recipe(run: Run, target: str, *, trust_code: bool) -> Recipe:
    code = run.code()
    if code:
        trust.require(run.path, code, trust=trust_code)
        return recipes.from_file(run.recipe, recipes.split(target)[1], target, run.modules)
    if target not in recipes.shipped():
        raise NotFoundError(
            f"{run.path} has no {RECIPE} and was trained with {target}, which only its own copy may stand for; copy that file to {run.recipe}"
        )
    return recipes.find(target)


def with_tokenizer(run: Run, data: Data) -> Data:
    """The data with the run's own tokenizer.

    Raises:
        RunError: the data brings another one with it.
    """
    if not isinstance(data, TextData) or not run.tokenizer.is_dir():
        return data
    from systolic.data.text.tokenizer import Tokenizer

    data = data.with_tokenizer(run.tokenizer)
    kept, now = Tokenizer(path=run.tokenizer).digest(), data.get_tokenizer().digest()
    if kept != now:
        raise RunError(
            f"the tokenizer of {type(data).__name__} has changed since {run.path} was trained (it is {now} and was {kept}); restore {run.tokenizer / 'tokenizer.json'} in its place"
        )
    return data
