"""A run written as a Bundle: weights, the job they are used under, where they come from and what they answered."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.bundle import ORIGIN, draft, model_record
from systolic.artifact.bundle_job import write_job
from systolic.artifact.bundle_record import (
    EvaluationRecord,
    ImportedFrom,
    RecipeRecord,
    finite_metrics,
)
from systolic.artifact.job_record import JobRecord
from systolic.artifact.run import Run
from systolic.artifact.tensors import TensorSpec
from systolic.core.digest import digest
from systolic.core.errors import SystolicError
from systolic.data.text.text_data import TextData
from systolic.formats.hugging_face.writer import config_of, with_text
from systolic.formats.source import known_source, most_common, open_source
from systolic.models.decoder.config import Decoder
from systolic.models.families import Config
from systolic.session.replaying import record_answers
from systolic.session.trained import TrainedModel
from systolic.session.written import written


def write_bundle(
    model: TrainedModel,
    files: Mapping[str, bytes],
    origin: Config,
    out: Path,
    say: Callable[[str], None],
    check: Callable[[Path, list[TensorSpec]], dict[str, Any]],
) -> tuple[list[TensorSpec], dict[str, Any]]:
    """Writes the model of a run as a Bundle; its tensors, and what ``check`` found.

    Args:
        model: The run.
        files: Of its tokenizer.
        origin: The config.json of the model that it began with; {} where it began with none.
        out: The Bundle's folder.
        say: Called with each stage.
        check: Called with the folder and its tensors before it gets its name.

    Raises:
        OptionError: a part of the run is code of its recipe, or data in memory.
        RunError: the disk is full, or its model is of a class that no Bundle holds.
    """
    about = _about(model)
    weights = model.plain_weights
    specs = [TensorSpec(name=p, shape=a.shape, dtype=a.dtype) for p, a in weights.items()]
    config, files = _text(model, origin, dict(files))
    with draft(out) as made:
        for name, content in files.items():
            made.add(name, content)
        if config:
            made.add(ORIGIN, json.dumps(dict(config), indent=2).encode())
        progress = written(sum(spec.nbytes for spec in specs), say)
        made.weights(specs, lambda p: iter([np.asarray(weights[p])]), progress)
        about["dtype"] = most_common(specs)
        say("recorded inputs")
        recorded = record_answers(made, about)
        found = check(made.folder, specs)
        made.finish(**about, recorded=recorded)
    return specs, found


def _text(
    model: TrainedModel, origin: Config, files: dict[str, bytes]
) -> tuple[Config, dict[str, bytes]]:
    """The config.json of a language model, for what is exported further, and the files beside it; {} of any other."""
    job = model.job
    if not isinstance(job.model, Decoder) or not isinstance(job.data, TextData):
        return {}, files
    config = config_of(job.model, origin)
    return with_text(config, files, job.data) if config else ({}, files)


def _about(model: TrainedModel) -> dict[str, Any]:
    """What bundle.json says of a run."""
    from systolic import __version__

    with Run.open(model.path) as run:
        begun = run.read_job()
    record = JobRecord.from_json(begun)
    own, types = write_job(model.job, model.path)
    return {
        "systolic": __version__,
        "model": model_record(model.job.model),
        "source": ImportedFrom(
            kind="run",
            name=model.path.resolve().name,
            digest=digest({"job": begun, "step": model.step}),
            licence=_licence(record),
        ),
        "job": own,
        "types": types,
        "recipe": None
        if record.recipe is None
        else RecipeRecord(name=record.recipe, options=dict(record.options)),
        "data": {split: asdict(contents) for split, contents in record.data.items()},
        "evaluations": evaluations_of(model.path, model.step),
    }


def _licence(record: JobRecord) -> str | None:
    """Licence of the model that a run began with; ``None`` where that is gone, or names none."""
    start = None if record.start is None else record.start.get("path")
    if start is None or not Path(start).exists() or not known_source(Path(start)):
        return None
    try:
        return open_source(start).licence
    except SystolicError:
        return None


def evaluations_of(path: Path, step: int) -> list[EvaluationRecord]:
    """The evaluation of each split that a run has on record for a step; that which read most, where there are several."""
    with Run.open(path) as run:
        records, record = list(run.records("eval")), JobRecord.from_json(run.read_job())
    best: dict[str, EvaluationRecord] = {}
    for one in records:
        if one.get("step") != step:
            continue
        split, data = str(one["split"]), record.data.get(str(one["split"]))
        made = EvaluationRecord(
            on=split,
            metrics=finite_metrics(one["metrics"]),
            step=step,
            batches=one.get("batches"),
            of=one.get("of"),
            data=None if data is None else data.digest,
        )
        if split not in best or (made.batches or 0) >= (best[split].batches or 0):
            best[split] = made
    return list(best.values())
