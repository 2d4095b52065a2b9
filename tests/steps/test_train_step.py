"""The train step: accumulation, the guard, averages, precision."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from systolic.job import (
    Guard,
    GuardRule,
    Job,
    Layout,
    Optimizer,
    OptimizerKind,
    Remat,
    Schedule,
    ScheduleKind,
)
from systolic.runs.tree import flatten
from systolic.steps.programs import jit_train
from systolic.steps.step_functions import build, schedule
from systolic.steps.target import optimizer_specs
from tests.steps import tiny
from tests.tiers import some


def test_accumulation_is_the_whole_batch_in_parts_and_an_average_follows_the_weights() -> None:
    """With rematerialised layers and a loss in chunks, which change no number either."""
    whole, last = tiny.run(tiny.steps(tiny.job(layout=Layout(fsdp=1))))
    averaged = Optimizer(learning_rate=1e-2, ema=0.5)
    layout = Layout(fsdp=1, accumulate=4, loss_chunks=4, remat=Remat.save_names)
    one = tiny.steps(tiny.job(layout=layout, optimizer=averaged))
    parts, state = tiny.run(one)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert last.ema is None
    # The mean's weight of the newest is 9 in 10, 9 in 11 and 9 in 12 at first, and no less than 0.5.
    expected = np.asarray(tiny.trainer(one).first.params["embedding"], np.float64)
    for count in range(3):
        decay = min(0.5, (1 + count) / (10 + count))
        newest = tiny.run(one, count + 1)[1].params["embedding"]
        expected = expected * decay + np.asarray(newest, np.float64) * (1 - decay)
    np.testing.assert_allclose(state.ema["embedding"], expected, atol=1e-6)


@pytest.mark.parametrize("remat", some(list(Remat), []))
def test_rematerialisation_changes_no_number(remat: Remat) -> None:
    plain, _ = tiny.run(tiny.steps(tiny.job(layout=Layout(fsdp=1))), 2)
    again, _ = tiny.run(tiny.steps(tiny.job(layout=Layout(fsdp=1, remat=remat))), 2)
    assert again == pytest.approx(plain, rel=1e-5)


OFTEN = (OptimizerKind.adamw, OptimizerKind.muon)
"""What treats matrices in a way of its own."""


@pytest.mark.parametrize("kind", some(list(OptimizerKind), OFTEN))
def test_another_rate_is_the_same_program(kind: OptimizerKind) -> None:
    """So that trials of a search share its compile; checkpoints hold no rates, and a job resumes with its own."""

    def made(rate: float, decay: float) -> Any:
        adam = 3 * rate * rate if kind is OptimizerKind.muon else None
        value = Optimizer(
            kind=kind, learning_rate=rate, weight_decay=decay, adam_learning_rate=adam
        )
        shape = Schedule(kind=ScheduleKind.wsd, warmup=3)
        model = replace(tiny.MODEL, layers=1)
        return tiny.steps(
            tiny.job(model=model, optimizer=value, schedule=shape, layout=tiny.ONE_DEVICE)
        )

    def text(of: Any) -> str:
        return str(jit_train(of).trace(of.abstract_state, of.abstract_batch()).jaxpr)

    one, other = made(1e-2, 0.1), made(3e-4, 0.02)
    assert text(one) == text(other)
    kept = one.saved(one.abstract_state)
    assert not [path for path in flatten(kept) if "rates" in path]
    rates = other.with_rates(kept).rates
    found = [float(rates.learning_rate), float(rates.weight_decay), float(rates.adam_share)]
    muons = 3 * 3e-4 if kind is OptimizerKind.muon else 1
    assert found == pytest.approx([3e-4, 0.02, muons])
    second = optax.ScaleByScheduleState(jnp.asarray(1))
    state = replace(other.with_rates(kept), optimizer=second)
    assert float(other.learning_rate(state)) == pytest.approx(2e-4)


@pytest.mark.parametrize("kind", some(list(OptimizerKind), (*OFTEN, OptimizerKind.adafactor)))
def test_every_optimizer_finds_a_minimum_and_decays_matrices_only(kind: OptimizerKind) -> None:
    # LARS takes a thousandth of a matrix's norm, so its usual rates are above 1.
    rate = {OptimizerKind.lamb: 0.01, OptimizerKind.lars: 3.0}.get(kind, 0.05)
    value = Optimizer(kind=kind, learning_rate=rate, weight_decay=0.0)
    axes = {"matrix": ("embed", "mlp"), "stacked": ("layers", "embed", "mlp"), "bias": ("mlp",)}
    params = {
        "matrix": jnp.full((8, 16), 0.5),
        "stacked": jnp.full((2, 8, 16), 0.5),
        "bias": jnp.full((16,), 0.5),
    }
    aim = {name: np.random.default_rng(p.size).normal(size=p.shape) for name, p in params.items()}

    def loss(params):
        return sum(jnp.mean((params[name] - aim[name]) ** 2) for name in params)

    def train(value: Optimizer, params, gradient):
        optimizer = build(value, lambda step: jnp.asarray(rate), axes)

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(gradient(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        @jax.jit
        def steps(params):
            return jax.lax.scan(step, (params, optimizer.init(params)), length=60)[0][0]

        return steps(params)

    assert loss(train(value, params, jax.grad(loss))) < 0.7 * loss(params)
    still = train(
        replace(value, weight_decay=0.1), params, lambda p: jax.tree.map(lambda a: a * 1e-30, p)
    )
    decayed = {name: not np.allclose(still[name], params[name], atol=1e-3) for name in params}
    if kind not in (
        OptimizerKind.lamb,
        OptimizerKind.lars,
        OptimizerKind.lion,
    ):  # these move by sign or by norm alone
        assert decayed["matrix"]
        assert decayed["stacked"]
        assert not decayed["bias"] or kind in (OptimizerKind.adafactor,)


def test_decay_is_apart_from_the_gradient_or_part_of_it() -> None:
    """A first step without a gradient: the momentum of sgd has its decay, too."""
    params = {"matrix": jnp.asarray([[1.0, -2.0], [3.0, 4.0]])}
    zeros, rate, decay, b1 = {"matrix": jnp.zeros((2, 2))}, 0.1, 0.01, 0.9

    def first(kind: OptimizerKind) -> Any:
        value = Optimizer(kind=kind, learning_rate=rate, weight_decay=decay, b1=b1)
        optimizer = build(value, lambda step: jnp.asarray(rate), {"matrix": ("embed", "mlp")})
        return optimizer.update(zeros, optimizer.init(params), params)[0]["matrix"]

    apart = -rate * decay * params["matrix"]
    for kind in (OptimizerKind.adamw, OptimizerKind.lion, OptimizerKind.muon):
        np.testing.assert_allclose(first(kind), apart, rtol=1e-6)
    np.testing.assert_allclose(first(OptimizerKind.sgd), (1 + b1) * apart, rtol=1e-6)


def test_layers_are_scaled_to_their_norms_by_hand() -> None:
    """LAMB and LARS: of each layer's own matrix, whatever stacks it, and of no vector."""
    rng = np.random.default_rng(0)
    axes = {"blocks": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")}
    shapes = {"blocks": (2, 3, 4), "bias": (2, 4)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params["blocks"][1] *= 10.0
    slopes = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    rate, decay = 0.5, 0.1

    def first(kind: OptimizerKind):
        value = Optimizer(kind=kind, learning_rate=rate, weight_decay=decay)
        optimizer = build(value, lambda step: jnp.asarray(rate), axes)
        return optimizer.update(slopes, optimizer.init(params), params)[0]

    lamb, lars = first(OptimizerKind.lamb), first(OptimizerKind.lars)
    for layer in range(2):
        weights, slope = params["blocks"][layer], slopes["blocks"][layer]
        # The first step of Adam is the sign of the gradient.
        for found, step, share in (
            (lamb, slope / (np.abs(slope) + 1e-6) + decay * weights, 1.0),
            (lars, slope + decay * weights, 0.001),
        ):
            trust = share * np.linalg.norm(weights) / np.linalg.norm(step)
            np.testing.assert_allclose(found["blocks"][layer], -rate * trust * step, rtol=1e-3)
    np.testing.assert_allclose(lamb["bias"], -rate * np.sign(slopes["bias"]), rtol=1e-3)
    np.testing.assert_allclose(lars["bias"], -rate * slopes["bias"], rtol=1e-4)


def guarded(rule: GuardRule, kind: OptimizerKind = OptimizerKind.adamw) -> Job:
    return tiny.job(
        layout=Layout(fsdp=1),
        guard=Guard(rule=rule),
        schedule=Schedule(warmup=4),
        optimizer=Optimizer(kind=kind, learning_rate=0.4, weight_decay=0.0, clip=0.0),
    )


@pytest.mark.parametrize("rule", [GuardRule.stop, GuardRule.skip])
def test_a_bad_step_changes_no_weight(rule: GuardRule) -> None:
    one = tiny.steps(guarded(rule))
    train, state = tiny.trainer(one).train, tiny.trainer(one).first
    good = tiny.batch(one, 0)
    poisoned = replace(
        state, params={**state.params, "norm/scale": state.params["norm/scale"] * np.nan}
    )
    after, metrics = train(poisoned, good)
    assert metrics["bad"] == 1
    assert int(after.step) == 1
    np.testing.assert_array_equal(after.params["embedding"], state.params["embedding"])
    again, metrics = train(replace(after, params=state.params), good)
    changed = not np.array_equal(again.params["embedding"], state.params["embedding"])
    assert changed is (rule is GuardRule.skip)  # stop freezes the state until the host has seen it
    assert int(again.guard.total) == (1 if rule is GuardRule.skip else 2)


@pytest.mark.parametrize(
    "kind",
    some([OptimizerKind.adamw, OptimizerKind.sgd, OptimizerKind.muon], [OptimizerKind.adamw]),
)
def test_the_learning_rate_on_record_is_the_one_of_the_update(kind: OptimizerKind) -> None:
    """A dropped step takes no step of the schedule: the next update has the rate that it would have had."""
    one = tiny.steps(guarded(GuardRule.skip, kind))
    train, state = tiny.trainer(one).train, tiny.trainer(one).first
    spoiled = replace(state, params={n: np.full_like(p, np.nan) for n, p in state.params.items()})
    dropped, metrics = train(spoiled, tiny.batch(one, 0))
    assert (float(metrics["bad"]), float(metrics["learning_rate"])) == (1, pytest.approx(0.1))
    kept = replace(dropped, params=state.params)
    after, metrics = train(kept, tiny.batch(one, 0))
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
    _, metrics = train(after, tiny.batch(one, 1))
    assert float(metrics["learning_rate"]) == pytest.approx(0.2)


def test_float16_overflow_halves_the_scale_and_is_not_bad() -> None:
    one = tiny.steps(tiny.job(layout=Layout(fsdp=1)), dtype="float16")
    train, state = tiny.trainer(one).train, tiny.trainer(one).first
    huge = replace(state, scale=replace(state.scale, scale=jnp.asarray(2.0**40)))
    after, metrics = train(huge, tiny.batch(one, 0))
    assert metrics["bad"] == 0
    assert float(after.scale.scale) == 2.0**39
    np.testing.assert_array_equal(after.params["embedding"], state.params["embedding"])
    _, metrics = train(state, tiny.batch(one, 0))
    assert np.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize("dtype", some(["bfloat16", "float16"], ["float16"]))
def test_low_precision_stays_near_float32(dtype: str) -> None:
    exact, _ = tiny.run(tiny.steps(tiny.job(layout=Layout(fsdp=1))))
    rounded, state = tiny.run(tiny.steps(tiny.job(layout=Layout(fsdp=1)), dtype=dtype))
    assert rounded == pytest.approx(exact, rel=0.02)
    assert state.params["embedding"].dtype == jnp.float32


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_schedules_rise_to_the_peak_and_end_where_they_say(kind: ScheduleKind) -> None:
    rate = schedule(Schedule(kind=kind, warmup=10, final=0.1), 100, 1.0)
    values = [float(rate(step)) for step in range(100)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == pytest.approx(1.0)
    end = 1.0 if kind is ScheduleKind.constant else 0.1
    assert values[-1] == pytest.approx(end, abs=0.05)
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(values[:11]))
    if kind is ScheduleKind.wsd:
        assert values[79] == pytest.approx(1.0)


def test_factored_moments_keep_the_partition_of_the_dims_they_have() -> None:
    from jax.sharding import PartitionSpec as P

    shapes = {"w": (8, 256, 512)}
    state = {
        "v_row": {"w": np.zeros((8, 256))},
        "v_col": {"w": np.zeros((8, 512))},
        "count": np.zeros(()),
    }
    specs = optimizer_specs(state, shapes, {"w": P("pipeline", "fsdp", "tensor")})
    assert specs["v_row"]["w"] == P("pipeline", "fsdp")
    assert specs["v_col"]["w"] == P("pipeline", "tensor")
    assert specs["count"] == P()
