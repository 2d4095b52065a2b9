"""Sorts, gathers, scatters, windows and FFTs on CPUs and GPUs, against floors and what two cores took.

The measured seconds are those of the sources in constants.toml.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from systolic.chips import slice
from systolic.forecasting.platforms import CPU_FACTOR, interval
from systolic.hlo import parse
from systolic.sim.roofline import ModuleSource, Peaks, gpu_peaks, roofline
from systolic.sim.timeline import PricedBy, Timeline
from tests.compiles import as_users_do

CPU = Peaks(matmul={"f32": 1e11}, memory=1e10, vector=1e10, is_cpu=True)
H100 = gpu_peaks(slice("h100"))
MILLION = 1 << 20


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def priced(peaks: Peaks, function: Callable, *args: jax.ShapeDtypeStruct) -> Timeline:
    compiled = jax.jit(function).lower(*args).compile(as_users_do())
    text = compiled.as_text()
    assert text is not None
    return roofline(parse(text), peaks, 1, ModuleSource.compiled)


def take(table: jax.Array, indices: jax.Array) -> jax.Array:
    return table[indices]


MEASURED = [
    (jnp.sort, (array(4, 65536),), PricedBy.sort, 0.0876),
    (jnp.sort, (array(16, 131072),), PricedBy.sort, 0.803),
    (jnp.sort, (array(64, 4096),), PricedBy.sort, 0.0644),
    (lambda x: jnp.sort(x, axis=0), (array(65536, 4),), PricedBy.sort, 0.0867),
    (jnp.sort, (array(4, 65536, dtype="int32"),), PricedBy.sort, 0.0081),
    (jnp.argsort, (array(4, 65536),), PricedBy.sort, 0.1265),
    (take, (array(50_000_000), array(MILLION, dtype="int32")), PricedBy.gather, 0.0081),
    (jnp.fft.fft, (array(1024, 1024, dtype="complex64"),), PricedBy.fft, 0.0023),
    (jnp.fft.fft, (array(16, 65536, dtype="complex64"),), PricedBy.fft, 0.0088),
    (lambda x: jnp.cumsum(x, axis=-1), (array(4, 65536),), PricedBy.window, 0.0023),
]


@pytest.mark.parametrize(("function", "args", "by", "seconds"), MEASURED)
def test_a_cpu_takes_what_was_measured(
    function: Callable, args: tuple, by: PricedBy, seconds: float
) -> None:
    made = priced(CPU, function, *args)
    assert seconds / 2.5 < made.seconds < 2.5 * seconds
    assert any(note.startswith("estimated: ") for note in made.notes)
    assert by in {span.priced_by for span, _ in made.leaves()}
    low, high, text = interval(slice("cpu"), made)
    assert low is not None
    assert high is not None
    assert low < seconds < high
    assert "which are estimated between" in text


def test_a_scatter_takes_its_updates() -> None:
    """A million of them into 200 MB, 19 ns each."""

    def add(table: jax.Array, indices: jax.Array) -> jax.Array:
        return table.at[indices].add(1.0)

    args = (array(50_000_000), array(MILLION, dtype="int32"))
    made = priced(CPU, add, *args)
    (span,) = [span for span, _ in made.leaves() if span.priced_by is PricedBy.scatter]
    assert span.low is not None
    assert span.high is not None
    assert span.low < 0.019 * MILLION / 1e6 < span.high
    assert span.seconds == pytest.approx(0.019 * MILLION / 1e6, rel=1)
    # Of a GPU: each update reads and writes a sector.
    made = priced(H100, add, *args)
    (span,) = [span for span, _ in made.leaves() if span.priced_by is PricedBy.scatter]
    assert MILLION * 2 * 32 / H100.memory <= span.seconds < 1.2 * MILLION * 2 * 32 / H100.memory


def test_a_gpu_gathers_sectors() -> None:
    indices = array(MILLION, dtype="int32")
    single = priced(H100, take, array(100_000_000), indices)
    assert single.seconds >= MILLION * 32 / H100.memory
    assert single.by_rule[1] < single.seconds < single.by_rule[2]
    # Rows of whole sectors are a copy, and nothing is said of them.
    rows = priced(H100, take, array(50_000, 4096), array(4096, dtype="int32"))
    assert rows.seconds == pytest.approx(2 * 4096 * 4096 * 4 / H100.memory, rel=0.01)
    assert rows.by_rule == (0.0, 0.0, 0.0)


def test_a_gpu_sorts_by_passes() -> None:
    """Four digits, each read and written, and the keys once before: nine transfers, at least."""
    keys = array(16, 131072)
    made = priced(H100, jnp.sort, keys)
    transfers = 9 * 4 * 16 * 131072 / H100.memory
    seconds, low, high = made.by_rule
    assert low == pytest.approx(transfers)
    assert seconds == pytest.approx(transfers / 0.68)
    assert high >= 4 * seconds
    copied = priced(H100, lambda x: x + 1, keys)
    assert made.seconds > 4 * copied.seconds
    found = interval(slice("h100"), made)
    assert found[:2] == (pytest.approx(low), pytest.approx(high))


def test_others_keep_their_range() -> None:
    made = priced(CPU, lambda x: x + 1, array(1 << 22))
    assert made.by_rule == (0.0, 0.0, 0.0)
    assert not made.notes
    assert interval(slice("cpu"), made)[1] == pytest.approx(CPU_FACTOR * made.seconds)
