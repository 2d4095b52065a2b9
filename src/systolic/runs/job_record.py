"""job.json of a run as one value; files of earlier versions read as far as they go."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from systolic import __version__
from systolic.runs.plan_choice import Chosen
from systolic.runs.paths import DIRECTORY
from systolic.runs.revision import REVISION
from systolic.core.digest import digest
from systolic.job.data import Contents


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFlags:
    """Compiler flags of a run."""

    given: str
    """Value of ``--flags``."""
    chip: str | None
    """The chip that the shared set is of; None for a CPU."""
    compiler: tuple[str, ...]
    """All of them, as the programs were compiled."""

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "RunFlags":
        """Inverse of :meth:`to_json`."""
        return cls(given=plain["given"], chip=plain["chip"], compiler=tuple(plain["compiler"]))

    def to_json(self) -> dict[str, Any]:
        """For job.json."""
        return {"given": self.given, "chip": self.chip, "compiler": list(self.compiler)}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """Content of a run's job.json."""

    recipe: str | None
    """Name that the user gave; None for a run that was made from a :class:`~systolic.job.Job`."""
    options: Mapping[str, Any]
    """The recipe's, as plain values."""
    job: Mapping[str, Any]
    """``Job.to_json``."""
    layout: Mapping[str, int]
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

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "JobRecord":
        """Inverse of :meth:`to_json`; entries that an earlier version did not write have their defaults."""
        plan, flags, data = plain.get("plan"), plain.get("flags"), plain.get("data")
        return cls(
            recipe=plain.get("recipe"),
            options=plain.get("options", {}),
            job=plain.get("job", {}),
            layout=plain.get("layout", {}),
            plan=Chosen.from_json(plan) if plan else None,
            flags=RunFlags.from_json(flags) if flags else None,
            log_every=plain.get("log_every"),
            diagnose=plain.get("diagnose"),
            init_from=plain.get("init_from"),
            start=plain.get("start"),
            data={split: Contents(**each) for split, each in (data or {}).items()},
            labels=tuple(plain.get("labels") or ()),
            types=plain.get("types"),
            directory=plain.get(DIRECTORY),
            revision=plain.get("revision", 1),
            version=plain.get("systolic", ""),
        )

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
