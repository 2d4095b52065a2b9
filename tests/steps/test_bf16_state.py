"""Weights, gradients and moments in bf16: what they take, what they lose, what they learn."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.job import Dtypes, Layout, Optimizer, OptimizerKind, Stored
from systolic.planning.analytic import facts_of
from systolic.steps.state import narrowed, noise, salted, stochastic_round, widened
from tests.steps import tiny
from tests.tiers import some

NARROW = Dtypes(parameters=Stored.bf16, gradients=Stored.bf16, moments=Stored.bf16)


def test_rounding_is_right_on_average_and_never_off_by_more_than_a_step() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=64) * 10.0 ** rng.integers(-6, 6, 64), jnp.float32)
    many = jax.vmap(lambda n: stochastic_round(x, salted(0, n)))(jnp.arange(4096))
    wide = np.asarray(many, np.float64)
    step = np.abs(np.asarray(x, np.float64)) / 128  # the widest gap between neighbours
    assert (np.abs(wide - np.asarray(x)) < step).all()
    assert all(len(np.unique(column)) <= 2 for column in wide.T)
    # The mean of 4096 draws strays by a 64th of half a gap; six times that is beyond chance.
    assert (np.abs(wide.mean(0) - np.asarray(x)) < 6 * step / 2 / 64).all()


def test_noise_is_even_and_its_elements_and_steps_are_apart() -> None:
    drawn = np.asarray(jax.vmap(lambda n: noise((64, 64), salted(0, n)))(jnp.arange(64)))
    assert drawn.min() >= 0
    assert drawn.max() < 2**16
    counts = np.bincount(drawn.reshape(-1) >> 8, minlength=256)  # 1024 each, a deviation of 32
    assert (abs(counts - 1024) < 6 * 32).all()
    centred = (drawn - drawn.mean()) / drawn.std()
    for left, right in (
        (centred[:-1], centred[1:]),
        (centred[:, :-1], centred[:, 1:]),
        (centred[:, :, :-1], centred[:, :, 1:]),
    ):
        assert abs((left * right).mean()) < 6 / left.size**0.5


def test_what_bf16_holds_is_left_alone() -> None:
    kept = jnp.asarray([0.0, -0.0, 1.0, -3.5, 2.0**-120, np.inf, -np.inf, np.nan], jnp.float32)
    for seed in range(20):
        rounded = stochastic_round(kept, salted(1, seed)).astype(jnp.float32)
        np.testing.assert_array_equal(rounded, kept)


def test_a_slow_average_moves() -> None:
    """Of 1 towards 0 with a decay of 0.999: to the nearest, bf16 would stay at 1."""
    first = jnp.ones((256,), jnp.bfloat16)

    def step(index: int, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, nearest = both
        slower = narrowed(0.999 * widened(state), state, salted(0, index))
        # A barrier: the compiler may keep more digits than a cast to bf16 and back asks for.
        return slower, jax.lax.reduce_precision(0.999 * widened(nearest), 8, 7).astype(jnp.bfloat16)

    state, nearest = jax.lax.fori_loop(0, 1000, step, (first, first))
    assert float(widened(nearest).min()) == 1.0
    assert float(widened(state).mean()) == pytest.approx(0.999**1000, rel=0.03)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (Dtypes(), 4 + 8),
        (Dtypes(moments=Stored.bf16), 4 + 4),
        (Dtypes(parameters=Stored.bf16), 2 + 8),
        (NARROW, 2 + 4),
    ],
)
def test_bytes_a_parameter(dtypes: Dtypes, expected: int) -> None:
    """AdamW: a weight and two moments."""
    job = tiny.job(dtypes=dtypes)
    state = tiny.steps(job).abstract_state
    kept = jax.tree.leaves((state.params, state.optimizer))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in kept if leaf.ndim)
    parameters = sum(leaf.size for leaf in state.params.values())
    assert held == expected * parameters
    assert facts_of(job).state_bytes == expected
    assert facts_of(job).update_bytes == 2 * expected + dtypes.gradients.bytes


# LARS scales its rate by the ratio of norms times a thousandth.
RATES = {OptimizerKind.sgd: 0.3, OptimizerKind.lion: 1e-3, OptimizerKind.lars: 10.0}
SMALL = replace(tiny.MODEL, layers=1, heads=2, kv_heads=1)


@pytest.mark.parametrize("kind", some(list(OptimizerKind), [OptimizerKind.adamw]))
def test_every_optimizer_learns_in_bf16(kind: OptimizerKind) -> None:
    optimizer = Optimizer(kind=kind, learning_rate=RATES.get(kind, 1e-2))
    steps = tiny.steps(tiny.job(model=SMALL, optimizer=optimizer, dtypes=NARROW))
    losses, state = tiny.run(steps, 12)
    kinds, wanted = (jax.tree.map(lambda leaf: leaf.dtype, s) for s in (state, steps.shapes))
    assert kinds == wanted
    moments = {str(leaf.dtype) for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim}
    assert moments == {"bfloat16"}
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
def test_it_learns_as_in_float32() -> None:
    exact, _ = tiny.run(tiny.steps(tiny.job(model=SMALL)), 12)
    narrow, _ = tiny.run(tiny.steps(tiny.job(model=SMALL, dtypes=NARROW)), 12)
    assert narrow == pytest.approx(exact, abs=0.02)


def test_passes_are_added_up_in_the_dtype_of_gradients() -> None:
    for stored in (Stored.f32, Stored.bf16):
        split = Layout(fsdp=1, accumulate=4)
        job = tiny.job(model=SMALL, dtypes=Dtypes(gradients=stored), layout=split)
        steps = tiny.steps(job)
        gradients = jax.eval_shape(
            lambda s, b, steps=steps: steps._gradients(s, b, jnp.ones(()))[0],
            steps.abstract_state,
            steps.abstract_batch(),
        )
        assert {str(g.dtype) for g in gradients.values()} == {stored.dtype}


@pytest.mark.slow
def test_passes_added_up_in_bf16_learn_as_one() -> None:
    once, _ = tiny.run(tiny.steps(tiny.job(model=SMALL)), 3)
    split = Layout(fsdp=1, accumulate=4)
    job = tiny.job(model=SMALL, dtypes=Dtypes(gradients=Stored.bf16), layout=split)
    assert tiny.run(tiny.steps(job), 3)[0] == pytest.approx(once, rel=2e-3)
