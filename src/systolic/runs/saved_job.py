"""A Job made again from JSON, for runs that no recipe made and for Bundles: of this package's own types only."""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from systolic.core.errors import RunError
from systolic.job import Job

_PARTS = ("model", "task", "data")
_PACKAGE = "systolic."
MOVED: Mapping[str, str] = {"systolic.interop.program.model": "systolic.formats.program.model"}
"""Modules and packages by the names that files of earlier versions have, to their names now; the longest that fits counts."""


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
    job = {**plain}
    for part in _PARTS:
        job[part] = {key: each for key, each in plain[part].items() if key != "type"}
    return _made(job, Job, "", types, run)


def _chosen(value: Any, prefix: str) -> Iterator[tuple[str, type]]:
    """Fields whose class is not the one that is declared, those of their values included."""
    hints = typing.get_type_hints(type(value))
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner) and not isinstance(inner, type):
            name = f"{prefix}{field.name}"
            if type(inner) is not _declared(hints[field.name]):
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
        return _convert(value, kind, run)
    holder = _declared(kind)
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


def _convert(value: Any, kind: Any, run: Path) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=_custom)
    except (msgspec.ValidationError, TypeError) as error:
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
            found = vars(import_module(module)).get(kind)
        except ImportError:
            found = None
        if isinstance(found, type) and is_dataclass(found):
            return found
    raise RunError(f"the {part} of {run} is {name}, a type that Systolic has not; {_again(run)}")


def _moved(name: str) -> str:
    """A full name as it is now."""
    old = max((old for old in MOVED if name.startswith(f"{old}.")), key=len, default="")
    return f"{MOVED[old]}{name.removeprefix(old)}" if old else name


def _again(run: Path) -> str:
    return f"give the job again: systolic.resume({str(run)!r}, job=…), or the same of systolic.open"
