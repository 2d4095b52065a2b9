"""Growing a decoder's width: what its weights begin as and how they move, with a base width (muP) and without."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import OptionError
from systolic.job import Adapter, AdapterKind, Optimizer, OptimizerKind
from systolic.models.adapters import A, B, inputs_of
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import Latent, Mup
from systolic.steps.step_functions import StepFunctions, build, is_matrix
from tests.steps import tiny
from tests.tiers import some

BASE = 32
RATE = Optimizer(learning_rate=1e-2)
FIRST = Optimizer(learning_rate=0.5, weight_decay=0)
SMALL = Decoder(layers=2, d_model=BASE, d_ff=64, heads=4, kv_heads=2, head_dim=8, vocab=64)
MIXTURE = {"experts": 4, "shared_experts": 1, "dense_layers": 1}
REST = {"learned_positions": 32, "ngrams": 3, "ngram_rows": 64, "ngram_dim": 8}
BIASES = {"qkv_bias": True, "out_bias": True, "qk_norm": True, "sinks": True}


def grown(model: Decoder, times: int, *, mup: bool) -> Decoder:
    """All widths but those of heads, ``times`` as large."""
    return replace(
        model,
        d_model=times * model.d_model,
        d_ff=times * model.d_ff,
        heads=times * model.heads,
        kv_heads=times * model.kv_heads,
        mup=Mup(base_width=model.d_model if mup else 0),
    )


def steps_of(model: Decoder, **changes: Any) -> StepFunctions:
    return tiny.steps(tiny.job(model=model, layout=tiny.ONE_DEVICE, optimizer=RATE, **changes))


def stream(steps: StepFunctions, params: Any, rest: Any, batch: Any) -> list[jax.Array]:
    """The residual stream before, between and after the layers, and the logits."""
    module: Any = steps.network.module(params, rest, train=False)
    tokens, segments, positions = (batch[name] for name in ("tokens", "segments", "positions"))
    found = [module.embed(tokens, positions, module.no_history(len(tokens)))]
    graph, stacked = nnx.split(module.blocks)
    for layer in range(module.config.layers):
        block = nnx.merge(graph, jax.tree.map(lambda a, n=layer: a[n], stacked))
        found.append(block(found[-1], segments, positions)[0])
    return [*found, module.logits(module.normed(found[-1]))]


def compiled(function: Any) -> Any:
    """A jitted function whose compile takes a third of the usual time: what it computes runs a few times."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def changes(model: Decoder) -> np.ndarray:
    """Root mean square of what three steps change of each of :func:`stream`."""
    steps = steps_of(model)
    batches = [tiny.batch(steps, number) for number in range(3)]
    train = compiled(steps.train)
    made = compiled(lambda p, r: stream(steps, p, r, batches[0]))
    state = begun = compiled(steps.init)(jax.random.key(0))
    for batch in batches:
        state, _ = train(state, batch)
    first, last = (made(one.params, one.model_state) for one in (begun, state))
    return np.array([np.sqrt(np.mean((b - a) ** 2)) for a, b in zip(first, last, strict=True)])


@pytest.mark.slow
def test_activations_move_as_much_at_any_width() -> None:
    """The coordinate check: without the factors what the layers make moves further the wider they are."""
    small = replace(SMALL, layers=1)
    base, wide, plain = (
        changes(grown(small, times, mup=mup)) for times, mup in ((1, True), (8, True), (8, False))
    )
    assert wide == pytest.approx(base, rel=0.5)
    assert (plain[1:] > 2.5 * base[1:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"experts": 2}, {}], ids=str)
def test_so_they_do_with_an_output_matrix_and_experts(more: dict[str, Any]) -> None:
    small = replace(SMALL, tie_embeddings=False, **more)
    base, wide = (changes(grown(small, times, mup=True)) for times in (1, 8))
    assert wide == pytest.approx(base, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", some([{}, {"tie_embeddings": False}], [{"tie_embeddings": False}]), ids=str
)
def test_at_the_base_width_nothing_differs(more: dict[str, Any]) -> None:
    model = replace(SMALL, **MIXTURE, **REST, **more)

    def program(model: Decoder) -> str:
        steps = steps_of(model)
        state = steps.abstract_state
        init = jax.make_jaxpr(steps.init)(jax.random.key(0))
        return f"{init} {jax.make_jaxpr(steps.train)(state, steps.abstract_batch())}"

    based = replace(model, mup=Mup(base_width=BASE, base_head_dim=8))
    assert based.softmax_scale == pytest.approx(model.softmax_scale, rel=1e-12)
    kept = replace(based, mup=Mup(base_width=BASE))
    assert program(kept) == program(model)


@pytest.mark.parametrize(
    "kind", some(list(AdapterKind), (AdapterKind.none, AdapterKind.lora)), ids=str
)
@pytest.mark.parametrize("more", [REST | BIASES, MIXTURE | {"tie_embeddings": False}], ids=str)
def test_updates_shrink_as_inputs_grow(more: dict[str, Any], kind: AdapterKind) -> None:
    """Every parameter by its own shape, not by its name."""
    small = replace(SMALL, **more)
    adapter = Adapter() if kind is AdapterKind.none else Adapter(kind=kind, rank=4)
    narrow = steps_of(grown(small, 1, mup=True), adapter=adapter).network
    wide = steps_of(grown(small, 4, mup=True), adapter=adapter).network
    assert narrow.params.keys() == wide.params.keys()
    for path, shape in wide.params.items():
        axes = wide.axes[path] or (None,) * shape.ndim
        factor = wide.model.update_factor(path, OptimizerKind.adamw)
        if not is_matrix(axes) or path in ("embedding", "positions", "ngrams/tables"):
            assert factor == 1, path  # rows that are looked up, and vectors
            continue
        if path.endswith((A, B)):
            continue
        dims = inputs_of(axes)
        if path in ("unembedding", "blocks/mlp/router", "ngrams/out"):
            dims = (shape.ndim - 2,)
        inputs = [math.prod(of.params[path].shape[d] for d in dims) for of in (narrow, wide)]
        assert factor == inputs[0] / inputs[1], path
    if adapter:
        assert wide.model.update_factor(f"blocks/query/{A}", OptimizerKind.adamw) == 1 / 4
        assert wide.model.update_factor(f"blocks/query/{B}", OptimizerKind.adamw) == 1


def test_orthogonal_updates_follow_the_width_by_themselves() -> None:
    wide = grown(replace(SMALL, experts=4, tie_embeddings=False), 4, mup=True)
    factors = {
        name: wide.update_factor(name, OptimizerKind.muon)
        for name in ("embedding", "blocks/query", "blocks/mlp/router", "unembedding")
    }
    assert list(factors.values()) == [1, 1, 1 / 2, 1 / 4]


def test_the_first_step_of_a_wide_matrix_is_a_smaller_one() -> None:
    """Of a training's own optimizer: Adam's first step has the rate's size, whatever the gradient."""
    model = grown(replace(SMALL, layers=1, tie_embeddings=False), 4, mup=True)
    steps = tiny.steps(tiny.job(model=model, layout=tiny.ONE_DEVICE, optimizer=FIRST))
    ones: Any = {path: np.ones(of.shape, np.float32) for path, of in steps.network.params.items()}
    step: Any = compiled(lambda g: steps.optimizer.update(g, steps.optimizer.init(g), g)[0])(ones)
    rate = FIRST.learning_rate
    expected = {"embedding": 1, "norm/scale": 1, "unembedding": 1 / 4, "blocks/mlp/down": 1 / 4}
    for path, size in expected.items():
        np.testing.assert_allclose(step[path], -rate * size, rtol=1e-4)


def test_muon_hands_factors_to_its_adam() -> None:
    axes = {"unembedding": ("embed", "vocab"), "embedding": ("vocab", "embed")}
    rule = replace(FIRST, kind=OptimizerKind.muon)
    ones: Any = {name: jnp.ones((2, 2)) for name in axes}
    rate, factors = lambda step: 0.5, {"unembedding": 0.25, "embedding": 1.0}
    made: Any = build(rule, rate, axes, factors)
    step = made.update(ones, made.init(ones), ones)[0]
    np.testing.assert_allclose(step["unembedding"], step["embedding"] / 4, rtol=1e-6)


def test_decay_does_not_shrink_with_updates() -> None:
    optimizer = Optimizer(learning_rate=0.5, weight_decay=0.1)
    axes = {"matrix": ("embed", "mlp"), "table": ("vocab", "embed")}
    rule = build(optimizer, lambda step: 0.5, axes, {"matrix": 0.25, "table": 1.0})
    ones: Any = {name: jnp.ones((2, 2)) for name in axes}
    updates: Any = rule.update(ones, rule.init(ones), ones)[0]
    np.testing.assert_allclose(updates["matrix"], -0.5 * (0.25 + 0.1), rtol=1e-6)
    np.testing.assert_allclose(updates["table"], -0.5 * (1 + 0.1), rtol=1e-6)


def test_weights_begin_as_at_the_base_width() -> None:
    wide = grown(replace(SMALL, layers=1, experts=4, vocab=512), 4, mup=True)
    params, _ = compiled(steps_of(wide).network.init)(jax.random.key(0))
    assert np.std(params["embedding"]) == pytest.approx(0.5 * BASE**-0.5, rel=0.02)
    assert np.std(params["blocks/mlp/router"]) == pytest.approx((4 * BASE) ** -0.5 / 2, rel=0.1)
    assert np.std(params["blocks/mlp/up"]) == pytest.approx((4 * BASE) ** -0.5, rel=0.02)
    assert (wide.embedding_factor, wide.output_factor) == (1, 1 / 4)
    untied = replace(wide, tie_embeddings=False)
    assert (untied.embedding_factor, untied.output_factor) == (BASE**0.5, 1)


def test_heads_that_grow_are_scaled_by_their_width() -> None:
    wide = replace(SMALL, head_dim=32, mup=Mup(base_width=BASE, base_head_dim=8))
    assert wide.softmax_scale == pytest.approx(SMALL.softmax_scale / 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mup": {"base_head_dim": 8}}, "model.mup.base-head-dim is 8 but model.mup.base-width"),
        (
            {"mup": {"base_width": 8}, "latent": Latent(kv_lora_rank=8)},
            "muP has no rule for model.latent",
        ),
        (
            {"mup": {"base_width": 8, "base_head_dim": 8}, "query_pre_attn_scalar": 9.0},
            "both set the scale of attention logits",
        ),
    ],
)
def test_what_has_no_rule_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        replace(SMALL, **given | {"mup": Mup(**given["mup"])})


def test_a_rule_of_updates_that_follow_gradients_is_refused() -> None:
    wide = grown(SMALL, 2, mup=True)
    with pytest.raises(OptionError, match=r"optimizer\.kind is sgd.*use adamw, lion"):
        tiny.job(model=wide, optimizer=Optimizer(kind=OptimizerKind.sgd))
    assert "mup" in wide.lasting(), "a resumed run keeps it"
