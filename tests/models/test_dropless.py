"""Experts without slots: the weighted sum of each token's experts, with gradients, padding and cache."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from systolic.core.errors import LayoutError
from systolic.job import Layout, MatrixFormat, WeightFormat
from systolic.models.decoder.config import Dispatch, Mlp
from systolic.models.decoder.moe import Mixture, _grouped, dropless
from systolic.models.decoder.options import Router
from systolic.models.grouped import Layered, grouped_product
from systolic.models.quantized.codes import Quantized, members_apart, quantized
from systolic.steps import jaxpr
from systolic.steps.decode import INT8
from tests.models.decoders import check_cache, check_slopes, module, program, slopes
from tests.models.drawing import normal
from tests.steps import tiny
from tests.tiers import some

INT4 = MatrixFormat(format=WeightFormat.int4, group=16)
CONFIG = replace(
    tiny.MODEL, layers=2, experts=4, experts_per_token=2, d_ff=32, dispatch=Dispatch.dropless
)


def by_hand(x: Any, chosen: Any, weights: Any, matrices: Any, biases: Any) -> jax.Array:
    """Every expert on every token, then a sum over those that were chosen."""
    gate, up, down = matrices
    first, second = (
        jnp.einsum("bsd,edf->bsef", x, matrix) + bias
        for matrix, bias in zip((gate, up), biases, strict=True)
    )
    hidden = jax.nn.silu(first) * second
    every = jnp.einsum("bsef,efd->bsed", hidden, down)
    share = jax.nn.one_hot(chosen, gate.shape[0]) * weights[..., None]
    return jnp.einsum("bsed,bske->bsd", every, share)


def given(experts: int) -> tuple[Any, ...]:
    shares = np.random.default_rng(9).uniform(size=(2, 8, experts)).astype(np.float32)
    chosen = np.argsort(-shares, axis=-1)[..., :2].astype(np.int32)
    weights = np.take_along_axis(shares, chosen, axis=-1)
    shapes = ((experts, 16, 24), (experts, 16, 24), (experts, 24, 16))
    matrices = [normal(seed, shape) / 4 for seed, shape in enumerate(shapes)]
    return normal(8, (2, 8, 16)), jnp.asarray(chosen), jnp.asarray(weights), matrices


def test_groups_are_the_sum_over_experts_and_so_are_their_gradients() -> None:
    """Shifted choices are those of other devices, or of no one: they add nothing."""
    x, chosen, weights, matrices = given(4)
    biases = tuple(normal(seed, (4, 24)) for seed in (6, 7))

    target = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=CONFIG)).target

    def ours(x: Any, weights: Any, matrices: Any, biases: Any, chosen: Any) -> jax.Array:
        routing = (chosen, weights)
        return jnp.sin(_grouped(target, Mlp.swiglu, x, routing, tuple(matrices), biases)).sum()

    def theirs(x: Any, weights: Any, matrices: Any, biases: Any, chosen: Any) -> jax.Array:
        return jnp.sin(by_hand(x, chosen, weights, matrices, biases)).sum()

    both = jax.jit(
        lambda *given: [jax.value_and_grad(one, (0, 1, 2, 3))(*given) for one in (ours, theirs)]
    )
    for shift in (0, 2, -3):
        found, wanted = both(x, weights, matrices, biases, chosen + shift)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=str(shift))


BIASED = replace(CONFIG, mlp=Mlp.swiglu_clamped, expert_bias=True, router=Router(logit_bias=True))


@pytest.mark.parametrize("name", some(["plain", "biased"], ["biased"]))
def test_it_is_a_mixture_with_slots_for_all(name: str) -> None:
    config = {"plain": CONFIG, "biased": BIASED}[name]
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config))
    with nnx.use_eager_sharding(False):
        mixture = Mixture(config, nnx.Rngs(0), steps.target)
    if config.expert_bias:
        biases = (mixture.router_bias, mixture.gate_bias, mixture.up_bias, mixture.down_bias)
        for key, bias in enumerate(biases):
            bias.set_value(normal(key, bias.shape))
    x = normal(0, (2, 8, 32))
    slots = nnx.merge(*nnx.split(mixture))
    slots.config = replace(config, dispatch=Dispatch.slots, capacity_factor=0)

    @jax.jit
    def each(x: jax.Array) -> Any:
        padded, _ = mixture(x.at[:, 5:].set(jnp.nan), jnp.array([5, 5]))
        return mixture(x), slots(x), padded

    (out, routing), (wanted, known), padded = each(x)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    for name, value in routing.items():
        np.testing.assert_allclose(value, known[name], atol=1e-6)
    np.testing.assert_allclose(padded[:, :5], out[:, :5], atol=1e-5)


@pytest.mark.slow
def test_a_cache_gives_the_logits_of_the_whole_text() -> None:
    check_cache(module(CONFIG), 8, capacity=8)


@pytest.mark.parametrize("dense_layers", some([0, 1], [1]))
def test_experts_that_are_read_in_their_stack_give_the_same(dense_layers: int) -> None:
    """As on a TPU, whose kernels would be given a copy of a layer's matrices."""
    net = module(replace(CONFIG, layers=3, dense_layers=dense_layers))

    def both(net: Any, prompt: jax.Array, tokens: jax.Array) -> list[jax.Array]:
        _, cache = net.prefill(prompt, jnp.array([5, 6]), 8, jnp.float32)
        made = [net.extend(tokens, cache)[0]]
        # Of the loop over layers; its blocks keep theirs.
        net.target = replace(net.target, platform="tpu")
        return [*made, net.extend(tokens, cache)[0]]

    plain, found = program(net, both)(jnp.arange(12).reshape(2, 6), jnp.array([3, 4]))
    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_a_layers_groups_are_its_own_in_the_stack_of_all() -> None:
    stack = jax.random.normal(jax.random.key(0), (3, 2, 4, 5))
    x, sizes = jax.random.normal(jax.random.key(1), (6, 4)), jnp.array([4, 2], jnp.int32)
    target = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=CONFIG)).target

    @jax.jit
    def products(number: jax.Array) -> list[jax.Array]:
        stacks = (stack, quantized(stack, (2,), INT8))
        layers = [Layered(stack=one, number=number) for one in stacks]
        return [grouped_product(target, x, layer, sizes, 6) for layer in layers]

    for number in range(3):
        first, second = np.asarray(stack)[number]
        wanted = np.concatenate([np.asarray(x)[:4] @ first, np.asarray(x)[4:] @ second])
        plain, rounded = products(jnp.int32(number))
        np.testing.assert_allclose(plain, wanted, atol=1e-5)
        np.testing.assert_allclose(rounded, wanted, atol=0.1)


def test_matrices_of_four_bits_are_split_over_a_tensor_axis() -> None:
    """In a stack of layers their codes have one dim more than they are partitioned by."""
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=CONFIG))
    names = steps.target.mesh.axis_names
    sizes, types = tuple(1 + (name == "tensor") for name in names), (AxisType.Auto,) * len(names)
    mesh = AbstractMesh(sizes, names, axis_types=types)
    target = replace(steps.target, mesh=mesh, layout=Layout(fsdp=1, tensor=2))
    matrices = []
    for shape in ((3, 4, 32, 64), (3, 4, 32, 64), (3, 4, 64, 32)):
        made = quantized(jnp.ones(shape), (2,), INT4)
        codes = members_apart(made.codes, made.scales)[0]
        matrices.append(Quantized(codes=codes, scales=made.scales[0]))
        assert matrices[-1].apart
    x, chosen = jnp.ones((2, 8, 32)), jnp.zeros((2, 8, 2), jnp.int32)
    given = (x, (chosen, jnp.ones(chosen.shape)), tuple(matrices))
    made = jax.eval_shape(lambda *given: dropless(target, Mlp.swiglu, *given), *given)
    assert made.shape == x.shape


@pytest.mark.slow
def test_its_gradients_are_those_of_slots_for_all() -> None:
    config = replace(CONFIG, layers=1)
    found, wanted = (
        slopes(tiny.job(layout=tiny.ONE_DEVICE, model=model))
        for model in (config, replace(config, dispatch=Dispatch.slots, capacity_factor=0))
    )
    check_slopes(found, wanted)


def test_flops_count_each_row_once() -> None:
    """By hand, of 32 rows in 4 groups: a product of 16 x 24, forward and both gradients."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((32, 16), "float32"), ((4, 16, 24), "float32"), ((4,), "int32"))
    ]
    once = 2 * 32 * 16 * 24
    assert jaxpr.count(jax.lax.ragged_dot, *shapes) == once

    def both(x: Any, w: Any, sizes: Any) -> Any:
        return jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, sizes).sum(), (0, 1))(x, w)

    assert jaxpr.count(both, *shapes) in (2 * once, 3 * once)  # the forward one may be left out


def test_a_pipeline_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"dropless, whose grouped matmuls do not run in a pipeline"
    ):
        CONFIG.check(Layout(fsdp=1, pipeline=2))
