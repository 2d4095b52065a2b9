"""Executable: a compiled step in a file, loaded only where everything it depends on is the same.

``PATH`` is JAX's own serialization (:mod:`jax.experimental.serialize_executable`), a pickle: load only
your own files. ``PATH.json`` is the compiler's report, with the fingerprint to compare on loading.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from systolic.chips.host import model_name
from systolic.compiling.outcome import Compiled, FileSignature, Fingerprint
from systolic.core.errors import NotFoundError, RunError
from systolic.core.files import cure

PACKAGES = ("jax", "jaxlib", "libtpu")
_BUILD = re.compile(r"\bcl/(\d+)")
_VIRTUAL = "--xla_force_host_platform_device_count"
"""Flag left out of the comparison, since the number of devices is compared itself."""
_KERNEL = re.compile(r"(\\22body\\22: \\22)([A-Za-z0-9+/=]+)")
_SHOWN = 12
"""Characters of a digest shown in a message."""


class SavedExecutable(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an executable in the file beside it: a :class:`CompileReport`, as far as loading depends on it."""

    stamp: Fingerprint
    executable: FileSignature
    program: dict[str, Any]
    """Facts of the program, by which a difference is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An executable on the local devices."""

    path: Path
    compiled: Any
    """``jax.stages.Compiled``, called like the jitted function."""
    seconds: float
    """Seconds of checking and loading."""


def stamp(
    text: str,
    devices: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
) -> Fingerprint:
    """Fingerprint of a program for these devices.

    Args:
        text: The lowered program.
        devices: JAX devices, present or described, in the program's mesh order.
        options: Options of this compile alone.
        flags: Compiler flags besides those in the environment.
    """
    first = devices[0]
    tpu = first.platform == "tpu"
    build = _BUILD.search(first.client.platform_version) if tpu else None
    return Fingerprint(
        platform=first.platform,
        kind=model_name() if first.platform == "cpu" else first.device_kind,
        devices=len(devices),
        versions={
            name: importlib.metadata.version(name) for name in PACKAGES if tpu or name != "libtpu"
        },
        build=build[1] if build else "",
        flags=sorted({*flags_of(os.environ, first.platform), *flags}),
        options=dict(options or {}),
        ids=[device.id for device in devices],
        places=[place(device) for device in devices] if tpu else [],
        program=program_digest(text),
    )


def place(device: Any) -> list[int]:
    """(x, y, z, core, slice) of a TPU device."""
    from systolic.steps.target import slice_of

    return [*(*device.coords, 0, 0)[:3], device.core_on_chip, slice_of(device)]


def flags_of(environ: Mapping[str, str], platform: str) -> list[str]:
    """Compiler flags in an environment, sorted; libtpu also reads LIBTPU_INIT_ARGS."""
    names = ("LIBTPU_INIT_ARGS", "XLA_FLAGS") if platform == "tpu" else ("XLA_FLAGS",)
    flags = {flag for name in names for flag in shlex.split(environ.get(name, ""))}
    return sorted(flag for flag in flags if not flag.startswith(_VIRTUAL))


def program_digest(text: str) -> str:
    """SHA-256 of a lowered program, without the paths of source files that Pallas kernels carry."""
    return hashlib.sha256(_KERNEL.sub(_without_paths, text).encode()).hexdigest()


def _without_paths(match: re.Match[str]) -> str:
    from jax.experimental.mosaic.dialects import tpu
    from jax.extend.mlir import ir

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        try:
            module = ir.Module.parse(b64decode(match[2]))
        except (ir.MLIRError, ValueError):  # another kind of kernel, compared unchanged
            return match[0]
        return f"{match[1]}{module.operation.get_asm(enable_debug_info=False)}"


def serialize(compiled: Any) -> bytes:
    """Content of an executable's file.

    Raises:
        RunError: the program can't be serialized.
    """
    from jax.experimental import serialize_executable

    try:
        return serialize_executable.serialize(compiled)[0]
    except (ValueError, NotImplementedError) as error:
        raise RunError(
            f"JAX cannot serialize this program ({error}); leave --save out, or pass the arrays that the function closes over as arguments"
        ) from error


def signature(content: bytes) -> FileSignature:
    """Size and digest of an executable's file, for its report."""
    return FileSignature(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def save(compiled: Compiled, path: Path) -> None:
    """Copies an executable from the store to ``path``, and its report to ``path.json``.

    Raises:
        RunError: there is none, others could have written it, or a file can't be written.
    """
    source = compiled.executable
    if source is None:
        raise RunError(f"{compiled.folder} has no executable; compile it with save=True")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        _beside(path).write_text(json.dumps(compiled.report.to_json()))
    except OSError as error:
        raise RunError(
            f"{path} could not be written ({error.strerror}); {cure(path, error)}"
        ) from error


def load(
    path: Path,
    lowered: Any,
    devices: Sequence[Any],
    facts: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
) -> Loaded:
    """Loads the executable in ``path`` for ``lowered``, if it is of the same program for the same devices.

    Args:
        path: The file, with ``path.json`` beside it.
        lowered: ``jax.stages.Lowered`` of the program that would be compiled here.
        devices: The devices present, in the order of the program's mesh.
        facts: Facts of the program under the report's names, to name a difference.
        flags: Compiler flags for it besides those in the environment.

    Raises:
        NotFoundError: one of the two files does not exist.
        RunError: they are damaged or do not match; names the first difference.
    """
    from jax.experimental import serialize_executable

    begin = time.perf_counter()
    saved = _saved(path)
    here = stamp(lowered.as_text(), devices, flags=flags)
    check(path, saved, here, facts or {})
    content = path.read_bytes()
    if signature(content) != saved.executable:
        raise RunError(
            f"{path} is not the file that {_beside(path).name} describes: {len(content):,} bytes of {saved.executable.bytes:,}, or others; copy both again"
        )
    try:
        compiled = serialize_executable.deserialize_and_load(
            content,
            lowered.in_tree,
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=list(devices),
        )
    except Exception as error:  # any error of the runtime
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"{path} matches this machine, but its runtime refuses it ({reason}); leave --executable out to compile here"
        ) from error
    return Loaded(path=path, compiled=compiled, seconds=time.perf_counter() - begin)


def check(path: Path, saved: SavedExecutable, here: Fingerprint, facts: Mapping[str, Any]) -> None:
    """Checks that the executable that ``saved`` describes can run here.

    Raises:
        RunError: it can't; names the first difference, both values and the next step.
    """
    for what, theirs, ours, fix in _differences(saved.stamp, here):
        raise RunError(f"{path} does not match: its {what} is {theirs}, here it is {ours}; {fix}")
    if saved.stamp.program == here.program:
        return
    for name, value in facts.items():
        before = saved.program.get(name)
        if before != value:
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                before, value = _differing(before, value)
            raise RunError(
                f"{path} is another program: its {name} is {_text(before)}, here it is {_text(value)}; give the recipe and the options that it was forecast with"
            )
    raise RunError(
        f"{path} is another program: its lowered digest is {saved.stamp.program[:_SHOWN]}, here it is {here.program[:_SHOWN]}; give the options and the source that it was forecast with, or forecast again with --save"
    )


def _differences(saved: Fingerprint, here: Fingerprint) -> Iterator[tuple[str, str, str, str]]:
    """(name, saved, here, next step) of each difference besides the program, the most general first."""
    again = "forecast for this machine with --save, or leave --executable out to compile here"
    for name, what in (
        ("platform", "platform"),
        ("kind", "chip"),
        ("devices", "number of devices"),
    ):
        theirs, ours = getattr(saved, name), getattr(here, name)
        if theirs != ours:
            yield what, str(theirs), str(ours), again
    for name in PACKAGES:
        theirs, ours = saved.versions.get(name), here.versions.get(name)
        if theirs != ours:
            fix = f"pip install {name}=={theirs}, or {again}" if theirs else again
            yield f"{name} version", _text(theirs), _text(ours), fix
    if saved.build != here.build:
        yield "libtpu build", _text(saved.build), _text(here.build), again
    if list(saved.flags) != list(here.flags):
        fix = "give the same --flags" if saved.platform == "tpu" else "set XLA_FLAGS"
        yield "set of compiler flags", _text(saved.flags), _text(here.flags), f"{fix}, or {again}"
    if saved.options != here.options:
        yield "set of compile options", _text(saved.options), _text(here.options), again
    names = (("places", "place in the topology"), ("ids", "number in JAX"))
    for name, what in names:
        pairs = zip(getattr(saved, name), getattr(here, name), strict=True)
        for index, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                yield f"device {index} by {what}", _text(theirs), _text(ours), again


def _differing(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries that differ between the two, with the values of each."""
    names = [name for name in theirs if name not in ours or theirs[name] != ours[name]]
    return {n: theirs[n] for n in names}, {n: ours[n] for n in names if n in ours}


def _text(value: Any) -> str:
    """Text of a value in a message."""
    if value in (None, "", [], {}):
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, list | tuple):
        spaced = all(isinstance(part, str) for part in value)
        return " ".join(value) if spaced else f"({', '.join(map(str, value))})"
    return str(value)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _saved(path: Path) -> SavedExecutable:
    for file in (path, _beside(path)):
        if not file.is_file():
            raise NotFoundError(
                f"{file} is not a file; systolic forecast RECIPE --on SLICE --save {path} writes it and {path.name}.json"
            )
    try:
        return msgspec.convert(json.loads(_beside(path).read_text()), SavedExecutable)
    except (ValueError, msgspec.ValidationError) as error:
        raise RunError(
            f"{_beside(path)} is damaged, or of a version that did not record what it was made for ({error}); forecast again with --save"
        ) from error
