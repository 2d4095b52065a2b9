"""Content of bundle.json, as values, and the job of a Bundle that was a run."""

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import DataError, OptionError, RunError, SystolicError
from systolic.core.files import canonical
from systolic.job import Adapter, Data, Job, Layout, Model, Task
from systolic.runs.bundle.packed import QuantizedRecord
from systolic.runs.job_record import job_from_json, types_of

KIND = "systolic-bundle"
FORMAT = 2
"""Raised when the files change in a way that older versions misread; 2 has quantized matrices, or a job of its own."""
PLAIN_FORMAT = 1
"""Format of a Bundle with neither, which older versions read."""
DIGEST = "digest"
"""The entry with the digest of all others."""
PACKAGES = ("systolic", "jax", "jaxlib", "flax", "numpy")
"""Packages whose versions are recorded."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a Bundle."""

    bytes: int
    sha256: str


class ImportedFrom(msgspec.Struct, frozen=True, omit_defaults=False):
    """Source of a Bundle."""

    kind: str
    """``hugging-face``, ``gguf``, ``run`` …"""
    name: str
    digest: str
    """Fingerprint of its files."""
    licence: str | None = None


class RecipeRecord(msgspec.Struct, frozen=True):
    """The recipe of a run."""

    name: str
    """Name that the user gave."""
    options: dict[str, Any]


class EvaluationRecord(msgspec.Struct, frozen=True):
    """Metrics of the weights of a Bundle, measured before they were written."""

    on: str
    """Split of the run's data, or the name of other data."""
    metrics: dict[str, float | None]
    """Means by name; ``None`` for what is no number."""
    step: int
    """Training step of the weights."""
    batches: int | None = None
    """Batches that were read."""
    of: int | None = None
    """Batches of the split; ``None`` where that is unknown."""
    data: str | None = None
    """Digest of the split's data, see ``data``; ``None`` where the split comes out of the training split's files."""
    before: dict[str, float | None] | None = None
    """Metrics of the weights before quantization on the same batches; ``None`` for weights that are not quantized."""


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a record has them: ``None`` for what is no number."""
    return {name: number if math.isfinite(number) else None for name, number in metrics.items()}


class Recorded(msgspec.Struct, frozen=True):
    """Inputs with the model's outputs for them."""

    file: str
    precision: str
    """Compute dtype under which the outputs were made."""
    tolerance: float
    """Largest difference of a replay over the largest recorded output."""
    platform: str
    """``cpu``, ``gpu`` or ``tpu``."""


class BundleHead(msgspec.Struct, frozen=True):
    """Entries of a bundle.json of any version, which tell whether this one reads it."""

    kind: Any = None
    format: Any = None
    systolic: Any = None
    """Version that wrote it."""


class BundleRecord(msgspec.Struct, frozen=True):
    """Content of bundle.json."""

    kind: str
    format: int
    systolic: str
    """Version that wrote it."""
    model: dict[str, Any]
    """``type`` and fields."""
    source: ImportedFrom
    dtype: str
    """Numpy name of the dtype of most weights."""
    files: dict[str, FileRecord]
    parity: dict[str, Any] | None = None
    """Largest and mean differences from the source framework's outputs; ``None`` where none were computed."""
    quantization: dict[str, QuantizedRecord] = {}
    """Matrices that are stored as codes and scales, by the paths of their parameters."""
    versions: dict[str, str] = {}
    """Versions of Python and of the packages that wrote it."""
    job: dict[str, Any] | None = None
    """The job of a run, less its model: task, data, precision, batch …; ``None`` for a model of another library."""
    types: dict[str, str] = {}
    """Dotted fields of the job to the full names of their classes."""
    recipe: RecipeRecord | None = None
    """``None`` for what no recipe made."""
    data: dict[str, dict[str, Any]] = {}
    """By split: fingerprint of the data that the run was trained and evaluated on."""
    evaluations: list[EvaluationRecord] = []
    recorded: Recorded | None = None
    """Inputs to replay; ``None`` where none were recorded."""
    digest: str | None = None
    """SHA-256 of all other entries; ``None`` in Bundles of versions that wrote none."""


def carried(record: BundleRecord) -> dict[str, Any]:
    """Record of a Bundle that is made from another one, apart from its weights."""
    return {
        "job": record.job,
        "types": record.types,
        "recipe": record.recipe,
        "data": record.data,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of :data:`PACKAGES`, those that are installed."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def seal(plain: Mapping[str, Any]) -> str:
    """Digest of a bundle.json's entries, less that of the digest itself."""
    rest = {name: value for name, value in plain.items() if name != DIGEST}
    return hashlib.sha256(canonical(rest)).hexdigest()


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle.json with its digest."""
    return {**plain, DIGEST: seal(plain)}


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
