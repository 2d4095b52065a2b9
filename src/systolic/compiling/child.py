"""The process that compiles and may crash: ``python -m systolic.compiling.child FOLDER DESK < REQUEST``.

Reads the request from standard input, its length in eight bytes and then a pickle; a file could be
written by others. Reports stages and errors on standard output, one JSON object per line, which
works with a full disk; writes its answer to FOLDER.
"""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import re
import stat
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from systolic.chips import Slice, slice
from systolic.chips.flags import compile_options, name_of
from systolic.compiling import executable, gpu_compiler, host_backend, kernels, settings
from systolic.compiling.dump import (
    FOR_GPU,
    SCHEDULE_ONLY,
    dump_options,
    keep,
    peak_bytes,
    proto,
    refused_schedule,
    schedule,
    shorter_search,
)
from systolic.compiling.host_backend import Built
from systolic.compiling.outcome import (
    ERROR,
    EXECUTABLE,
    FAILED,
    FOUND,
    HLO,
    PROTO,
    ChildLine,
    CompiledMemory,
    CompileReport,
    CompileRequest,
    rejection,
)
from systolic.core.errors import RunError, SystolicError
from systolic.core.files import FULL, Store, unwritable
from systolic.core.machine import leave_cuda_out

_ADDRESS = re.compile(r"<(?:function|bound method) (\S+)(?: of .*?)? at 0x[0-9a-f]+>+")
_NO_RULE = re.compile(r"MLIR translation rule for primitive '([^']+)' not found for platform (\w+)")


def say(**fields: Any) -> None:
    """Prints one line for the parent, of the fields of a :class:`ChildLine`."""
    print(json.dumps(ChildLine(**fields).to_json()), flush=True)


def main(folder: Path, desk: Path) -> int:
    """Traces, lowers, looks in the store, compiles and stores; returns the exit status."""
    import cloudpickle

    try:
        request: CompileRequest = cloudpickle.loads(_read_request())
    except SystolicError as error:  # of a module that is imported for its function
        _fail("user", str(error), type(error).__name__)
        return 1
    # Has the source lines of ops be the user's: a function of a library alone has none, rather than ours.
    from jax._src import source_info_util

    source_info_util.register_exclusion(str(Path(__file__).parent))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        return _compile(request, folder, desk / "dump")
    except SystolicError as error:
        _fail("user", str(error), type(error).__name__)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _fail("user", str(unwritable(Path(request.store), error)), RunError.__name__)
        else:
            # An error in a user's function, whose message is the reason.
            traceback.print_exc()
            _fail("program", _told(error), where=_place(error))
    return 1


def _told(error: Exception) -> str:
    """An error's text without addresses; one that has no text says where it was raised."""
    text = _ADDRESS.sub(r"\1", str(error)).strip()
    if (unknown := _NO_RULE.search(text)) is not None:
        return f"JAX has no implementation of {unknown[1]} for {unknown[2]} ({text})"
    if not text:
        *_, last = traceback.extract_tb(error.__traceback__)
        file = "/".join(Path(last.filename).parts[-3:])
        text = f"raised without a text in {file}:{last.lineno}, {last.line}"
    return f"{type(error).__name__}: {text}"


def _place(error: Exception) -> str:
    """``file.py:14``, the last line of the user's on the way to an error; empty without one."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        own = Path(__file__).parents[1] in path.parents or "site-packages" in path.parts
        if path.suffix == ".py" and not own and Path(os.__file__).parent not in path.parents:
            place = f"{path.name}:{frame.lineno}"
    return place


def _read_request() -> bytes:
    size = int.from_bytes(_read(8), "little")
    return _read(size)


def _read(size: int) -> bytes:
    """Reads ``size`` bytes of standard input, unbuffered, so that nothing after them is consumed."""
    parts = []
    while size and (part := os.read(0, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _end_with_parent() -> None:
    """Ends this process with its parent, which keeps our standard input open and writes no more."""
    if stat.S_ISFIFO(os.fstat(0).st_mode):  # a terminal or a file when run manually
        os.read(0, 1)
        os._exit(1)


def _compile(request: CompileRequest, folder: Path, dumped: Path) -> int:
    import cloudpickle

    clock = _Clock()
    on = slice(request.slice)
    say(stage="importing")
    settings.take(request.settings)
    devices = topology(on)
    built = host_backend.built_for(on, devices)
    if on.platform == "gpu" and built is not Built.host:
        host_backend.take_as_there(on, request.save)
    clock.lap("import")
    say(stage="tracing")
    program = cloudpickle.loads(request.program).trace(on, devices)
    clock.lap("trace")
    say(stage="lowering")
    lowered = program.traced.lower(lowering_platforms=(host_backend.lowering_platform(on),))
    clock.lap("lower")
    options = {k: v for k, v in request.options.items() if k != SCHEDULE_ONLY}
    text = lowered.as_text()
    stamp = executable.stamp(text, _ordered(program.mesh, devices), options, request.flags)
    report = CompileReport(
        slice=on.name,
        built=built,
        flags=list(request.flags),
        options=dict(request.options),
        versions=versions_here(on),
        program=program.facts,
        places=places(program.mesh, on),
        seconds=clock.laps,
        stamp=stamp,
    )
    decisive = [
        text,
        report.places,  # which the text of a program lacks, and its schedule depends on
        *(on.name, report.flags, report.options, report.versions, built.value),
        host_backend.seen(on, os.environ),
        *(gpu_compiler.flags_for(program.facts.verb) if on.platform == "gpu" else ()),
        stamp.build,
        [on.topology_name, on.chip_config_name, on.chips_per_host_bounds, on.num_slices],
        settings.key(),
    ]
    plain, saved = _digest(decisive), _digest([*decisive, "with the executable"])
    store = Store("programs", Path(request.store))
    # Of two requests for the same program at a time one compiles, and the other finds the result.
    with store.lock(plain, lambda: say(stage="waiting")):
        for name in (plain, saved):
            known = store.get(name)
            if known is not None and not (request.save and _lacks_executable(known)):
                say(stage=FOUND, digest=name, facts=program.facts)
                return 0
        say(stage="compiling")
        if not _answer(lowered, request, report, _Desk(clock, folder, dumped, store)):
            return 1
        name = saved if (folder / EXECUTABLE).exists() else plain
        store.put(name, folder)
    say(stage="compiled", digest=name, facts=program.facts)
    return 0


def _lacks_executable(entry: Path) -> bool:
    return not (entry / EXECUTABLE).exists() and not (entry / ERROR).exists()


@dataclass(frozen=True)
class _Desk:
    clock: "_Clock"
    folder: Path
    """Folder of the answer."""
    dumped: Path
    """Folder of the compiler's dump; the parent removes it."""
    store: Store


def _answer(lowered: Any, request: CompileRequest, report: CompileReport, desk: _Desk) -> bool:
    """Fills the folder with the compiler's answer; False for an answer that is not kept."""
    on = slice(request.slice)
    options = {k: v for k, v in request.options.items() if k != SCHEDULE_ONLY}
    if on.platform == "tpu":  # others take flags from the environment
        own = [flag for flag in request.flags if flag not in request.runtime]
        shorter = shorter_search(on.name) if SCHEDULE_ONLY in request.options else ()
        options = {**compile_options([*shorter, *own], "tpu"), **options}
    elif on.platform == "gpu" and report.built is Built.topology:
        flags = gpu_compiler.flags_for(report.program.verb)
        own = [flag for flag in flags if name_of(flag) not in map(name_of, request.flags)]
        options = {**compile_options(own, "gpu"), **options}
    folder, clock = desk.folder, desk.clock
    compiled = None
    try:
        if report.built is Built.stand_in:
            text = host_backend.schedule(lowered, desk.dumped)
        elif on.platform == "gpu" and report.built is Built.topology:
            text = schedule(lowered, options, desk.dumped, math.inf, FOR_GPU)
        elif SCHEDULE_ONLY in request.options:
            text = schedule(lowered, options, desk.dumped, on.program_bytes)
        else:
            compiled = lowered.compile(compiler_options={**options, **dump_options(desk.dumped)})
            text = compiled.as_text()
    except Exception as error:
        desk.store.check_room()  # with a full disk the compiler's error means nothing
        clock.lap("compile")
        failure = f"{type(error).__name__}: {error}"
        if rejection(failure, 0) is None:
            _fail("compiler", failure)
            return False
        (folder / ERROR).write_text(json.dumps({"text": failure}))
        if (begun := refused_schedule(desk.dumped)) is not None:
            # The module that did not fit, to name the buffers by.
            (folder / HLO).write_bytes(keep(begun))
            report = replace(report, memory=CompiledMemory(used_in_bytes=peak_bytes(desk.dumped)))
        report.write(folder)
        return True
    clock.lap("compile")
    desk.store.check_room()  # XLA continues when it can't write, and leaves partial files
    if on.platform == "tpu":
        text = kernels.counted(text)
    (folder / HLO).write_bytes(keep(text))
    if (message := proto(desk.dumped)) is not None:
        (folder / PROTO).write_bytes(gzip.compress(message, 3))
    report = replace(report, memory=_memory(compiled, peak_bytes(desk.dumped)))
    if compiled is not None:
        rates = host_backend.measured_rates(on.num_devices) if on.platform == "cpu" else None
        flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
        report = replace(report, rates=rates, flops=flops)
    if compiled is not None and request.save:
        say(stage="serializing")
        content = executable.serialize(compiled)
        report = replace(report, executable=executable.signature(content))
        (folder / EXECUTABLE).write_bytes(content)
    clock.lap("read")
    report.write(folder)
    return True


def _digest(parts: list[Any]) -> str:
    """Name of an answer, into which the module that counts kernels has written."""
    hashed = hashlib.sha256(json.dumps(parts).encode())
    hashed.update(Path(kernels.__file__).read_bytes())
    return hashed.hexdigest()[:32]


def _memory(compiled: Any, used: int | None) -> CompiledMemory:
    """Memory of a program; ``compiled`` is None of a compile that ended at its schedule."""
    if compiled is None:
        return CompiledMemory(used_in_bytes=used, peak_memory_in_bytes=used or 0)
    stats = compiled.memory_analysis()
    if stats is None:
        return CompiledMemory(used_in_bytes=used)
    figures = {
        name: int(getattr(stats, name))
        for name in CompiledMemory.__struct_fields__
        if name != "used_in_bytes"
    }
    return CompiledMemory(used_in_bytes=used, **figures)


def topology(on: Slice) -> Any:
    """JAX's description of the slice's devices; off TPU see :func:`systolic.compiling.host_backend.devices`."""
    if not gpu_compiler.compiles(on):
        leave_cuda_out()
    if on.platform != "tpu":
        return host_backend.devices(on)
    from jax.experimental import topologies

    bounds: Any = on.chips_per_host_bounds
    more: dict[str, Any] = {}
    if on.chip_config_name and on.chip_config_name != "default":
        more["chip_config_name"] = on.chip_config_name
    if on.num_slices > 1:
        more["num_slices"] = on.num_slices
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=on.topology_name or "",
        chips_per_host_bounds=bounds,
        **more,
    ).devices


def places(mesh: Any, on: Slice) -> list[list[int]]:
    """(x, y, z, core, slice) of each device in the order of the mesh, of a GPU its number; empty for a CPU."""
    if on.platform == "cpu" or mesh is None:
        return []
    if on.platform == "gpu":
        return [[device.id] for device in mesh.devices.flat]
    return [
        [*(*device.coords, 0, 0)[:3], device.core_on_chip, getattr(device, "slice_index", 0) or 0]
        for device in mesh.devices.flat
    ]


def _ordered(mesh: Any, devices: Any) -> list[Any]:
    """The devices in the program's order."""
    return list(devices if mesh is None else mesh.devices.flat)


def versions_here(on: Slice) -> dict[str, str]:
    """Versions of the packages that a program depends on."""
    names = ["jax", "jaxlib", *(["libtpu"] if on.platform == "tpu" else [])]
    if gpu_compiler.compiles(on):
        names += [
            name
            for name in gpu_compiler.PLUGINS
            if name == (gpu_compiler.compiler() or "").split()[0]
        ]
    return {name: importlib.metadata.version(name) for name in names}


def _fail(who: str, text: str, kind: str = "", where: str = "") -> None:
    say(stage=FAILED, who=who, text=text, kind=kind, where=where)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self.last, 3)
        self.last = now


if __name__ == "__main__":
    code = 1
    try:
        code = main(Path(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a compile that is stopped at its schedule still has a thread
