"""Programs and steps of profiles that XLA's profiler records here: several shapes of one function, several programs a step."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from systolic.profile import Profile, open_profile
from systolic.profile.table import ProfileTable

STEPS, PARTS = 6, 4


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profile]:
    """Steps of four calls of a function with one shape, one with another, and one of an update."""
    accumulate = jax.jit(lambda g, w: g + 1e-6 * (w @ w))
    update = jax.jit(lambda w, g: w - 1e-3 * g)
    wide, narrow = jnp.ones((384, 384)), jnp.ones((128, 128))
    folder = tmp_path_factory.mktemp("profile")

    def step(w: jax.Array) -> jax.Array:
        g = w
        for _ in range(PARTS):
            g = accumulate(g, w)
        accumulate(narrow, narrow)
        return update(w, g).block_until_ready()

    step(wide)
    with jax.profiler.trace(folder):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                wide = step(wide)
    return open_profile(folder)


def test_shapes_of_one_function_are_programs_of_their_own(accumulated: Profile) -> None:
    table = ProfileTable(accumulated)
    runs = {row.name: row.runs for row in table.programs}
    both = sorted(name for name in runs if "lambda" in name and " (" in name)
    assert len(both) >= 2
    assert sorted(runs.values()) == [STEPS, STEPS, STEPS * PARTS]
    wide = max(table.programs, key=lambda row: row.seconds)
    assert wide.runs == STEPS * PARTS
    flops = {row.program: row.op.flops for row in table.ops if "dot" in row.op.raw.name}
    assert set(flops.values()) <= {0.0, 2 * 384.0**3, 2 * 128.0**3}


def test_a_step_is_an_annotation_that_holds_several_runs(accumulated: Profile) -> None:
    assert len(accumulated.steps) == STEPS
    table = ProfileTable(accumulated)
    of_runs = sum(row.seconds for row in table.programs)
    assert of_runs <= sum(end - start for start, end in accumulated.steps)
    median = sorted(end - start for start, end in accumulated.steps)[STEPS // 2]
    assert median >= PARTS * max(table.programs, key=lambda row: row.seconds).median * 0.5
