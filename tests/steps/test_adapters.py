"""Adapters beside frozen weights: what trains, what does not, and that no full gradient is computed."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.formats.matrices import matrices_of_model, whole
from systolic.job import Adapter, AdapterKind, Job, Layout, Remat, WeightFormat
from systolic.models.adapters import NF4, merged
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.quantized.codes import quantized
from systolic.steps import jaxpr
from systolic.steps.step_functions import StepFunctions
from tests.steps import tiny
from tests.steps.layouts_child import LATENT

LORA = Adapter(kind=AdapterKind.lora, rank=4, alpha=8)
QLORA = replace(LORA, kind=AdapterKind.qlora)
ONE = Layout(fsdp=1)


def adapted(adapter: Adapter = LORA, model: Decoder = tiny.MODEL, layout: Layout = ONE) -> Job:
    return tiny.job(model=model, adapter=adapter, layout=layout)


@cache
def steps_of(job: Job) -> StepFunctions:
    """The same ones each time, so that their functions are traced once."""
    return tiny.steps(job)


def base_of(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path.removesuffix("/base"): value for path, value in state.items()}


@pytest.mark.parametrize(
    ("model", "ulps"),
    [(tiny.MODEL, 0), pytest.param(LATENT, 1, marks=pytest.mark.slow)],
    ids=["dense", "latent mixture"],
)
def test_training_begins_with_the_model_as_it_was_and_merges_into_its_matrices(
    model: Decoder, ulps: int
) -> None:
    """To the bit; where XLA fuses the sums of two programs differently, to the last one."""
    plain, steps = steps_of(tiny.job(model=model, layout=ONE)), steps_of(adapted(model=model))
    state = tiny.trainer(steps).first
    batch = tiny.batch(steps, 0)
    weights = base_of(state.model_state)
    assert set(plain.network.params) <= set(weights)
    own = {path: weights[path] for path in plain.network.params}
    rest = {path: weights[path] for path in plain.network.model_state}
    of_plain, of_adapted = jax.jit(plain.predict), jax.jit(steps.predict)
    expected = of_plain(own, rest, batch)
    found = of_adapted(state.params, state.model_state, batch)
    np.testing.assert_array_max_ulp(np.asarray(found["nats"]), np.asarray(expected["nats"]), ulps)
    if ulps:
        return
    _, state = tiny.run(steps, 4)
    whole = merged(state.params, state.model_state, LORA)
    assert {path: w.shape for path, w in whole.items()} == {
        path: shape.shape for path, shape in plain.network.params.items()
    }
    found = of_plain(whole, {}, batch)["nats"]
    learned = np.asarray(of_adapted(state.params, state.model_state, batch)["nats"])
    np.testing.assert_allclose(found, learned, rtol=1e-5)
    assert np.abs(learned - np.asarray(expected["nats"])).max() > 0.1


def test_gradient_of_b_is_that_of_the_matrix_seen_through_a() -> None:
    """With B zero, dL/dB = scale A' dL/dW and dL/dA = 0 (x A B by the chain rule)."""
    plain, steps = steps_of(tiny.job(layout=ONE)), steps_of(adapted())
    state = tiny.trainer(steps).first
    batch = tiny.batch(steps, 0)

    def loss(of, params, rest):
        return of.sums(params, rest, batch, train=True)[0]["loss"].total

    weights = base_of(state.model_state)
    whole = jax.jit(jax.grad(lambda p: loss(plain, p, {})))(weights)
    small = jax.jit(jax.grad(lambda p: loss(steps, p, state.model_state)))(state.params)
    names = {path.rpartition("/")[0] for path in state.params}
    assert len(names) == 7
    for name in names:
        a = state.params[f"{name}/lora_a"]
        rank, inputs = a.shape[-1], a.ndim - 1
        flat = whole[name].reshape(a.shape[0], np.prod(a.shape[1:inputs]), -1)
        expected = LORA.scale * jnp.einsum("lir,lio->lro", a.reshape(len(a), -1, rank), flat)
        found = small[f"{name}/lora_b"].reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
        assert not np.any(small[f"{name}/lora_a"])


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [LORA, QLORA], ids=["lora", "qlora"])
def test_only_adapters_train(adapter: Adapter) -> None:
    steps = tiny.steps(adapted(adapter))
    losses, after = tiny.run(steps, 2)
    before = jax.jit(steps.init)(jax.random.key(0))
    parts = Layout(fsdp=1, accumulate=4, remat=Remat.full)
    assert losses == pytest.approx(
        tiny.run(tiny.steps(adapted(adapter, layout=parts)), 2)[0], rel=1e-5
    )
    for path, value in before.model_state.items():
        np.testing.assert_array_equal(after.model_state[path], value, err_msg=path)
    for path, value in before.params.items():
        assert np.any(np.asarray(after.params[path]) != np.asarray(value)), path
    moments = after.optimizer[0].mu
    assert set(moments) == set(steps.network.params)


def test_four_bits_restore_as_the_library_does() -> None:
    from qwix._src.core import qarray

    value = jax.random.normal(jax.random.key(0), (3, 128, 16))
    made = quantized(value, (1,), NF4, value.dtype)
    assert made.codes.dtype == jnp.uint4
    assert made.scales.shape == (3, 2, 16)
    expected = qarray.dequantize(qarray.QArray(made.codes, made.scales, qtype="nf4"))
    np.testing.assert_array_equal(made.restored(), expected)
    # The widest gap between two codes is 0.30 of the largest magnitude of a block.
    error = np.abs(made.restored() - value).reshape(3, 2, 64, 16)
    most = np.abs(value).reshape(3, 2, 64, 16).max(axis=2, keepdims=True)
    assert np.all(error <= 0.1520 * most)


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp8", "w8a8"])
def test_beside_quantized_matrices_the_model_is_that_of_the_restored_ones_merged(kind: str) -> None:
    plain = steps_of(tiny.job(layout=ONE))
    formats = whole(tiny.MODEL, WeightFormat(kind))
    steps = steps_of(replace(adapted(), quantization=formats))
    rng, known = np.random.default_rng(0), matrices_of_model(tiny.MODEL)
    floats = {p: 0.2 * rng.normal(size=a.shape) for p, a in plain.network.params.items()}
    frozen = {path: jnp.asarray(array, jnp.float32) for path, array in floats.items()}
    held = dict(frozen)
    for path, how in formats.by_path().items():
        codes = quantized(held.pop(path), known[path].inputs, how)
        frozen[path] = codes.restored(jnp.float32)
        held |= {f"{path}/codes": codes.codes, f"{path}/scales": codes.scales}
        if kind == "w8a8" and how.format.activations:
            held[f"{path}/inputs"] = jnp.ones(known[path].factors_shape, codes.scales.dtype)
    network = steps.network
    params = {p: 0.1 * rng.normal(size=a.shape) for p, a in network.params.items()}
    params = {path: jnp.asarray(array, jnp.float32) for path, array in params.items()}
    state = {
        p: held[p.removesuffix("/base")].astype(a.dtype) for p, a in network.model_state.items()
    }
    batch = tiny.batch(steps, 0)
    found, base = (
        np.asarray(jax.jit(steps.predict)(own, state, batch)["nats"])
        for own in (params, {path: 0 * array for path, array in params.items()})
    )
    beside = {
        path if f"{path}/lora_a" not in params else f"{path}/base": a for path, a in frozen.items()
    }
    expected = jax.jit(plain.predict)(merged(params, beside, LORA), {}, batch)["nats"]
    # In w8a8 activations are rounded too, and those of the reference are not.
    rounding = 0.1 if kind == "w8a8" else 1e-4
    np.testing.assert_allclose(found, expected, atol=rounding)
    assert np.abs(found - base).max() > 10 * rounding


def test_flops_leave_out_gradients_of_frozen_weights() -> None:
    """The program has at least these FLOPs and less than a full step's: the compiler counts masked pairs too."""
    steps, plain = tiny.steps(adapted()), tiny.steps(tiny.job(layout=ONE))

    def counted(of):
        return jaxpr.count(of.train, of.abstract_state, of.abstract_batch())

    model, sequence = tiny.MODEL, 32
    matrices = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 64
    pairs = 4 * 2 * 4 * 16 * sequence * (sequence + 1) / 2
    small = 4 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert steps.job.adapter_parameters == steps.network.num_parameters == small
    # Two products for each frozen matrix, three for all else.
    expected = 16 * (2 * 2 * sequence * matrices + 3 * 2 * sequence * small + 3 * pairs)
    assert steps.step_flops == expected
    assert model.flops(steps.job.data.fields()) == 2 * sequence * matrices + pairs
    extra = counted(plain) - plain.step_flops  # attention computes the masked half
    assert counted(steps) - extra == pytest.approx(expected, rel=0.01)


def test_experts_stay_frozen_and_shared_parts_adapt() -> None:
    model = replace(LATENT, dispatch=Dispatch.dropless)
    steps = tiny.steps(adapted(model=model))
    paths = {path.rpartition("/")[0] for path in steps.network.params}
    assert {"blocks/mlp/shared/gate", "dense_blocks/mlp/gate", "blocks/latent/query_down"} <= paths
    assert "blocks/mlp/gate" not in paths
    assert steps.job.adapter_parameters == steps.network.num_parameters


def test_targets_choose_matrices() -> None:
    steps = tiny.steps(adapted(replace(LORA, targets=("query", "value"))))
    paths = {path.rpartition("/")[0] for path in steps.network.params}
    assert paths == {"blocks/query", "blocks/value"}
    assert steps.job.adapter_parameters == steps.network.num_parameters
    with pytest.raises(OptionError, match=r"targets have 'q_proj'.*Decoder has down, gate, key"):
        adapted(replace(LORA, targets=("q_proj",)))
    with pytest.raises(OptionError, match=r"adapter\.rank is 3 but all weights train"):
        Adapter(rank=3)
