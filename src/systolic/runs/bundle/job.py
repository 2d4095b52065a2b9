"""The job of a Bundle that was a run: what its weights are used under, without the run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, OptionError, RunError, SystolicError
from systolic.job import Adapter, Data, Job, Layout, Model, Task
from systolic.runs.bundle.record import BundleRecord
from systolic.runs.job_record import job_from_json, types_of

MODEL = "model"
"""The field that a Bundle has beside its job."""
OWN = "systolic."


def write_job(job: Job, run: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A job less its model, layout, start and adapter, as JSON, and the types of its parts.

    Args:
        job: Of the run.
        run: The run, for messages.

    Raises:
        OptionError: a part of it is code, or data in memory.
    """
    whole = replace(job, layout=Layout(), adapter=Adapter(), start=None)
    types = types_of(whole)
    for part, name in types.items():
        if not name.startswith(OWN):
            raise OptionError(
                f"the {part} of {run} is {name.rpartition('.')[2]}, code of its recipe, and a Bundle holds no code; systolic predict, eval and serve take the run itself, and systolic export {run} --to stablehlo writes what it computes without the code"
            )
    plain = json.loads(json.dumps(whole.to_json()))
    if _reads_as_another(plain, types, whole, run):
        raise OptionError(
            f"the data of {run} is {type(job.data).__name__} in memory, which a Bundle does not hold; use the run itself, or train on files"
        )
    own = {name: value for name, value in plain.items() if name != MODEL}
    return own, {name: kind for name, kind in types.items() if _part(name) != MODEL}


def _reads_as_another(
    plain: Mapping[str, Any], types: Mapping[str, str], job: Job, run: Path
) -> bool:
    try:
        return job_from_json(plain, types, run) != job
    except RunError:
        return True


def read_job(record: BundleRecord, model: Model, file: Path) -> Job | None:
    """The job of a Bundle; ``None`` where it has none.

    Args:
        record: The content of its bundle.json.
        model: Its model.
        file: The bundle.json, for messages.

    Raises:
        DataError: the job does not read in this version, or has a type that is no task or data.
    """
    if record.job is None:
        return None
    plain = {**record.job, MODEL: dict(record.model)}
    own = f"{type(model).__module__}.{type(model).__qualname__}"
    try:
        job = job_from_json(plain, {**record.types, MODEL: own}, file)
    except (SystolicError, KeyError, TypeError) as error:
        reason = str(error).partition(";")[0] if isinstance(error, SystolicError) else repr(error)
        raise DataError(
            f"the job in {file} can't be read ({reason}); export the run again with this version"
        ) from error
    if not isinstance(job.task, Task) or not isinstance(job.data, Data):
        raise DataError(f"the job in {file} has no task or no data; export the run again")
    return replace(job, model=model)


def _part(name: str) -> str:
    return name.partition(".")[0]
