"""Dependencies of a compiled program beside its own name and sizes, as named parts that can be read and compared.

They are known without tracing. A part too many costs a compile; a part too few would run a wrong program, so
all settings of JAX and the sources of every package that a traced function can call are in.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np

from systolic import IMPORTED
from systolic.chips.host import cpu_features, model_name, num_cpus
from systolic.compiling.executable import flags_of, place
from systolic.core.digest import digest
from systolic.core.errors import RunError
from systolic.steps.steps import StepFunctions

SOURCES = (
    *("compiling", "chips", "core", "data", "formats", "hlo", "job", "models", "inference"),
    *("serving/batch", "serving/text", "steps"),
)
"""Packages that say what is computed; those above them print, plan, train and price."""
COMPILERS = (
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "libtpu",
    "torchax",
)
"""Packages that compile, where they are installed."""
VARIABLES = ("LIBTPU_", "NVIDIA_TF32", "TPU_MEGACORE", "XLA_")
"""Beginnings of environment variables that compilers and runtimes read."""
ELSEWHERE = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that are compared as flags."""
HARMLESS = (
    "jax_compilation_cache",
    "jax_debug_log_modules",
    "jax_dump_ir",
    "jax_enable_compilation_cache",
    "jax_explain_cache_misses",
    "jax_log_",
    "jax_logging_level",
    "jax_persistent_cache",
    "jax_platforms",
    "jax_raise_persistent_cache_errors",
    "jax_traceback",
    "jax_tracer_error",
)
"""Beginnings of JAX's settings that say where to look, what to log and where to keep things."""
UNUSED = (
    *("name", "optimizer", "schedule", "evaluation", "checkpoints", "guard"),
    *("steps", "seed", "sample", "start"),
)
"""Fields of a job that no program of serving reads."""


class ForeignCodeError(RunError):
    """A job with code from outside the package, whose changes no fingerprint here would see."""


def surroundings(steps: StepFunctions) -> dict[str, Any]:
    """Named parts of the fingerprint of every program of a job on its devices.

    Raises:
        ForeignCodeError: the job has code from outside the package.
        RunError: the package's files are newer than this process, which runs an earlier version of them.
    """
    job, target = steps.job, steps.target
    devices = list(target.mesh.devices.flat)
    platform = target.platform
    return {
        "model": plain(job.model),
        "job": {
            field.name: plain(getattr(job, field.name))
            for field in dataclasses.fields(job)
            if field.name not in (*UNUSED, "model", "data")
        },
        "data": _without_paths(plain(job.data)),
        "target": {
            "dtype": target.dtype,
            "matmul_format": str(target.matmul_format),
            "weight_format": str(target.weight_format),
            "rules": plain(target.rules),
        },
        "device": _device(devices, steps),
        "flags": sorted({*flags_of(os.environ, platform), *target.flags}),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and name not in ELSEWHERE
        },
        "versions": versions(),
        "jax": {
            name: str(value)
            for name, value in sorted(jax.config.values.items())
            if not name.startswith(HARMLESS)
        },
        "source": dict(sources()),
    }


def _device(devices: Sequence[Any], steps: StepFunctions) -> dict[str, Any]:
    first, target = devices[0], steps.target
    cpu = first.platform == "cpu"
    found: dict[str, Any] = {
        "platform": target.platform,
        "runtime": first.client.platform_version,
        "kind": model_name() if cpu else ", ".join(sorted({one.device_kind for one in devices})),
        "number": len(devices),
        "ids": [one.id for one in devices],
        "processes": jax.process_count(),
        "mesh": {str(name): int(size) for name, size in target.mesh.shape.items()},
    }
    if cpu:
        found |= {"cores": num_cpus(), "features": cpu_features()}
    if first.platform == "tpu":
        found["places"] = [place(one) for one in devices]
    return found


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the libraries that trace and compile, as this process has them loaded."""
    made = {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    for name in COMPILERS:
        try:
            made[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return made


@functools.cache
def sources(root: Path = Path(__file__).parents[1]) -> Mapping[str, str]:
    """Digest of each package's Python files, by :data:`SOURCES`.

    Raises:
        RunError: a file changed after this process imported the package: what runs may be an earlier version of it.
    """
    found = {}
    for package in SOURCES:
        total = hashlib.sha256()
        for path in sorted((root / package).rglob("*.py")):
            if path.stat().st_ctime > IMPORTED:
                raise RunError(
                    f"{path} changed after this process imported the package; compiled programs are neither kept nor read: start again"
                )
            content = path.read_bytes()
            total.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
        found[package] = total.hexdigest()[:16]
    return found


def plain(value: Any) -> Any:
    """A value of a job as JSON, with the type of each part.

    Raises:
        ForeignCodeError: a part is of a class, or is a function, from outside the package.
    """
    if value is None or (
        isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins"
    ):
        return value
    kind = type(value)
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple) and kind.__module__ == "builtins":
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(one) for one in value), key=digest)
    if kind.__module__.startswith("systolic."):
        if isinstance(value, enum.Enum):
            return f"{kind.__name__}.{value.name}"
        if dataclasses.is_dataclass(value):
            parts = {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
            return {"type": kind.__qualname__, **parts}
    raise ForeignCodeError(
        f"the job holds a {kind.__module__}.{kind.__qualname__}, code that is not of this package; its programs are compiled at each start"
    )


def _without_paths(part: Any) -> Any:
    """Data without its places: programs see its fields, which are their arguments."""
    if isinstance(part, Mapping):
        return (
            "a path" if set(part) == {"path"} else {k: _without_paths(v) for k, v in part.items()}
        )
    return [_without_paths(one) for one in part] if isinstance(part, list) else part


def arguments_of(arrays: Any) -> dict[str, Any]:
    """Names, shapes, dtypes and shardings of arrays or ShapeDtypeStructs: their number and bytes, and a digest."""
    leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
    listed = [[jax.tree_util.keystr(path), *_leaf(leaf)] for path, leaf in leaves]
    held = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for _, leaf in leaves)
    dtypes = sorted({str(leaf.dtype) for _, leaf in leaves})
    return {"arrays": len(leaves), "bytes": held, "dtypes": dtypes, "digest": digest(listed, 64)}


def _leaf(leaf: Any) -> list[Any]:
    where = leaf.sharding
    spec = ""
    if where is not None and not where.is_fully_replicated:
        spec = str(where.spec)
    weak = jax.typeof(leaf).weak_type if isinstance(leaf, jax.Array) else bool(leaf.weak_type)
    return [list(leaf.shape), str(leaf.dtype), weak, spec]
