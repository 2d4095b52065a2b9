"""A server's step over pages, compiled for TPU slices: pages are read by the kernel and written where they lie, and nothing large is copied."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiled, Compiler, PagedProgram, compile
from systolic.formats.matrices import whole
from systolic.hlo import Module, parse
from systolic.job import Job, Layout, ServedCache, WeightFormat

pytest.importorskip("libtpu")

LLAMA_1B: dict[str, Any] = {
    "d_model": 2048,
    "d_ff": 8192,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab": 128_256,
    "tie_embeddings": True,
}
QWEN3_8B: dict[str, Any] = {
    "d_model": 4096,
    "d_ff": 12_288,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 151_936,
    "qk_norm": True,
    "tie_embeddings": False,
}
ROWS, CHUNK, PAGES, PAGE_SIZE, LAYERS = 16, 256, 16, 64, 2
NUM_PAGES = 40_000
"""More than VMEM holds, so that XLA does not compute on pages there."""
LARGE_BYTES = 1 << 20
SLACK_BYTES = 64 << 20
"""Activations of 272 tokens and logits of 17 texts, in all layers together."""


def job_of(sizes: dict[str, Any], tensor: int) -> Job:
    recipe = recipes.find("lm")
    options = {"model": sizes, "sequence": 2048, "path": __file__}
    layout = Layout(data=1, fsdp=1, tensor=tensor)
    return recipe(recipes.typed(recipe, {**options, "layout": layout}))


def kernels_of(module: Module) -> list[str]:
    """Calls of ragged paged attention."""
    return [
        one.name
        for one in module.entry.instructions
        if one.opcode == "custom-call" and "ragged_paged_attention" in one.name
    ]


def large_copies(module: Module) -> list[str]:
    """Copies in another order of what has the dims of a large argument, and any copies of pages."""
    large = {
        one.shape.dims for one in module.entry.parameters if one.shape.bytes_in(0) > LARGE_BYTES
    }
    pages = {dims for dims in large if dims[0] == NUM_PAGES}
    assert pages
    return [
        f"{one.name} {one.shape_text}"
        for computation in module.computations.values()
        for one in computation.instructions
        if (one.opcode == "copy" and one.shape.dims in large)
        or (one.opcode == "copy-done" and one.shape.dims in pages)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "on", "tensor", "cache"),
    [
        (LLAMA_1B, "v6e-1", 1, ServedCache.plain),
        (QWEN3_8B, "v6e-8", 8, ServedCache.plain),
        (LLAMA_1B, "v5e-1", 1, ServedCache.int8),
        (QWEN3_8B, "v6e-1", 1, ServedCache.fp8),
    ],
    ids=["heads of 64", "one key-value head a device", "pages in int8", "pages in fp8"],
)
def test_a_step_copies_neither_pages_nor_weights(
    sizes: dict[str, Any], on: str, tensor: int, cache: ServedCache, tmp_path: Path
) -> None:
    program = PagedProgram(
        job=job_of({**sizes, "layers": LAYERS}, tensor),
        rows=ROWS,
        chunk=CHUNK,
        pages=PAGES,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        cache=cache,
    )
    answer = compile(program, slice(on), Compiler(root=tmp_path).quick())
    assert isinstance(answer, Compiled), answer
    assert not answer.report.program.notes
    module = parse(answer.hlo)
    # One for the texts that read a token and one for the prompt.
    assert len(kernels_of(module)) == 2 * LAYERS
    assert large_copies(module) == []
    held = [one.shape for one in module.entry.parameters]
    # Codes and scales of pages in int8 are two arrays.
    arrays = LAYERS * (1 + (cache is ServedCache.int8))
    assert [one.dims[0] for one in held].count(NUM_PAGES) == arrays
    kept = {number for number, one in enumerate(held) if one.dims[0] == NUM_PAGES}
    assert kept <= set(module.donations.values())
    arguments = sum(one.bytes_in(0) for one in held)
    # What is restored of pages in int8: in two bytes, and with scales in four on the way.
    restored = 6 * (ROWS + 1) * PAGES * PAGE_SIZE * 2 * sizes["kv_heads"] * sizes["head_dim"]
    slack = SLACK_BYTES + (restored if cache is ServedCache.int8 else 0)
    assert arguments < answer.report.memory.used_in_bytes < arguments + slack


@pytest.mark.slow
@pytest.mark.parametrize("cache", [ServedCache.plain, ServedCache.int8])
def test_a_step_that_verifies_proposals_reads_pages_once(
    cache: ServedCache, tmp_path: Path
) -> None:
    """By one call of the kernel a layer for all tokens of a text; pages are written where they lie."""
    program = PagedProgram(
        job=job_of({**LLAMA_1B, "layers": LAYERS}, 1),
        rows=4,
        pages=PAGES,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        cache=cache,
        drafts=4,
    )
    answer = compile(program, slice("v6e-1"), Compiler(root=tmp_path).quick())
    assert isinstance(answer, Compiled), answer
    module = parse(answer.hlo)
    assert len(kernels_of(module)) == LAYERS
    assert large_copies(module) == []
    held = [one.shape for one in module.entry.parameters]
    kept = {number for number, one in enumerate(held) if one.dims[0] == NUM_PAGES}
    assert kept
    assert kept <= set(module.donations.values())
    # Logits after each of the five tokens of four texts.
    assert module.entry.root.shape.parts[0].dims == (20, 128_256)


@pytest.mark.slow
def test_tables_above_the_scalar_memory_are_read_in_parts(tmp_path: Path) -> None:
    """256 texts of 2,048 pages: a table of 2 MiB, which one call of the kernel is refused."""
    sizes = {"layers": 1, "d_model": 256, "d_ff": 256, "heads": 2, "kv_heads": 1, "head_dim": 128}
    program = PagedProgram(
        job=job_of(sizes, 1), rows=256, pages=2048, num_pages=4096, page_size=PAGE_SIZE
    )
    answer = compile(program, slice("v6e-1"), Compiler(root=tmp_path))
    assert isinstance(answer, Compiled), answer
    assert len(kernels_of(parse(answer.hlo))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e-1", "v6e-1"])
def test_matrices_of_four_bits_are_not_restored_in_memory(on: str, tmp_path: Path) -> None:
    """Nor are their scales spread over a matrix, which took four times the bytes of the codes."""
    job = job_of({**LLAMA_1B, "layers": 1}, 1)
    job = replace(job, quantization=whole(job.model, WeightFormat.int4))
    program = PagedProgram(
        job=job, rows=ROWS, pages=PAGES, num_pages=NUM_PAGES, page_size=PAGE_SIZE
    )
    answer = compile(program, slice(on), Compiler(root=tmp_path).quick())
    assert isinstance(answer, Compiled), answer
    matrices = {
        math.prod(one.shape.dims)
        for one in parse(answer.hlo).entry.parameters
        if one.shape.dtype == "s4"
    }
    assert matrices >= {2048 * 2048, 2048 * 8192}
    written = [
        f"{one.name} {one.shape_text}"
        for one in parse(answer.hlo).entry.instructions
        if one.opcode in ("broadcast", "fusion") and math.prod(one.shape.dims) in matrices
    ]
    assert written == []


@pytest.mark.slow
def test_activations_in_int8_are_multiplied_as_int8(tmp_path: Path) -> None:
    """By the matrix unit, s8 times s8 to s32: seven matrices of a layer; the output matrix stays in bf16."""
    job = job_of({**LLAMA_1B, "layers": 1}, 1)
    job = replace(job, quantization=whole(job.model, WeightFormat.w8a8))
    program = PagedProgram(
        job=job, rows=ROWS, pages=PAGES, num_pages=NUM_PAGES, page_size=PAGE_SIZE
    )
    answer = compile(program, slice("v6e-1"), Compiler(root=tmp_path).quick())
    assert isinstance(answer, Compiled), answer
    found = []
    for computation in parse(answer.hlo).computations.values():
        kinds = {one.name: one.shape.dtype for one in computation.instructions}
        found += [
            (*(kinds[name] for name in one.operands), one.shape.dtype)
            for one in computation.instructions
            if one.opcode in ("convolution", "dot")
        ]
    assert found.count(("s8", "s8", "s32")) == 7
    assert len(found) == 8
    # Codes, scales and factors, in one array each.
    sizes = [math.prod(one.shape.dims) for one in parse(answer.hlo).entry.parameters]
    assert sizes.count(8192) >= 3  # the scales of gate and up, the factors of down
