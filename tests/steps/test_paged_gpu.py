"""The step of a server on one GPU, run by a CPU: its matrices lie side by side, and what is not finite is found element by element."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.formats.matrices import whole
from systolic.job import Adapter, AdapterKind, Layout, WeightFormat
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.page_arrays import kernel_of_gpus
from systolic.models.linear import Joined
from systolic.serving.text.converting import serving_weights
from systolic.steps.paged import PagedSteps, StepInput, StepShape
from systolic.steps.step_functions import StepFunctions
from tests.steps import tiny

pytestmark = pytest.mark.own_programs

SIZE, PAGES = 4, 9
MODEL = Decoder(
    layers=1, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=16, vocab=64, qkv_bias=True
)
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TABLE = np.asarray([[1, 4, 2], [7, 3, 5]], np.int32)


def paged_steps(platform: str, **job: object) -> PagedSteps:
    steps = tiny.steps(tiny.job(**{"layout": tiny.ONE_DEVICE, "model": MODEL, **job}))
    target = replace(steps.target, platform=platform)
    return PagedSteps(StepFunctions(steps.job, target), SIZE)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of_gpus()
    monkeypatch.setattr(
        kernel, "paged_attention", functools.partial(kernel.paged_attention, interpret=True)
    )


@functools.cache
def drawn() -> Any:
    """Parameters and variables of the model."""
    init = paged_steps("cpu").steps.network.init
    return jax.jit(init, compiler_options=QUICKLY)(jax.random.key(1))


def read(paged: PagedSteps, texts: np.ndarray, spoil: bool = False) -> tuple[np.ndarray, list]:
    """Logits after each token of the second half of two texts, whose first halves are read as prompts, and the pages."""
    params, rest = drawn()
    if spoil:
        params = spoiled(params)
    weights, pages = paged.weights(params, rest), paged.empty_pages(PAGES)
    latest, half = jnp.zeros((3,), jnp.int32), texts.shape[1] // 2

    @functools.partial(jax.jit, static_argnames="shape", compiler_options=QUICKLY)
    def step(pages: list, packed: jax.Array, shape: StepShape) -> tuple[jax.Array, list]:
        step_input = StepInput.unpacked(packed, shape, 0)
        return paged.read(weights, pages, latest, step_input, (shape.chunks, shape.length))

    def packed(*parts: object) -> np.ndarray:
        return np.concatenate([np.ravel(part).astype(np.int32) for part in parts])

    prompts = packed(texts[:, :half], [0, 0], [half, half], TABLE)
    _, pages = step(pages, prompts, StepShape(0, 2, half, 3))
    logits = []
    for place in range(half, texts.shape[1]):
        row = packed(texts[:, place], [-1, -1], [place, place], [1, 1], TABLE)
        after, pages = step(pages, row, StepShape(2, 0, 0, 3))
        logits.append(np.asarray(after))
    return np.stack(logits), pages


def spoiled(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Weights with which the keys of token 1 overflow, of the first layer's first head alone."""
    embedding = params["embedding"].at[:, 0].set(0).at[1].set(0).at[1, 0].set(1)
    key = params["blocks/key"].at[0, 0, 0, 3].set(3e38)
    return {**params, "embedding": embedding, "blocks/key": key}


def test_a_step_on_a_gpu_has_the_logits_of_any_other_platform() -> None:
    texts = np.random.default_rng(0).integers(0, MODEL.vocab, (2, 10))
    ours, other = (read(paged_steps(platform), texts)[0] for platform in ("gpu", "other"))
    np.testing.assert_allclose(ours, other, atol=1e-5, rtol=1e-5)


def test_keys_that_overflow_spoil_their_own_text_alone() -> None:
    """Every logit of the text is NaN on either platform, and no page has a number that another would read as NaN."""
    texts = np.random.default_rng(0).integers(2, MODEL.vocab, (2, 10))
    texts[0, -1] = 1
    for platform in ("gpu", "other"):
        logits, pages = read(paged_steps(platform), texts, spoil=True)
        assert np.isfinite(logits[:-1]).all()
        assert np.isfinite(logits[-1, 1]).all()
        assert np.isnan(logits[-1, 0]).all()
        assert all(np.isfinite(part).all() for part in jax.tree.leaves(pages))


def shapes(paged: PagedSteps) -> dict[str, tuple[int, ...]]:
    layer = nnx.to_flat_state(paged.abstract_weights.layers[0])
    return {"/".join(path): variable.get_value().shape for path, variable in layer}


def test_matrices_of_the_same_rows_lie_side_by_side_on_one_gpu() -> None:
    paged = paged_steps("gpu")
    found = shapes(paged)
    # 4 heads of queries, 2 of keys and 2 of values; 48 hidden units twice.
    assert found["query"] == (32, 8, 16)
    assert found["mlp/gate"] == (32, 96)
    assert found["key"] == found["value"] == (32, 0, 16)
    assert found["mlp/up"] == (32, 0)
    own = [leaf.size for leaf in jax.tree.leaves(paged.abstract_weights)]
    assert sum(own) == sum(
        leaf.size for leaf in jax.tree.leaves(paged_steps("cpu").abstract_weights)
    )


def test_weights_that_a_server_loads_are_joined_layer_by_layer() -> None:
    paged = paged_steps("gpu")
    params, rest = drawn()
    loaded = serving_weights(paged, {**params, **rest})
    known = paged.weights(params, rest)
    assert jax.tree.structure(loaded) == jax.tree.structure(known)
    jax.tree.map(np.testing.assert_array_equal, loaded, known)


@pytest.mark.parametrize(
    ("platform", "job"),
    [
        ("tpu", {}),
        ("cpu", {}),
        ("gpu", {"adapter": Adapter(kind=AdapterKind.lora, rank=2, alpha=2.0)}),
        ("gpu", {"quantization": whole(MODEL, WeightFormat.int8)}),
        ("gpu", {"model": replace(MODEL, experts=4, d_ff=16)}),
    ],
    ids=["tpu", "cpu", "adapters", "int8", "experts"],
)
def test_other_platforms_and_matrices_of_other_kinds_stay_as_they_are(
    platform: str, job: dict[str, object]
) -> None:
    layer = nnx.to_flat_state(paged_steps(platform, **job).abstract_weights.layers[0])
    held = ["/".join(path) for path, each in layer if isinstance(each.get_value(), Joined)]
    # The queries of a mixture's layer are plain.
    assert held == (["query"] if "model" in job else [])


def test_several_gpus_split_the_heads_of_each_matrix() -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=MODEL))
    target = replace(steps.target, platform="gpu", layout=Layout(fsdp=1, tensor=2))
    found = shapes(PagedSteps(StepFunctions(steps.job, target), SIZE))
    assert found["query"] == (32, 4, 16)
    assert found["key"] == (32, 2, 16)
