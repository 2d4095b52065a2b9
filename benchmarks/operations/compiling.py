"""Compiles many programs in one process: what takes seconds a program in a process of its own.

The parent asks with :func:`compiled`; the process is this file. An answer is a folder with the schedule
before code generation (``quick.hlo.gz``), the one with the compiler's cycles (``full.hlo.gz``) and
``report.json``; a program that the compiler refused, or died of, has ``report.json`` with ``problem``.
"""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rows as measured

from systolic.chips import slice
from systolic.chips.flags import compile_options
from systolic.compiling.settings import child_environment
from systolic.core.errors import SystolicError
from systolic.core.files import cache_home

REPORT = "report.json"
SECONDS = 300.0
"""A program that takes longer is left out."""


def folder_of(row: measured.Row) -> Path:
    """Where the answer of a row lies."""
    return cache_home() / "operations" / row["id"].replace("/", "_").replace(" ", "_")


def report_of(row: measured.Row) -> dict[str, Any] | None:
    """The report of a row; None where it has not been compiled."""
    path = folder_of(row) / REPORT
    return json.loads(path.read_text()) if path.exists() else None


def compiled(rows: Sequence[measured.Row]) -> None:
    """Compiles those rows that have no answer; a row at which the process dies has that as its answer."""
    waiting = [row for row in rows if report_of(row) is None]
    while waiting:
        environment = child_environment(os.environ, slice("v5e-1"))
        asked = "\n".join(json.dumps(row) for row in waiting)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, __file__],
                input=asked,
                text=True,
                env=environment,
                timeout=SECONDS * len(waiting),
                check=False,
            )
        left = [row for row in waiting if report_of(row) is None]
        if left and len(left) == len(waiting) and not folder_of(left[0]).exists():
            raise RuntimeError("the compiling process ended before its first program; see above")
        if left:
            _write(left[0], {"problem": "the compiler died"})
        waiting = left[1:]


def _write(row: measured.Row, report: dict[str, Any]) -> None:
    folder_of(row).mkdir(parents=True, exist_ok=True)
    (folder_of(row) / REPORT).write_text(json.dumps(report))


def _compile(row: measured.Row, devices: dict[str, Any]) -> dict[str, Any]:
    from systolic.compiling.child import places, topology
    from systolic.compiling.dump import SCHEDULED, dump_options
    from systolic.compiling.functions import trace_function
    from systolic.compiling.kernels import counted
    from systolic.forecasting.function import Spread, function_program

    on = slice(measured.slice_of(row))
    made = measured.program_of(row, on.num_devices)
    if made is None:
        return {"problem": "not expressed"}
    function, args, spread = made
    how = Spread() if spread is None else Spread(mesh=spread[0], in_specs=spread[1])
    if on.name not in devices:
        devices[on.name] = topology(on)
    try:
        if measured.is_kernel(row):
            lowered, where = _on_one_device(function, args, devices[on.name]), []
        else:
            program = trace_function(
                function_program(function, args, {}, on, how), on, devices[on.name]
            )
            lowered = program.traced.lower(lowering_platforms=("tpu",))
            where = places(program.mesh, on)
    except (TypeError, ValueError, SystolicError) as error:
        return {"problem": f"its shapes make no program: {' '.join(str(error).split())[:200]}"}
    folder = folder_of(row)
    with tempfile.TemporaryDirectory() as dumped:
        try:
            options = compile_options(measured.flags_of(row), "tpu") | dump_options(Path(dumped))
            answer = lowered.compile(compiler_options=options)
        except Exception as error:
            text = str(error)
            kind = "does not fit" if "RESOURCE_EXHAUSTED" in text else text.splitlines()[0][:200]
            return {"problem": kind}
        schedule = next(Path(dumped).glob(f"*{SCHEDULED}"))
        (folder / "quick.hlo.gz").write_bytes(gzip.compress(counted(schedule.read_text()).encode()))
    (folder / "full.hlo.gz").write_bytes(gzip.compress(counted(answer.as_text()).encode()))
    memory = answer.memory_analysis()
    return {
        "slice": on.name,
        "places": where,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }


def _on_one_device(function: Any, args: Any, topology: Any) -> Any:
    """The lowered program on one device of the slice: XLA partitions no kernel. A mesh tells kernels the chip."""
    import jax

    device = topology[0]
    mesh = jax.sharding.Mesh([device], ("all",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in args]
    with jax.set_mesh(mesh):
        return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",))


def main() -> None:
    devices: dict[str, Any] = {}
    for line in sys.stdin.read().splitlines():
        row = json.loads(line)
        folder_of(row).mkdir(parents=True, exist_ok=True)
        report = _compile(row, devices)
        _write(row, report)
        print(row["id"], report.get("problem", ""), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
