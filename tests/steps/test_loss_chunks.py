"""A loss in tiles is the same loss, from logits that are never whole."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from systolic.core.errors import LayoutError
from systolic.job import Layout
from systolic.job.data import MASK
from systolic.job.layout import Remat
from systolic.models.decoder.config import Decoder
from systolic.steps.logits import cross_entropy, cross_entropy_on_cpu, log_normaliser
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from systolic.steps.tasks import LanguageModel, Unit, cross_entropy_of
from tests.compiles import as_users_do
from tests.steps import tiny
from tests.steps.test_layouts import check, on_eight_devices
from tests.tiers import some

ROUNDING = 1e-5
"""Relative, in float32: the same terms are added in another order."""

UNTIED = replace(tiny.MODEL, tie_embeddings=False)
WIDE = replace(tiny.MODEL, vocab=4096)
BYTES = LanguageModel(unit=Unit.byte)


def tiled(tiles: int, **changes: Any) -> StepFunctions:
    layout = changes.pop("layout", tiny.ONE_DEVICE)
    return tiny.steps(tiny.job(layout=replace(layout, loss_chunks=tiles), **changes))


def masked(of: StepFunctions) -> dict[str, jax.Array]:
    """A batch with a tail of targets that don't count, and a row of padding."""
    batch = tiny.batch(of, 0)
    targets = batch["targets"].at[:, -5:].set(-1).at[-1].set(-1)
    return {**batch, "targets": targets, MASK: batch[MASK].at[-1].set(0)}


def start(of: StepFunctions) -> tuple[Any, Any]:
    """Weights with something in each of them, the untied output matrix included."""
    rng = np.random.default_rng(1)
    params = {
        path: jnp.asarray(
            0.3 * rng.normal(size=shape.shape) + (path.endswith("scale")), jnp.float32
        )
        for path, shape in sorted(of.network.params.items())
    }
    assert not of.network.model_state
    return params, {}


def gradients(of: StepFunctions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The terms of a masked batch and the gradient of the loss's total."""
    params, rest = start(of)
    batch = masked(of)

    @jax.jit
    def both(params: Any) -> Any:
        def loss(params: Any) -> Any:
            module = of.network.module(of.network.cast(params), rest, True)
            terms = of.job.task.terms(module, batch, True)
            return terms["loss"].total, terms

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, terms), found = both(params)
    return terms, found


CASES = {
    "tied": (tiny.MODEL, BYTES),
    "untied": (UNTIED, BYTES),
    "smoothing": (tiny.MODEL, LanguageModel(label_smoothing=0.1)),
    "z-loss": (UNTIED, LanguageModel(z_loss=1e-2)),
    "all": (UNTIED, LanguageModel(label_smoothing=0.1, z_loss=1e-2)),
    "mixture": (
        replace(UNTIED, experts=4, d_ff=32),
        LanguageModel(label_smoothing=0.1, z_loss=1e-2, router_loss=0.1),
    ),
}


@pytest.mark.parametrize("name", some(list(CASES), ["all"]))
def test_terms_and_gradients_are_those_of_whole_logits(name: str) -> None:
    model, task = CASES[name]
    whole, slope = gradients(tiled(1, model=model, task=task))
    parts, slopes = gradients(tiled(8, model=model, task=task))
    assert parts.keys() == whole.keys()
    for term in whole:
        np.testing.assert_allclose(parts[term], whole[term], rtol=ROUNDING, err_msg=term)
    assert slopes.keys() == slope.keys()
    for path, expected in slope.items():
        size = np.abs(expected).max()
        assert size > 0, path
        np.testing.assert_allclose(slopes[path], expected, atol=ROUNDING * size, err_msg=path)


@pytest.mark.slow
def test_rematerialised_layers_and_accumulation_take_chunks() -> None:
    layout = Layout(fsdp=1, remat=Remat.save_names, accumulate=2)
    exact, _ = tiny.run(tiled(1))
    losses, _ = tiny.run(tiled(4, layout=layout))
    np.testing.assert_allclose(losses, exact, rtol=ROUNDING)


def test_evaluation_and_outputs_take_chunks() -> None:
    one, many = tiled(1, model=WIDE), tiled(8, model=WIDE)
    params, rest = start(one)
    batch = masked(one)
    for of in ("evaluate", "predict"):
        exact = jax.jit(getattr(one, of))(params, rest, batch)
        program = jax.jit(getattr(many, of))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=ROUNDING),
            program(params, rest, batch),
            exact,
        )
        assert largest(getattr(many, of), params, rest, batch) < logits_of(many)


def test_the_whole_logits_never_exist() -> None:
    for tiles in (1, 4):
        of = tiled(tiles, model=WIDE)
        found = largest(of.train, of.abstract_state, of.abstract_batch())
        assert found == logits_of(of) // tiles


def logits_of(of: StepFunctions) -> int:
    """Elements of all logits of a pass."""
    return of.batch_size * of.job.data.fields()["tokens"].shape[0] * vocab(of)


def vocab(of: StepFunctions) -> int:
    assert isinstance(of.job.model, Decoder)
    return of.job.model.vocab


def largest(function: Any, *args: Any) -> int:
    """Elements of the largest array in a program, within loops and calls too."""

    def sizes(jaxpr: Any) -> Any:
        for equation in jaxpr.eqns:
            yield from (math.prod(out.aval.shape) for out in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.slow
def test_bf16_gradients_are_as_good_as_those_of_whole_logits() -> None:
    def embedding(tiles: int, dtype: str) -> Any:
        layout = replace(tiny.ONE_DEVICE, loss_chunks=tiles)
        return gradients(tiny.steps(tiny.job(layout=layout), dtype=dtype))[1]["embedding"]

    exact = embedding(1, "float32")
    off = {t: jnp.linalg.norm(embedding(t, "bfloat16") - exact) for t in (1, 8)}
    assert 0 < off[8] < 1.2 * off[1]


@pytest.mark.slow
def test_int8_operands_take_chunks() -> None:
    def rounded(tiles: int) -> tuple[dict[str, Any], dict[str, Any]]:
        layout = replace(tiny.ONE_DEVICE, loss_chunks=tiles)
        mesh = make_mesh(layout, jax.devices()[:1])
        target = MeshTarget(
            platform="cpu", layout=layout, dtype="float32", mesh=mesh, matmul_format="int8"
        )
        return gradients(StepFunctions(tiny.job(layout=layout), target))

    (parts, slopes), (whole, slope) = rounded(4), rounded(1)
    np.testing.assert_allclose(parts["loss"].total, whole["loss"].total, rtol=ROUNDING)
    for path, expected in slope.items():
        off = np.linalg.norm(slopes[path] - expected) / np.linalg.norm(expected)
        assert off < ROUNDING, path


def test_the_best_token_is_that_of_argmax() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 2.0, -1.0]])
    for target in range(4):
        targets = jnp.full(3, target)
        expected = jnp.argmax(logits, axis=-1) == targets
        np.testing.assert_array_equal(cross_entropy(logits, targets).best, expected)


def test_the_normaliser_has_the_derivative_of_logsumexp() -> None:
    logits = 50 * jax.random.normal(jax.random.key(0), (3, 64))
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(log_normaliser(x) ** 2))(logits),
        jax.grad(lambda x: jnp.sum(jax.nn.logsumexp(x, axis=-1) ** 2))(logits),
        rtol=1e-4,
        atol=1e-30,
    )


@pytest.mark.slow
def test_tiles_agree_with_one_device_under_a_mesh() -> None:
    check(on_eight_devices(["tiles-context-tensor-fsdp", "tiles-expert"]))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(fsdp=1, loss_chunks=5), "loss-chunks 5 does not divide the sequence of 32"),
        (Layout(fsdp=1, loss_chunks=64), "loss-chunks 64 does not divide the sequence of 32"),
    ],
)
def test_tiles_divide_the_sequence(layout: Layout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        tiny.steps(tiny.job(layout=layout))


def test_there_is_at_least_one_tile() -> None:
    with pytest.raises(LayoutError, match=r"loss-chunks is 0; .* must be at least 1"):
        Layout(loss_chunks=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_target_that_is_the_likeliest_is_found_behind_a_norm(dtype: Any) -> None:
    """As users compile it: logits may be computed again for the gather, rounded otherwise than those that it is compared with."""
    draw = np.random.default_rng(0)
    x, kernel, scale, bias = (
        jnp.asarray(draw.normal(size=shape), dtype) for shape in ((32, 16), (16, 300), 300, 300)
    )
    full = as_users_do() | {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }

    def scored(kernel: Any) -> Any:
        y = x @ kernel
        centred = y - y.mean(-1, keepdims=True)
        y = centred * (jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale) + bias
        scores = cross_entropy_on_cpu(y, jnp.argmax(y.astype(jnp.float32), -1))
        return scores.nats.sum(), scores.best

    compiled = jax.jit(jax.value_and_grad(scored, has_aux=True)).lower(kernel).compile(full)
    assert compiled(kernel)[0][1].tolist() == [1.0] * 32


def test_the_form_for_a_cpu_scores_the_same() -> None:
    draw = np.random.default_rng(0)
    logits = np.round(draw.normal(size=(3, 5, 37)), 1).astype(np.float32)  # equals are likely
    logits[0] = logits[0].max(axis=-1, keepdims=True)
    targets = draw.integers(-1, 37, (3, 5))
    targets[2, 4] = 37  # beyond the vocabulary
    targets[0], targets[1, :2] = [0, 1, 36, -1, 0], logits[1, :2].argmax(axis=-1)
    seen = (targets >= 0).astype(np.float32)

    def scored(read: Any) -> Any:
        def total(logits: Any) -> Any:
            scores = read(logits, jnp.asarray(targets))
            return (jnp.tanh(scores.nats + scores.normaliser) * seen).sum(), scores

        return jax.value_and_grad(total, has_aux=True)(logits)

    (total, scores), gradient = scored(cross_entropy)
    (own_total, own), own_gradient = scored(cross_entropy_on_cpu)
    np.testing.assert_allclose(own_total, total, rtol=1e-6)
    np.testing.assert_allclose(own_gradient, gradient, atol=1e-6)
    np.testing.assert_array_equal(own.best * seen, scores.best * seen)
    assert 2 <= float((own.best * seen).sum()) < seen.sum()
    here = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE)).target
    forms = [
        cross_entropy_of(SimpleNamespace(target=replace(here, platform=p))) for p in ("cpu", "tpu")
    ]
    assert forms == [cross_entropy_on_cpu, cross_entropy]
