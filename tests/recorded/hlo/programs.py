"""Small programs whose compiler output is recorded: ``python -m tests.recorded.hlo.programs [NAME …]``.

Compiles each for its slice with the libtpu that is installed, and leaves NAME.hlo.gz and NAME.json here.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from systolic.aot import Compiled, Compiler
from systolic.aot import compile as compile_program
from systolic.chips import slice
from systolic.core.store import Store
from systolic.forecasting.function import Spread, function_program
from tests.recorded.hlo.record import record


def compiled(
    name: str, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> None:
    """Records one function; the name ends with the slice."""
    on = slice(name.split("-", 1)[1])
    program = function_program(function, args, {}, on, Spread(donate_argnums=donate))
    compiler = Compiler()
    outcome = compile_program(program, on, compiler)
    assert isinstance(outcome, Compiled), outcome
    record(Store("programs", compiler.root).path(outcome.digest), name)


def write_rows(cache: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Eight rows into a cache."""
    return cache.at[rows].set(new)


def scatter() -> None:
    array = jax.ShapeDtypeStruct
    compiled(
        "scatter-v5e-1",
        write_rows,
        array((131072, 4096), jnp.bfloat16),
        array((8,), jnp.int32),
        array((8, 4096), jnp.bfloat16),
        donate=(0,),
    )


PROGRAMS: Mapping[str, Callable[[], None]] = {"scatter": scatter}

if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        PROGRAMS[name]()
