"""A Job made again from job.json, for runs that no recipe made: of this package's own types only."""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from systolic.core.errors import RunError
from systolic.job import Job

_PARTS = ("model", "task", "data")
_PACKAGE = "systolic."


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
        RunError: a part is not of this package, or does not read in this version.
    """
    made: dict[str, Any] = {**plain}
    for part in _PARTS:
        made[part] = {key: each for key, each in plain[part].items() if key != "type"}
    # A part of a part comes before it.
    for name in sorted(types, key=lambda name: -name.count(".")):
        kind, holder = _class(name, types[name], run), made
        *above, last = name.split(".")
        for field in above:
            holder = holder[field]
        holder[last] = _convert(holder[last], kind, run)
    hints = typing.get_type_hints(Job)
    return Job(**{name: _convert(value, hints[name], run) for name, value in made.items()})


def _chosen(value: Any, prefix: str) -> Iterator[tuple[str, type]]:
    """Fields whose class is not the one that is declared, those of their values included."""
    hints = typing.get_type_hints(type(value))
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner) and not isinstance(inner, type):
            name = f"{prefix}{field.name}"
            declared = hints[field.name]
            if isinstance(declared, type) and type(inner) is not declared:
                yield name, type(inner)
            yield from _chosen(inner, f"{name}.")


def _convert(value: Any, kind: Any, run: Path) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=_custom)
    except (msgspec.ValidationError, TypeError) as error:
        raise RunError(
            f"the job of {run} does not read in this version ({error}); {_again(run)}"
        ) from error


def _custom(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else kind(value)


def _class(part: str, name: str, run: Path) -> type:
    """A class by its full name; imports nothing that is not of this package."""
    module, _, kind = name.rpartition(".")
    if module.startswith(_PACKAGE):
        try:
            found = vars(import_module(module)).get(kind)
        except ImportError:
            found = None
        if isinstance(found, type) and is_dataclass(found):
            return found
    raise RunError(f"the {part} of {run} is {name}, a type that Systolic has not; {_again(run)}")


def _again(run: Path) -> str:
    return f"give the job again: systolic.resume({str(run)!r}, job=…), or the same of systolic.open"
