"""One compile and forecast of a benchmark's row, and the lines that it is kept in."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from records import lines

from systolic import recipes
from systolic.chips import Slice, slice
from systolic.compiling import Compiled, Compiler, Failed, JobProgram, Outcome, Rejected
from systolic.compiling import compile as compile_program
from systolic.core.errors import SystolicError
from systolic.core.files import Store
from systolic.forecasting.run import of_outcome
from systolic.hlo import Computation, Instruction, Module, parse
from systolic.sim.timeline import PricedBy, Resource, Timeline


def forecast(
    options: Mapping[str, Any],
    flags: Sequence[str],
    on_slice: str,
    compiler: Compiler,
    name: str = "lm",
) -> dict[str, Any]:
    """A recipe with these options: ``forecast_seconds`` and where they go, or ``problem``.

    Flags that this libtpu does not know are left out and listed as ``dropped``.
    """
    on = slice(on_slice)
    recipe = recipes.find(name)
    left, dropped = tuple(flags), []
    try:
        job = recipe(recipes.typed(recipe, dict(options)))
        while True:
            outcome = compile_program(
                JobProgram(job=job), on, replace(compiler, flags=left), lambda _: None
            )
            unknown = unknown_flag(outcome, left)
            if unknown is None:
                break
            left = tuple(flag for flag in left if flag != unknown)
            dropped.append(unknown)
    except SystolicError as error:
        return {"problem": str(error)}
    return ({"dropped": dropped} if dropped else {}) | figures(outcome, name, on)


def figures(outcome: Outcome, name: str, on: Slice) -> dict[str, Any]:
    """``forecast_seconds`` of a compiler's answer at today's prices and where they go, or ``problem``."""
    match outcome:
        case Rejected():
            need, have = outcome.need_bytes / 2**30, outcome.have_bytes / 2**30
            return {"problem": f"does not fit: {need:.2f} of {have:.2f} GiB"}
        case Failed(reason=reason):
            return {"problem": reason}
        case Compiled():
            made = of_outcome(outcome, name, on, 0.0)
            if made.step_seconds is None:
                return {"problem": "does not fit"}
            return {
                "forecast_seconds": made.step_seconds,
                "mfu": made.mfu,
                "hfu": made.hfu,
                "peak_gib": made.memory.peak_bytes / 2**30 if made.memory else None,
                "time_by_resource": made.time_by_resource,
                "buckets": buckets(made.timeline) if made.timeline is not None else {},
                "formatting_seconds": formatting(made.timeline, parse(outcome.hlo))
                if made.timeline
                else 0.0,
                "recomputed_seconds": recomputed(made.timeline) if made.timeline else 0.0,
                "program": outcome.digest,
                "cached": outcome.cached,
            }


def priced_again(digest: str | None, on_slice: str, root: Path) -> dict[str, Any] | None:
    """:func:`figures` of a program that an earlier run compiled into the store of ``root``; None where it isn't there."""
    folder = Store("programs", root).get(digest) if digest else None
    if digest is None or folder is None:
        return None
    return figures(Compiled(folder=folder, digest=digest, cached=True), "lm", slice(on_slice))


TILES = 8
"""Of a loss that is made to fit."""


def fitting(
    options: Mapping[str, Any], flags: Sequence[str], on_slice: str, compiler: Compiler
) -> dict[str, Any]:
    """:func:`forecast`; where the program does not fit with whole logits, with a loss in tiles, ``tiled`` then."""
    made = forecast(options, flags, on_slice, compiler)
    if "does not fit" not in made.get("problem", "") or options["layout"].get("loss_chunks", 1) > 1:
        return made
    return forecast(tiled(options), flags, on_slice, compiler) | {"tiled": True}


def tiled(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options with a loss in tiles."""
    return {**options, "layout": {**options["layout"], "loss_chunks": TILES}}


def buckets(timeline: Timeline) -> dict[str, float]:
    """Seconds of a step by what the core does: kernels, matmuls, the rest of its work, and waiting."""
    found = dict.fromkeys(("matmul", "attention", "elementwise"), 0.0)
    for span, times in timeline.leaves():
        if span.lane != "core" or span.resource in (Resource.ici, Resource.dcn):
            continue
        matmul = "matmul" if span.flops else "elementwise"
        found["attention" if span.priced_by is PricedBy.kernel else matmul] += span.seconds * times
    return found | {"collective": timeline.seconds - sum(found.values())}


MOVES = frozenset(
    ("copy", "transpose", "reshape", "slice", "pad", "concatenate", "dynamic-slice", "bitcast")
)
"""Ops that only move data."""
BESIDE = frozenset(
    ("parameter", "constant", "iota", "tuple", "get-tuple-element", "convert", "broadcast")
)
"""What a fusion that only moves data may hold as well."""


def formatting(timeline: Timeline, module: Module) -> float:
    """Seconds of a step's elementwise work that only moves data: XProf's category ``data formatting``."""
    index = {one.name: one for held in module.computations.values() for one in held}
    return sum(
        span.seconds * times
        for span, times in timeline.leaves()
        if span.lane == "core" and span.name in index and moves(module, index[span.name])
    )


def moves(module: Module, instruction: Instruction) -> bool:
    """Whether an op, or all that a fusion holds, computes nothing."""
    if instruction.opcode != "fusion":
        return instruction.opcode in MOVES

    def every(held: Computation) -> bool:
        return all(
            one.opcode in MOVES | BESIDE
            or one.opcode in ("dynamic-update-slice", "bitcast-convert")
            or (one.opcode == "fusion" and every(module.callee(one, "calls")))
            for one in held
        )

    return every(module.callee(instruction, "calls"))


def recomputed(timeline: Timeline) -> float:
    """Seconds of matmuls that XLA itself computes twice, to fit the chip's memory: it names them so."""
    spans = ((span, times) for span, times in timeline.leaves() if ".remat" in span.name)
    return sum(span.seconds * times for span, times in spans if span.flops)


def unknown_flag(outcome: Any, flags: Sequence[str]) -> str | None:
    """The flag that a failed compile names as unknown."""
    if not isinstance(outcome, Failed):
        return None
    text = f"{outcome.reason}\n{outcome.log}"
    if "nknown" not in text and "No such compile option" not in text:
        return None
    return next((f for f in flags if f.partition("=")[0].lstrip("-") in text), None)


def settled(path: Path | None, mode: str) -> dict[str, dict[str, Any]]:
    """Lines of an earlier run in this mode by id, the last of each; a compile that broke off is tried again."""
    written = lines(path, "id", "mode") if path and path.exists() else []
    found = {r["id"]: r for r in written if r["mode"] == mode}
    again = [n for n, r in found.items() if "problem" in r and not final(r["problem"])]
    return {name: record for name, record in found.items() if name not in again}


def final(problem: str) -> bool:
    """Whether a problem is the compiler's answer."""
    return "does not fit" in problem or "same program" in problem


def append(path: Path | None, record: Mapping[str, Any]) -> None:
    """One more line, whole on the disk before the next row begins."""
    if path is None:
        return
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
