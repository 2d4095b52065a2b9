"""Refusals of a user's model or task while it is traced: shapes that do not fit, arrays that a batch lacks."""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from flax import nnx

from systolic.core.errors import OptionError, nearest
from systolic.job.data import MASK

ABOUT_SHAPES = re.compile(r"shape|dimension|broadcast|rank|axis|axes|size|feature|channel", re.I)
OURS = Path(__file__).parents[1]
SHOWN = 6
"""Arrays of a frame that a message names."""


@contextmanager
def refusing_shapes(
    module: nnx.Module, model: object, task: object, batch: Mapping[str, Any]
) -> Generator[None]:
    """Errors about shapes and about arrays that a batch lacks, while a model or task that is not of this package is traced, end in one line.

    Raises:
        OptionError: in their place; names the module's path, its inputs, its parameters and the line of the user's file.
    """
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        users = [frame for frame in _frames(error.__traceback__) if _is_users(frame[0])]
        if not users or not isinstance(name, str) or name in batch:
            raise
        held = sorted(set(batch) - {MASK})
        raise OptionError(
            f"there is no array {name!r} in a batch{_at(*users[-1])}{nearest(name, held)}; the data has {', '.join(held)}"
        ) from error
    except (TypeError, ValueError) as error:
        own = any(not type(part).__module__.startswith("systolic.") for part in (model, task))
        if not own or not ABOUT_SHAPES.search(str(error)):
            raise
        raise OptionError(_shape_error(error, module, model, task)) from error


def _shape_error(error: Exception, root: nnx.Module, model: object, task: object) -> str:
    frames = _frames(error.__traceback__)
    reason = " ".join((str(error).splitlines() or [type(error).__name__])[0].split()).rstrip(".")
    users = [frame for frame in frames if _is_users(frame[0])]
    at = _at(*users[-1]) if users else ""
    inner = [frame for frame, _ in frames if isinstance(frame.f_locals.get("self"), nnx.Module)]
    if not inner:
        shapes = _arrays(users[-1][0].f_locals) if users else ""
        return f"the task {type(task).__name__} fails{at} with shapes that do not fit{shapes and f' ({shapes})'}: {reason}"
    module = inner[-1].f_locals["self"]
    names = inner[-1].f_code.co_varnames[1 : inner[-1].f_code.co_argcount]
    inputs = _arrays({name: inner[-1].f_locals.get(name) for name in names})
    if not inputs:
        inputs = _arrays(inner[-1].f_locals)
    weights = _arrays({name: _value(parameter) for name, parameter in vars(module).items()})
    path = _path(root, module)
    where = f"{path} ({type(module).__name__})" if path else type(module).__name__
    failure = f"the model {type(model).__name__} fails in {where}{at}"
    parts = [*([f"input {inputs}"] if inputs else []), *([f"weights {weights}"] if weights else [])]
    return (
        f"{failure}: {' and '.join(parts)} do not fit ({reason})"
        if parts
        else f"{failure}: {reason}"
    )


def _at(frame: FrameType, number: int) -> str:
    return f" at {Path(frame.f_code.co_filename).name} line {number}"


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is of a file that is no package's."""
    file = Path(frame.f_code.co_filename)
    return "site-packages" not in file.parts and OURS not in file.parents and file.suffix == ".py"


def _path(root: nnx.Module, module: nnx.Module) -> str:
    """Path of a module in the model: ``blocks.0.hidden``; "" for the model itself, or one that was made while it ran."""
    for path, submodule in nnx.iter_modules(root):
        if submodule is module:
            return ".".join(map(str, path))
    return ""


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else None


def _arrays(values: Mapping[str, Any]) -> str:
    """Arrays by name: ``x float32[32, 13]``."""
    arrays = [
        f"{name} {value.dtype}{list(value.shape)}"
        for name, value in values.items()
        if isinstance(value, jax.Array | np.ndarray)
    ]
    return ", ".join(arrays[:SHOWN])
