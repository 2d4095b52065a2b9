"""The process that compiles; it may die. ``python -m systolic.aot.child REQUEST FOLDER``.

Says on standard output, a JSON object a line, what it is at; leaves its answer in the folder.
"""

import gzip
import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from systolic.aot.outcome import EXECUTABLE, HLO, REPORT
from systolic.chips import Slice, slice
from systolic.core.errors import SystolicError
from systolic.core.store import Store

ERROR = "error.json"


def say(**record: Any) -> None:
    """One line for the parent."""
    print(json.dumps(record), flush=True)


def main(request_path: Path, folder: Path) -> int:
    """Traces, lowers, looks in the store, compiles."""
    import cloudpickle

    request = cloudpickle.loads(request_path.read_bytes())
    try:
        return _compile(request, folder)
    except SystolicError as error:
        _fail(folder, "user", str(error))
    return 1


def _compile(request: Mapping[str, Any], folder: Path) -> int:
    clock = _Clock()
    on = slice(request["slice"])
    say(stage="importing")
    devices = topology(on)
    clock.lap("import")
    say(stage="tracing")
    program = request["program"].trace(on, devices)
    clock.lap("trace")
    say(stage="lowering")
    lowered = program.traced.lower(lowering_platforms=(_platform(on),))
    clock.lap("lower")
    versions = versions_here(on)
    # The text of a program does not tell which device is where in the mesh; the schedule depends on it.
    where = places(program.mesh, on)
    name = _digest(
        [lowered.as_text(), where, on.name, request["flags"], request["options"], versions]
    )
    report = {
        "digest": name,
        "slice": on.name,
        "flags": list(request["flags"]),
        "options": dict(request["options"]),
        "versions": versions,
        "program": dict(program.facts),
        "places": where,
        "seconds": clock.laps,
    }
    if not request["again"] and Store("programs", Path(request["store"])).get(name) is not None:
        say(stage="found", digest=name)
        return 0
    say(stage="compiling", digest=name)
    try:
        compiled = lowered.compile(compiler_options=dict(request["options"]) or None)
    except Exception as error:
        clock.lap("compile")
        _write(folder / REPORT, report)
        _fail(folder, "compiler", f"{type(error).__name__}: {error}")
        return 1
    clock.lap("compile")
    report["memory"] = _memory(compiled)
    costs = compiled.cost_analysis() or {}
    report["flops"] = float(costs.get("flops", 0.0))
    (folder / HLO).write_bytes(gzip.compress(compiled.as_text().encode(), 3))
    if request["save"]:
        say(stage="serializing")
        (folder / EXECUTABLE).write_bytes(compiled.runtime_executable().serialize())
    clock.lap("read")
    _write(folder / REPORT, report)
    say(stage="compiled", digest=name)
    return 0


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _memory(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    fields = (
        "peak_memory",
        "argument_size",
        "output_size",
        "alias_size",
        "temp_size",
        "generated_code_size",
        "host_temp_size",
    )
    return (
        {}
        if stats is None
        else {f"{f}_in_bytes": int(getattr(stats, f"{f}_in_bytes")) for f in fields}
    )


def topology(on: Slice) -> Any:
    """The slice's devices as JAX describes them; virtual ones for a CPU."""
    import jax

    if on.platform != "tpu":
        return jax.devices()[: on.num_devices]
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
    """(x, y, z, core, slice) of each device in the order of the mesh; empty off TPU."""
    if on.platform != "tpu" or mesh is None:
        return []
    return [
        [*(*device.coords, 0, 0)[:3], device.core_on_chip, getattr(device, "slice_index", 0) or 0]
        for device in mesh.devices.flat
    ]


def versions_here(on: Slice) -> dict[str, str]:
    """Of what decides the program."""
    names = ["jax", "jaxlib", *(["libtpu"] if on.platform == "tpu" else [])]
    return {name: importlib.metadata.version(name) for name in names}


def _platform(on: Slice) -> str:
    return {"gpu": "cuda"}.get(on.platform, on.platform)


def _fail(folder: Path, who: str, text: str) -> None:
    _write(folder / ERROR, {"who": who, "text": text})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self.last, 3)
        self.last = now


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
