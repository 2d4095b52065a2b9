"""Functions with loops, linear algebra and callbacks, recorded by ``python -m tests.recorded.loops.programs``."""

import gzip
import json
import lzma
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from systolic.chips import slice
from systolic.compiling import Compiled, Compiler
from systolic.compiling import compile as compile_program
from systolic.core.files import Store
from systolic.forecasting.function import Spread, function_program
from tests.recorded.hlo.record import clean
from tests.recorded.loops import FILE, texts

SIDE = 256
MATRIX = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
ROWS = 37
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {}
"""Name to function, arguments, and whether it is traced with 64-bit types."""


def record(*arguments: Any, x64: bool | None = False) -> Callable[[Callable[..., Any]], None]:
    """Adds a program; with None once for each width, the wide one's name ending in ``64``."""

    def add(function: Callable[..., Any]) -> None:
        for wide in (False, True) if x64 is None else (x64,):
            name = f"{function.__name__}{'64' if wide else ''}"
            PROGRAMS[name] = (function, arguments or (MATRIX,), wide)

    return add


def turn(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x)


def counts(start: Any, end: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.fori_loop(start, end, lambda i, c: turn(c) + i.astype(jnp.float32), x)


for dtype, ends in {"u32": (3, 45), "i16": (-5, 45), "i8": (-5, 45), "u8": (5, 245)}.items():
    kind = jnp.dtype({"u": "uint", "i": "int"}[dtype[0]] + dtype[1:]).type
    PROGRAMS[f"fori_{dtype}"] = (counts(kind(ends[0]), kind(ends[1])), (MATRIX,), False)
PROGRAMS["fori_s64"] = (counts(3, 45), (MATRIX,), True)


@record(x64=True)
def fori_u64_(x):
    return counts(jnp.uint64(3), jnp.uint64(45))(x)


@record(x64=None)
def scan(x):
    return lax.scan(lambda c, _: (turn(c), c.sum()), x, None, length=100)


@record(x64=None)
def scan_long(x):
    return lax.scan(lambda c, _: (turn(c), None), x, None, length=1_000_000)[0]


@record(x64=None)
def scan_reversed(x):
    rows = jnp.zeros((ROWS, SIDE, SIDE), jnp.float32) + x
    return lax.scan(lambda c, a: (turn(c + a), c.sum()), x, rows, reverse=True)


@record(x64=None)
def scan_gradient(x):
    step = jax.checkpoint(lambda c, _: (turn(turn(c)), None))
    return jax.grad(lambda x: lax.scan(step, x, None, length=41)[0].sum())(x)


@record()
def scan_unrolled(x):
    return lax.scan(lambda c, _: (turn(c), None), x, None, length=50, unroll=8)


@record()
def fori_unrolled(x):
    return lax.fori_loop(0, 100, lambda i, c: turn(c) + i, x, unroll=7)


@record(x64=None)
def down(x):
    return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 3, turn(s[1])), (100, x))


@record(x64=None)
def below_zero(x):
    return lax.while_loop(lambda s: s[1] >= -60, lambda s: (turn(s[0]), s[1] - 5), (x, 0))


@record(x64=None)
def unequal(x):
    return lax.while_loop(lambda s: s[1] != 60, lambda s: (turn(s[0]), s[1] + 5), (x, 0))


@record()
def swapped(x):
    return lax.while_loop(lambda s: s[1] >= 10, lambda s: (turn(s[0]), s[1] - 5), (x, 100))


@record(x64=None)
def doubled(x):
    return lax.while_loop(lambda s: s[1] < 1000, lambda s: (turn(s[0]), s[1] * 2), (x, 1))


@record()
def halved(x):
    return lax.while_loop(lambda s: s[1] > 0, lambda s: (turn(s[0]), s[1] >> 1), (x, 1024))


@record()
def of_floats(x):
    return lax.while_loop(lambda s: s[1] < 1.0, lambda s: (turn(s[0]), s[1] + 0.125), (x, 0.0))


@record(x64=None)
def bound_carried(x):
    def body(s):
        return turn(s[0]), s[1] + 2, s[2]

    return lax.while_loop(lambda s: s[1] < s[2], body, (x, 0, 77))


@record(x64=None)
def both_move(x):
    def body(s):
        return turn(s[0]), s[1] + 2, s[2] - 1

    return lax.while_loop(lambda s: s[1] < s[2], body, (x, 0, 77))


@record()
def by_a_flag(x):
    def body(s):
        return turn(s[0]), s[1] + 1, s[1] < 50

    return lax.while_loop(lambda s: s[2], body, (x, 0, True))


@record(x64=None)
def nested(x):
    def inner(c, _):
        return turn(c), None

    def outer(i, c):
        return lax.scan(inner, c, None, length=11)[0] + i.astype(jnp.float32)

    return lax.fori_loop(0, 7, outer, x)


@record(x64=None)
def nested_carried(x):
    def outer(s):
        i, n, c = s
        c = lax.while_loop(lambda t: t[0] < n, lambda t: (t[0] + 1, turn(t[1])), (0, c))[1]
        return i + 1, n, c

    return lax.while_loop(lambda s: s[0] < 9, outer, (0, 13, x))


@record(x64=None)
def triangle(x):
    def outer(i, c):
        return lax.fori_loop(i, 20, lambda j, d: turn(d), c)

    return lax.fori_loop(0, 20, outer, x)


@record()
def pyramid(x):
    def middle(j, c):
        return lax.fori_loop(0, j, lambda k, d: turn(d), c)

    return lax.fori_loop(0, 8, lambda i, c: lax.fori_loop(0, i, middle, c), x)


@record(MATRIX, NUMBER, x64=None)
def in_branches(x, p):
    def so_often(n):
        return lambda x: lax.fori_loop(0, n, lambda i, c: turn(c), x)

    return lax.cond(p > 0, so_often(31), so_often(5), x)


@record(x64=None)
def map_batches(x):
    return lax.map(lambda r: jnp.outer(r, r) @ x, x, batch_size=24)


@record()
def associative(x):
    return lax.associative_scan(jnp.matmul, jnp.zeros((8, SIDE, SIDE)) + x)


@record(MATRIX, NUMBER, x64=None)
def traced(x, n):
    return lax.fori_loop(0, n, lambda i, c: turn(c), x)


@record(MATRIX, NUMBER)
def traced_clipped(x, n):
    return lax.fori_loop(0, jnp.clip(n, 0, 64), lambda i, c: turn(c), x)


@record(MATRIX, NUMBER, x64=None)
def clipped(x, n):
    return lax.fori_loop(0, jnp.clip(n.astype(int), 10, 64), lambda i, c: turn(c), x)


@record(MATRIX, NUMBER, x64=None)
def at_most(x, n):
    return lax.fori_loop(0, jnp.minimum(n.astype(int), 50), lambda i, c: turn(c), x)


@record(MATRIX, NUMBER, x64=None)
def from_at_least(x, n):
    return lax.fori_loop(jnp.maximum(n.astype(int), 3), 64, lambda i, c: turn(c), x)


@record(MATRIX, NUMBER, x64=None)
def down_from(x, n):
    start = jnp.clip(n.astype(int), 3, 60)
    return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, turn(s[1])), (start, x))


@record(x64=None)
def half_as_often(x):
    def outer(t, c):
        return lax.fori_loop(0, t // 2, lambda i, d: turn(d), c)

    return lax.fori_loop(0, 20, outer, x)


@record(x64=None)
def tenths(x):
    tenth, zero = jnp.asarray(0.1, float), jnp.zeros((), float)
    return lax.while_loop(lambda s: s[1] < 1.0, lambda s: (turn(s[0]), s[1] + tenth), (x, zero))


@record()
def of_bf16(x):
    half = jnp.bfloat16(0.5)
    return lax.while_loop(lambda s: s[1] < 8, lambda s: (turn(s[0]), s[1] + half), (x, half))


@record(x64=None)
def in_an_array(x):
    zero = jnp.zeros((1,), int)
    return lax.while_loop(lambda s: (s[1] < 30)[0], lambda s: (turn(s[0]), s[1] + 1), (x, zero))


@record(x64=None)
def in_an_element(x):
    def body(s):
        return turn(s[0]), s[1].at[1].add(2)

    return lax.while_loop(lambda s: s[1][1] < 30, body, (x, jnp.zeros((3,), int)))


@record()
def in_the_first_element(x):
    start = jnp.array([1000, 3], jnp.bfloat16)
    return lax.while_loop(lambda s: s[1][0] > 1, lambda s: (turn(s[0]), s[1] / 2), (x, start))


@record()
def in_elements_by_turns(x):
    def body(s):
        return turn(s[0]), s[1].at[s[2] % 3].add(s[2]), s[2] + 1

    return lax.while_loop(lambda s: s[1][2] < 30, body, (x, jnp.zeros((3,), int), 0))


@record()
def trips_of_a_table(x):
    def step(c, n):
        return lax.fori_loop(0, n, lambda j, d: turn(d), c), None

    return lax.scan(step, x, jnp.array([5, 1, 7, 2]))[0]


@record(x64=None)
def of_several(x):
    by = jnp.array([1, 2, 3])
    return lax.while_loop(
        lambda s: jnp.any(s[1] < 30), lambda s: (turn(s[0]), s[1] + by), (x, 0 * by)
    )


@record()
def until_large(x):
    return lax.while_loop(lambda c: c.sum() < 100.0, turn, x)


@record()
def until_large_or_50(x):
    def goes_on(s):
        return (s[1] < 50) & (s[0].sum() < 1e6)

    return lax.while_loop(goes_on, lambda s: (turn(s[0]), s[1] + 1), (x, 0))


@record()
def each_hundredth(x):
    def step(i, c):
        return lax.cond(i % 100 == 0, lambda c: turn(turn(turn(turn(c)))), lambda c: c * 2, c)

    return lax.fori_loop(0, 1000, step, x)


@record()
def one_of_three(x):
    def step(i, c):
        return lax.switch(i % 3, [turn, lambda c: turn(turn(turn(c))), lambda c: c], c)

    return lax.fori_loop(0, 31, step, x)


@record()
def first_half(x):
    def step(i, c):
        return lax.cond(i < 15, lambda c: turn(turn(turn(turn(c)))), lambda c: c, c)

    return lax.fori_loop(0, 30, step, x)


@record(MATRIX, jax.ShapeDtypeStruct((), jnp.bool_))
def on_data(x, p):
    return lax.cond(p, lambda c: turn(turn(turn(turn(c)))), lambda c: c, x)


@record(MATRIX, jax.ShapeDtypeStruct((), jnp.bool_))
def early_on_data(x, p):
    def step(i, c):
        return lax.cond(p & (i < 15), lambda c: turn(turn(turn(turn(c)))), lambda c: c, c)

    return lax.fori_loop(0, 30, step, x)


@record()
def loops_on_a_line(x):
    # Both loops begin on one line of the source.
    return lax.while_loop(lambda c: c.sum() < 1e6, lambda c: lax.while_loop(lambda d: d.sum() < 1e3, turn, c + 1), x)  # fmt: skip


@record(jax.ShapeDtypeStruct((4096, 128), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32))
def slice_by_slice(x, starts):
    return jax.vmap(lambda start: lax.dynamic_slice(x, (start, 0), (16, 128)))(starts)


ON_CPU: dict[str, Callable[..., Any]] = {}
"""Programs that are compiled for the CPU, whose compiler counts some of their trips wrongly."""


def on_cpu(function: Callable[..., Any]) -> None:
    """Adds one."""
    ON_CPU[function.__name__] = function


@on_cpu
def cpu_down_u32(x):
    goes_on, step = lambda s: s[0] > 0, lambda s: (s[0] - 1, turn(s[1]))
    return lax.while_loop(goes_on, step, (jnp.uint32(37), x))


@on_cpu
def cpu_wraps_i8(x):
    goes_on, step = lambda s: s[0] >= 0, lambda s: (s[0] + jnp.int8(1), turn(s[1]))
    return lax.while_loop(goes_on, step, (jnp.int8(0), x))


for function in ("svd", "eigh", "qr", "cholesky"):
    PROGRAMS[function] = (getattr(jnp.linalg, function), (MATRIX,), False)


@record()
def triangular(x):
    return jax.scipy.linalg.solve_triangular(x, x, lower=True)


@record()
def pure(x):
    return jax.pure_callback(lambda a: a, x, x)


@record()
def ordered(x):
    from jax.experimental import io_callback

    return io_callback(lambda a: a, MATRIX, x, ordered=True)


@record()
def prints(x):
    jax.debug.print("{}", x.sum())
    return turn(x)


@record(NUMBER, MATRIX)
def kernel(n, x):
    """A Pallas kernel that loops as often as an argument says."""
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    def body(n_ref, x_ref, o_ref):
        def more(_, total):
            return total + jnp.dot(x_ref[...], x_ref[...], preferred_element_type=jnp.float32)

        o_ref[...] = lax.fori_loop(0, n_ref[0], more, jnp.zeros_like(o_ref))

    return pallas.pallas_call(
        body,
        name="looped",
        out_shape=jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32),
        in_specs=[
            pallas.BlockSpec(memory_space=tpu.SMEM),
            pallas.BlockSpec(memory_space=tpu.VMEM),
        ],
        out_specs=pallas.BlockSpec(memory_space=tpu.VMEM),
    )(n.reshape(1), x)


def main(only: Sequence[str]) -> None:
    """Compiles all programs, or those of these names while the others stay."""
    found = dict(texts()) if only else {}
    on, compiler = slice("v5e-1"), Compiler()
    for name, (function, arguments, wide) in PROGRAMS.items():
        if only and name not in only:
            continue
        jax.config.update("jax_enable_x64", wide)
        program = function_program(function, arguments, {}, on, Spread())
        outcome = compile_program(program, on, compiler)
        assert isinstance(outcome, Compiled), (name, outcome)
        entry = Store("programs", compiler.root).path(outcome.digest)
        found[name] = clean(gzip.decompress((entry / "module.hlo.gz").read_bytes()).decode())
    jax.config.update("jax_enable_x64", False)
    for name, function in ON_CPU.items():
        if not only or name in only:
            found[name] = clean(jax.jit(function).lower(MATRIX).compile().as_text())
    text = json.dumps(found, indent=0)
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(sys.argv[1:])
