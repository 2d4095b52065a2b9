"""Steps of a server on TPU slices, compiled without one: simulated seconds against the bandwidth floor.

    python benchmarks/serve/tpu_step.py MODEL SLICE [--tensor 1] [--rows 1 16 64 256] [--chunk 256] [--context 1024] [--layers N]

MODEL is a published model's name, or ``llama-1b`` for the sizes of Llama 3.2 1B. Each line is a step of so many texts of
``--context`` positions, and with ``--chunk`` one more that reads so many prompt tokens: simulated seconds by the compiler's
schedule, floor (weights and pages that a device reads, over its memory's rate), the memory that the compiler counts, and
copies of what has the dims of a weight or a page array above 1 MiB.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, PagedProgram
from systolic.forecasting import forecast_program
from systolic.hlo import Module, parse
from systolic.job import Job, Layout
from systolic.models.decoder.config import Decoder
from systolic.recipes.jobs import source_of

LLAMA = Decoder(
    layers=16,
    d_model=2048,
    d_ff=8192,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab=128_256,
    tie_embeddings=True,
)
"""Llama 3.2 1B (its config.json)."""
LARGE_BYTES = 1 << 20


def job_of(name: str, tensor: int, layers: int) -> Job:
    """A published model's job under a layout for servers."""
    given: dict[str, Any] = {"model": LLAMA, "sequence": 2048} if name == "llama-1b" else {}
    job = source_of("lm" if given else name, given).job
    model: Any = job.model
    if layers:
        model = replace(model, layers=layers)
    return replace(job, model=model, layout=Layout(data=1, fsdp=1, tensor=tensor))


def step(job: Job, on: Slice, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """One step's figures."""
    pages = -(-options.context // options.page_size)
    program = PagedProgram(
        job=job,
        rows=rows,
        chunk=options.chunk,
        pages=pages,
        num_pages=(rows + 1) * pages + 1,
        page_size=options.page_size,
    )
    compiler = Compiler(flags=resolved("", on.chip)).quick()
    made = forecast_program(program, job.name, on, compiler=compiler)
    assert made.answer is not None
    facts, memory = made.answer.report.program, made.answer.report.memory
    assert memory is not None
    rate = on.chip.hbm_bytes_per_second
    assert rate is not None
    floor = (facts.weight_bytes + facts.cache_bytes) / (rate / (on.chip.devices_per_chip or 1))
    return {
        "rows": rows,
        "chunk": options.chunk,
        "fits": made.fits,
        "seconds": made.step_seconds,
        "floor_seconds": floor,
        "attention": facts.attention,
        "weight_bytes": facts.weight_bytes,
        "cache_bytes": facts.cache_bytes,
        "peak_bytes": memory.used_in_bytes,
        "copies": large_copies(parse(made.answer.hlo)),
        "by_resource": made.time_by_resource,
    }


def large_copies(module: Module) -> list[str]:
    """Copies in another order of what has the dims of an argument above :data:`LARGE_BYTES`."""
    arguments = [one.shape for one in module.entry.parameters]
    large = {one.dims for one in arguments if one.bytes_in(0) > LARGE_BYTES}
    return [
        f"{one.name} {one.shape_text}"
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode == "copy" and one.shape.dims in large
    ]


def main() -> None:
    """Prints a JSON line a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("slice")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0)
    options = parser.parse_args()
    job = job_of(options.model, options.tensor, options.layers)
    for rows in options.rows:
        print(
            json.dumps(step(job, slice(options.slice), rows, options)), file=sys.stdout, flush=True
        )


if __name__ == "__main__":
    main()
