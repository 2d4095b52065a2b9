"""Files and options that a run keeps of what it was made from, and the job made again from them alone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from systolic import recipes
from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.data.text.chat import KEPT, TEMPLATE, TOOL_TEMPLATE
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import TextData
from systolic.formats.outline import kept_files
from systolic.job import Data, Job
from systolic.models.families import CONFIG
from systolic.recipes import Recipe
from systolic.recipes.jobs import JobSource, recipe_of, under_plan
from systolic.runs import access, paths
from systolic.runs.job_record import JobRecord, check_revision, job_from_json, read_record
from systolic.runs.run import JOB, MODULES, RECIPE, TOKENIZER, Run


class Rebuilt(NamedTuple):
    """The sources of a run, out of what the run itself holds."""

    recipe: Recipe
    job: Job
    options: Mapping[str, Any]
    """Arguments of the recipe."""


def files(source: JobSource, job: Job, warn: Callable[[str], None]) -> dict[str, bytes]:
    """Files that a new run holds: path in the run to content.

    Args:
        source: What the job is made from.
        job: Made from it; the recipe has opened the files beside its own that it reads.
        warn: Called for each file that is too large to be kept.

    Raises:
        DataError: the tokenizer's file has changed since it was read.
    """
    contents: dict[str, bytes] = {}
    recipe = source.recipe
    if recipe.reads is not None:
        recipe.reads.close()
        read, too_large = recipe.reads.kept(paths.named(dict(source.options)))
        contents |= {f"{MODULES}/{name}": content for name, content in read.items()}
        for line in too_large:
            warn(line)
    if recipe.file is not None:
        contents[RECIPE] = recipe.source
        contents |= {f"{MODULES}/{name}": content for name, content in recipe.modules.items()}
    if isinstance(job.data, TextData):
        kept = job.data.get_tokenizer().files()
        contents |= {f"{TOKENIZER}/{name}": content for name, content in kept.items()}
    if isinstance(job.data, Instructions):
        contents[f"{TOKENIZER}/{TEMPLATE}"] = job.data.template.encode()
        if job.data.tool_template:
            contents[f"{TOKENIZER}/{TOOL_TEMPLATE}"] = job.data.tool_template.encode()
        contents[f"{TOKENIZER}/{KEPT}"] = json.dumps(dict(job.data.tokens)).encode()
    if job.start is not None:
        kept = kept_files(job.start)
        contents |= {f"{TOKENIZER}/{name}": content for name, content in kept.items()}
    return contents


def options(arguments: Mapping[str, Any], job: Job, run: Path | None) -> dict[str, Any]:
    """A recipe's options for job.json; a tokenizer is the one in the run.

    Args:
        arguments: The options.
        job: Made from them.
        run: The run's directory; None for one that is not there yet.
    """
    recorded = paths.absolute(dict(arguments))
    if run is not None:
        return recipes.plain(paths.saved(recorded, run))
    file = job.data.get_tokenizer().file() if isinstance(job.data, TextData) else None
    labels = job.data.labels()
    if labels and recorded.get("classes", labels) is None:
        # They were counted in the data, which may be gone when the run is used.
        recorded["classes"] = len(labels)
    if file is not None:
        sources = (file.absolute(), file.absolute().parent)
        # The model that a job begins with may be the tokenizer's folder, and has weights that the run has not.
        recorded = {
            n: Path(TOKENIZER) if v in sources and v != job.start else v
            for n, v in recorded.items()
        }
        if "tokenizer" in recorded and recorded["tokenizer"] is None:
            # It came with the data, which may be gone when the run is used.
            recorded["tokenizer"] = Path(TOKENIZER)
    return recipes.plain(recorded)


def rebuild(run: Run, *, trust_code: bool = False, job: Job | None = None) -> Rebuilt:
    """The recipe, job and options that a run was made from, out of what the run itself holds.

    Args:
        run: The run.
        trust_code: ``--trust``: its recipe may be executed, now and later.
        job: Of a run that was made from a Job: the Job, in place of what the run keeps of it.

    Raises:
        OptionError: a job is given and the run was made from a recipe.
        TrustError: its recipe is not the user's own, see :mod:`systolic.runs.access`.
        RunError: it holds no copy of its recipe, the recipe no longer takes the run's options, or its
            weights mean something else in this version.
    """
    record = read_record(run)
    check_revision(run.path, record)
    if job is None:
        recipe = _recipe(run, record, trust_code=trust_code)
    elif record.recipe is None:
        recipe = recipe_of(job)
    else:
        raise OptionError(
            f"{run.path} was made from the recipe {record.recipe}; leave job out, and give options of the recipe that are to change"
        )
    typed = recipes.typed(recipe, record.options)
    options = {
        name: paths.located(value, run.path, record.directory) for name, value in typed.items()
    }
    # Options whose model or chat template is gone: the run's copies of config.json and template say as much of the job.
    kept = dict(options)
    start, template = kept.get("from_"), kept.get("template")
    if isinstance(start, Path) and not start.exists() and (run.tokenizer / CONFIG).is_file():
        kept |= {"from_": run.tokenizer, "template": None}
    elif isinstance(template, Path) and not template.exists():
        kept["template"] = run.tokenizer / TEMPLATE
    options = kept
    job = under_plan(recipe(options), record.plan)
    if record.labels:
        job = replace(job, data=job.data.with_labels(record.labels))
    return Rebuilt(recipe, replace(job, data=with_tokenizer(run, job.data)), options)


def _recipe(run: Run, record: JobRecord, *, trust_code: bool) -> Recipe:
    target = record.recipe
    if target is None:
        job = job_from_json(record.job, record.types or {}, run.path)
        return recipe_of(paths.located(job, run.path, record.directory))
    code = run.code()
    if code:
        access.require(run.path, code, trust=trust_code)
        return recipes.from_file(run.recipe, recipes.split(target)[1], target, run.modules)
    if not recipes.is_named(target):
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


def check_folder(path: Path) -> None:
    """Refuses a folder whose models are single files.

    Raises:
        NotFoundError: it is no run and holds GGUF files; names them.
    """
    if not path.is_dir() or (path / JOB).is_file():
        return
    from systolic.formats.source import gguf_inside

    if said := gguf_inside(path):
        raise NotFoundError(f"{path} is no run and no model itself; {said}")
