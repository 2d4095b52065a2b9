"""job.json of a run as one value, read from files of earlier versions as far as they go; and a Job made from its JSON again, with types of this package only."""

import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

import msgspec

from systolic import __version__
from systolic.core.errors import RunError
from systolic.core.files import digest
from systolic.job import Job, Mode
from systolic.job.data import Contents
from systolic.runs.plan_choice import Chosen
from systolic.runs.run import JOB, Run

REVISION = 2
"""Revision of the meaning of weights; raised when the same weights would give another function."""
_PARTS = ("model", "task", "data")
_PACKAGE = "systolic."
MOVED: Mapping[str, str] = {
    "systolic.data.audio.recordings": "systolic.data.audio",
    "systolic.data.image.digits": "systolic.data.image.sets",
    "systolic.data.image.idx": "systolic.data.image.sets",
    "systolic.data.text.bytes": "systolic.data.text.documents",
    "systolic.data.text.packing": "systolic.data.text.text_data",
    "systolic.data.text.prompts": "systolic.data.text.documents",
    "systolic.data.text.sentences": "systolic.data.text.text_data",
    "systolic.interop.program.model": "systolic.formats.program.model",
    "systolic.job.quantization": "systolic.job.precision",
    "systolic.models.decoder.rotary": "systolic.models.decoder.options",
    "systolic.models.vision.cnn.config": "systolic.models.vision.config",
    "systolic.models.vision.mobilenet.config": "systolic.models.vision.config",
    "systolic.models.vision.pixels": "systolic.models.vision.config",
    "systolic.models.vision.resnet.config": "systolic.models.vision.config",
    "systolic.models.vision.vit.config": "systolic.models.vision.config",
    "systolic.steps.tasks.arrays": "systolic.steps.tasks",
    "systolic.steps.tasks.classification": "systolic.steps.tasks",
    "systolic.steps.tasks.embedding": "systolic.steps.tasks",
    "systolic.steps.tasks.language": "systolic.steps.tasks",
    "systolic.steps.tasks.masked": "systolic.steps.tasks",
    "systolic.steps.tasks.transcription": "systolic.steps.tasks",
}
"""Modules and packages by the names that files of earlier versions have, to their names now; the longest that fits counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFlags:
    """Compiler flags of a run."""

    given: str
    """Value of ``--flags``."""
    chip: str | None
    """The chip that the shared set is of; None for a CPU."""
    compiler: tuple[str, ...]
    """All of them, as the programs were compiled."""

    def to_json(self) -> dict[str, Any]:
        """For job.json."""
        return {"given": self.given, "chip": self.chip, "compiler": list(self.compiler)}


class _PartOutline(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """A model or data of any class: the fields that Systolic's own have."""

    kind: str = ""
    """Name of its class."""
    tie_embeddings: Any = None
    mup: Any = None
    path: Any = None


class _ScheduleOutline(msgspec.Struct, frozen=True):
    warmup: int | float = 0


class _LayoutOutline(msgspec.Struct, frozen=True):
    accumulate: int = 1


class _AdapterOutline(msgspec.Struct, frozen=True):
    kind: str = "none"


class _EvaluationOutline(msgspec.Struct, frozen=True):
    metric: str | None = None
    mode: Mode = Mode.min


class JobOutline(msgspec.Struct, frozen=True):
    """A job in job.json as far as it reads without its classes, of which some are a user's own."""

    name: str | None = None
    steps: int | float | None = None
    start: str | None = None
    """Path of the model that it begins with."""
    model: _PartOutline = _PartOutline()
    data: _PartOutline = _PartOutline()
    schedule: _ScheduleOutline = _ScheduleOutline()
    layout: _LayoutOutline = _LayoutOutline()
    adapter: _AdapterOutline = _AdapterOutline()
    evaluation: _EvaluationOutline = _EvaluationOutline()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """Content of a run's job.json."""

    recipe: str | None = None
    """Name that the user gave; None for a run that was made from a :class:`~systolic.job.Job`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's, as plain values."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """``Job.to_json``."""
    outline: JobOutline = field(init=False, default=JobOutline(), compare=False, repr=False)
    """The job, as far as it reads without its classes."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the mesh axes that it began with."""
    plan: Chosen | None = None
    flags: RunFlags | None = None
    """None in runs of versions that kept none and compiled with XLA's defaults."""
    log_every: int | None = None
    diagnose: int | None = None
    init_from: str | None = None
    """The checkpoint whose weights it began with."""
    start: Mapping[str, str | None] | None = None
    """Path, kind and fingerprint of the model that it began with; None where that is none in files."""
    data: Mapping[str, Contents] = field(default_factory=dict)
    """By split: what tells its data from other data."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    types: Mapping[str, str] | None = None
    """Model, task and data to the full names of their classes; only without a recipe."""
    directory: str | None = None
    """Absolute path of the run when it was written; None in runs of versions that did not keep it."""
    revision: int = REVISION
    version: str = __version__
    """Version of Systolic."""

    def __post_init__(self) -> None:
        """Outlines the job; raises ``msgspec.ValidationError`` where a field of it is damaged."""
        object.__setattr__(self, "outline", msgspec.convert(_present(self.job), JobOutline))

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "JobRecord":
        """Inverse of :meth:`to_json`; entries that an earlier version did not write have their defaults.

        Raises:
            msgspec.ValidationError: a field is damaged.
        """
        before = {"revision": 1, "version": plain.get("systolic") or ""}
        return msgspec.convert({**before, **_present(plain)}, cls)

    def to_json(self) -> dict[str, Any]:
        """The content of job.json, less the directory, which :meth:`systolic.runs.run.Run.write_job` adds."""
        plain: dict[str, Any] = {
            "systolic": self.version,
            "revision": self.revision,
            "recipe": self.recipe,
            "options": dict(self.options),
            "job": dict(self.job),
            "plan": None if self.plan is None else self.plan.to_json(),
            "layout": dict(self.layout),
            "flags": None if self.flags is None else self.flags.to_json(),
            "log_every": self.log_every,
            "diagnose": self.diagnose,
            "digest": digest(dict(self.job)),
            "init_from": self.init_from,
            "start": None if self.start is None else dict(self.start),
            "data": {split: asdict(each) for split, each in self.data.items()},
            "labels": list(self.labels),
        }
        return plain if self.types is None else plain | {"types": dict(self.types)}


def _present(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are not null, which stand for those that are absent."""
    return {name: value for name, value in plain.items() if value is not None}


def read_record(run: Run) -> JobRecord:
    """Reads a run's job.json.

    Raises:
        RunError: it is damaged.
    """
    try:
        return JobRecord.from_json(run.read_job())
    except msgspec.ValidationError as error:
        raise RunError(
            f"{run.path / JOB} is damaged ({error}); restore it, or start again in another folder"
        ) from error


def check_revision(run: Path, record: JobRecord) -> None:
    """Refuses weights that this version would read differently from the version that trained them.

    Args:
        run: The run's directory, for the message.
        record: The content of its job.json.

    Raises:
        RunError: a decoder with tied embeddings from before they lost their scale (revision 1).
    """
    if record.revision < REVISION and record.outline.model.tie_embeddings:
        raise RunError(
            f"{run} was trained by an earlier version, in which tied embeddings had a scale, and would give other results now; use that version, or train it again"
        )


def compiled_with(record: JobRecord) -> tuple[str, ...]:
    """Compiler flags that a run was last compiled with; one of a version that kept no flags had its plan's, or none."""
    if record.flags is not None:
        return record.flags.compiler
    return () if record.plan is None else tuple(record.plan.flags)


class MovedModules(MetaPathFinder, Loader):
    """Finder of modules by the names of earlier versions, by which a run's copy of a recipe imports them."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A module that moved, or a package that only such lay in."""
        package = any(old.startswith(f"{fullname}.") for old in MOVED)
        if fullname in MOVED or package:
            return ModuleSpec(fullname, self, is_package=package)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module of today in the place of the new one."""
        name = module.__name__
        if name in MOVED:
            sys.modules[name] = import_module(MOVED[name])


def types_of(job: Job) -> dict[str, str]:
    """Full names of the classes that a job's JSON does not tell: dotted field to ``package.module.Class``."""
    return {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in _chosen(job, "")}


def job_from_json(plain: Mapping[str, Any], types: Mapping[str, str], run: Path) -> Job:
    """Inverse of ``Job.to_json``.

    Args:
        plain: The job as job.json has it.
        types: As :func:`types_of` made them.
        run: The run, for messages.

    Raises:
        RunError: a part is missing or not of this package, or does not read in this version.
    """
    check_parts(plain, run)
    job = {**plain}
    for part in _PARTS:
        job[part] = {key: each for key, each in plain[part].items() if key != "type"}
    return _made(job, Job, "", types, run)


def check_parts(plain: Mapping[str, Any], run: Path) -> None:
    """Refuses a job without its parts, in a file that lost them.

    Raises:
        RunError: names the first.
    """
    for part in _PARTS:
        if not isinstance(plain.get(part), Mapping):
            file = run / JOB if run.is_dir() else run
            raise RunError(
                f"{file} is damaged (its job has no {part}); restore it, or start again in another folder"
            )


def _chosen(value: Any, prefix: str) -> Iterator[tuple[str, type]]:
    """Fields whose class is not the one that is declared, those of their values included."""
    hints = typing.get_type_hints(type(value))
    for each in fields(value):
        inner = getattr(value, each.name)
        if is_dataclass(inner) and not isinstance(inner, type):
            name = f"{prefix}{each.name}"
            if type(inner) is not _declared(hints[each.name]):
                yield name, type(inner)
            yield from _chosen(inner, f"{name}.")


def _declared(hint: Any) -> Any:
    """The class of a field that holds one or None; any other hint as it is."""
    several = [kind for kind in typing.get_args(hint) if kind is not NoneType]
    return several[0] if len(several) == 1 and isinstance(several[0], type) else hint


def _made(value: Any, hint: Any, name: str, types: Mapping[str, str], run: Path) -> Any:
    """A part of a job. One that holds parts of recorded classes is built field by field: msgspec would
    refuse a part that is built already, or build the declared class."""
    kind = _class(name, types[name], run) if name in types else hint
    prefix = f"{name}." if name else ""
    if not any(each.startswith(prefix) and each != name for each in types):
        try:
            return msgspec.convert(value, kind, dec_hook=_custom)
        except (msgspec.ValidationError, TypeError) as error:
            raise _unreadable(run, error) from error
    holder = _declared(kind)
    if not isinstance(value, Mapping) or not is_dataclass(holder):
        raise _unreadable(run, TypeError(f"{name or 'job'} has no class or no fields"))
    hints = typing.get_type_hints(holder)
    inner = {
        each.name: _made(value[each.name], hints[each.name], f"{prefix}{each.name}", types, run)
        for each in fields(holder)
        if each.name in value
    }
    try:
        return holder(**inner)
    except TypeError as error:
        raise _unreadable(run, error) from error


def _unreadable(run: Path, error: Exception) -> RunError:
    return RunError(f"the job of {run} does not read in this version ({error}); {_again(run)}")


def _custom(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else kind(value)


def _class(part: str, name: str, run: Path) -> type:
    """A class by its full name; imports nothing that is not of this package."""
    module, _, kind = _moved(name).rpartition(".")
    if module.startswith(_PACKAGE):
        try:
            part_class = vars(import_module(module)).get(kind)
        except ImportError:
            part_class = None
        if isinstance(part_class, type) and is_dataclass(part_class):
            return part_class
    raise RunError(f"the {part} of {run} is {name}, a type that Systolic has not; {_again(run)}")


def _moved(name: str) -> str:
    """A full name as it is now."""
    old = max((old for old in MOVED if name.startswith(f"{old}.")), key=len, default="")
    return f"{MOVED[old]}{name.removeprefix(old)}" if old else name


def _again(run: Path) -> str:
    return f"give the job again: systolic.resume({str(run)!r}, job=…), or the same of systolic.open"
