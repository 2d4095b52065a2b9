"""Seconds of ragged paged attention, JAX's kernel for servers, by the shapes of its operands.

How many positions a text has is data, so all pages of its table count as full. A block of queries visits each text that
has a token in it, and computes all its queries for each: a decode step computes as many blocks as there are texts.
"""

from systolic.hlo import Computation, Instruction
from systolic.sim.attention import pace_of
from systolic.sim.calibration import constant
from systolic.sim.rates import Rates, matrix_width, vector_rate

_NAME = "ragged_paged_attention_kernel"
_VECTOR_OPS: float = constant("ragged.vector_ops")


def is_ragged(call: Instruction) -> bool:
    """Whether a call is this kernel."""
    return call.name.startswith(_NAME)


def ragged_seconds(
    computation: Computation, call: Instruction, rates: Rates, grid: list[int]
) -> tuple[float, float, str]:
    """Seconds and FLOPs of a call, and what was assumed.

    Args:
        computation: Of the call.
        call: Operands: lengths, table [texts, pages of a text], ends, two more, queries [tokens, heads, width], pages
            [pages, page_size, 2 x rows, width].
        rates: Of the chip.
        grid: Blocks of heads and of queries.
    """
    shapes = computation.operand_shapes(call)
    texts, pages = shapes[1].dims
    tokens, heads, width = shapes[5].dims
    cache = shapes[6]
    page_bytes = cache.bytes_in(0) / cache.dims[0]
    positions = pages * cache.dims[1]
    blocks = grid[1] if len(grid) > 1 else 1
    visits = max(blocks, texts)
    scores = visits * -(-tokens // blocks) * heads * positions
    filled = -(-width // matrix_width(rates.chip))
    flops = 4.0 * scores * width
    matrix = 4.0 * scores * filled * matrix_width(rates.chip) / rates.peak("bf16")
    vector = scores * (_VECTOR_OPS + 2 * filled) / vector_rate(rates)
    pace = pace_of(rates.chip.name)
    compute = max(matrix, vector) + pace.forward * min(matrix, vector)
    moving = (visits * pages * page_bytes + 2 * shapes[5].bytes_in(0)) / rates.hbm
    seconds = max(compute, moving) + visits * pace.step_seconds
    return (
        seconds,
        flops,
        f"kernel {call.name}: all {pages} pages of each text are taken to be full",
    )
