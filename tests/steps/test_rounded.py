"""Programs over weights in int8 compute what they would over the same weights widened."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import ServingProgram
from systolic.core.errors import OptionError
from systolic.job import Job, Layout, Precision, Sampling, Served, ServedCache, ServedWeights
from systolic.models.decoder.cache import Coded, coded
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.options import Latent
from systolic.models.quantized.codes import Quantized
from systolic.steps.decode import Decode
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from tests.tiers import some

sys.path.insert(
    0, str(Path(__file__).parents[2] / "benchmarks" / "serve")
)  # as static_batch has it
from apart import ApartDecode, ApartProgram, ApartState

DENSE = Decoder(layers=2, d_model=32, d_ff=64, heads=4, kv_heads=2, head_dim=8, vocab=384)
MIXTURE = replace(
    DENSE, experts=4, experts_per_token=2, dispatch=Dispatch.dropless, shared_experts=1
)
LATENT = replace(
    MIXTURE,
    latent=Latent(
        kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    ),
    dense_layers=1,
)


def job(model: Decoder, layout: Layout) -> Job:
    made = recipes.find("lm")({"model": model, "sequence": 16, "batch": layout.batch_ways})
    return replace(made, layout=layout, precision=Precision.f32)


MODELS = {"dense": DENSE, "mixture": MIXTURE, "latent": LATENT}


@pytest.mark.parametrize("model", some(MODELS, ["latent"]))
def test_decode_reads_int8(model: Decoder) -> None:
    layout, rows = Layout(fsdp=1), 2
    target = MeshTarget.of(job(model, layout), "cpu", jax.devices()[:1])
    steps = StepFunctions(job(model, layout), target)
    narrow = Decode(steps, Sampling(temperature=0.0), Served(weights=ServedWeights.int8))
    plain = Decode(steps, Sampling(temperature=0.0))
    params, rest = _drawn(steps)
    codes = jax.jit(narrow.weights, out_shardings=narrow.placement)(params)
    held = [one for one in codes.values() if isinstance(one, Quantized)]
    assert sum(one.codes.size for one in held) > 0.4 * steps.network.num_parameters
    wide = {
        path: one.restored() if isinstance(one, Quantized) else one for path, one in codes.items()
    }
    tokens = np.random.default_rng(2).integers(0, 256, (rows, 8)).astype(np.int32)
    count, key = jnp.full((rows,), 8), jax.random.key(3)

    def answer(decode: Decode, params: dict[str, jax.Array | Quantized]) -> jax.Array:
        begun = decode.prefill(params, rest, tokens, count, key, 16)
        module = decode._module(params, rest)
        return module.extend(begun.token, begun.cache)[0]

    found = jax.jit(lambda params: answer(narrow, params))(codes)
    expected = jax.jit(lambda params: answer(plain, params))(wide)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_decode_reads_a_cache_in_int8() -> None:
    model, layout, rows = DENSE, Layout(fsdp=1), 2
    steps = StepFunctions(
        job(model, layout), MeshTarget.of(job(model, layout), "cpu", jax.devices()[:1])
    )
    narrow = Decode(steps, Sampling(temperature=0.0), Served(cache=ServedCache.int8))
    params, rest = _drawn(steps)
    tokens = np.random.default_rng(2).integers(0, 256, (rows, 8)).astype(np.int32)
    count, key = jnp.array([8, 5]), jax.random.key(3)

    def both(params: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        begun = narrow.prefill(params, rest, tokens, count, key, 16)
        module = narrow._module(params, rest)
        logits, cache = module.extend(begun.token, begun.cache)
        after, _ = module.extend(begun.token, cache)
        wide = begun.cache._replace(
            key=_restored(begun.cache.key), value=_restored(begun.cache.value)
        )
        expected, longer = module.extend(begun.token, wide)
        # The second token reads what the first one wrote.
        second = longer._replace(key=_restored(cache.key), value=_restored(cache.value))
        return logits, expected, after, module.extend(begun.token, second)[0]

    found, expected, after, expected_after = jax.jit(both)(params)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_allclose(after, expected_after, atol=2e-4)
    shapes = narrow.abstract_state(rows, 16).cache
    assert shapes.key.codes.dtype == jnp.int8
    assert shapes.key.scales.shape == shapes.key.codes.shape[:-1]


def _drawn(steps: StepFunctions) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Weights that are not zero anywhere, as those of the first step partly are."""
    rng, network = np.random.default_rng(0), steps.network
    drawn = {
        path: jnp.asarray(rng.normal(size=one.shape) / 4, jnp.float32)
        for path, one in network.params.items()
    }
    return drawn, {path: jnp.zeros(one.shape) for path, one in network.model_state.items()}


def _restored(rows: Coded) -> jax.Array:
    return rows.codes * rows.scales[..., None].astype(jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_in_int8_are_within_half_a_step(dtype: str) -> None:
    """Of the scale as it is stored: in bfloat16 the largest elements were half a step further away."""
    rows = jax.random.normal(jax.random.key(0), (64, 5, 16)).at[1, 2].set(0).astype(dtype)
    made = jax.jit(coded)(rows)
    assert made.scales.dtype == jnp.bfloat16
    wide, steps = rows.astype(jnp.float32), made.scales[..., None].astype(jnp.float32)
    assert (np.abs(_restored(made) - wide) <= 0.5001 * steps).all()


def test_a_batch_has_no_cache_in_fp8() -> None:
    layout = Layout(fsdp=1)
    steps = StepFunctions(
        job(DENSE, layout), MeshTarget.of(job(DENSE, layout), "cpu", jax.devices()[:1])
    )
    with pytest.raises(OptionError, match="--kv-dtype is fp8, which a server's pages"):
        Decode(steps, Sampling(temperature=0.0), Served(cache=ServedCache.fp8))


def test_layers_apart_write_what_stacked_ones_do() -> None:
    model, layout, rows = LATENT, Layout(fsdp=1), 2
    steps = StepFunctions(
        job(model, layout), MeshTarget.of(job(model, layout), "cpu", jax.devices()[:1])
    )
    served = Served(weights=ServedWeights.int8, cache=ServedCache.int8)
    decode = Decode(steps, Sampling(temperature=0.0), served)
    apart = ApartDecode(decode)
    params, rest = _drawn(steps)
    tokens = np.random.default_rng(2).integers(0, 256, (rows, 8)).astype(np.int32)

    def both(params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weights = decode.weights(params)
        begun = decode.prefill(weights, rest, tokens, jnp.array([8, 5]), jax.random.key(3), 16)
        layers = [
            jax.tree.map(lambda a, n=n: a[n], (begun.cache.key, begun.cache.value))
            for n in range(model.layers)
        ]
        own = ApartState(begun.token, begun.key, begun.cache.length, begun.cache.recent, layers)
        split, found = apart.weights(params, rest), []
        for _ in range(3):
            found.append(own.token)
            own = apart.step(split, own)
        return jnp.stack(found, axis=1), decode.decode(weights, rest, begun, 3)[1]

    found, expected = jax.jit(both)(params)
    np.testing.assert_array_equal(found, expected)


def test_the_program_of_layers_apart_has_arrays_for_each_layer() -> None:
    on, devices = slice("v5e-1"), jax.devices()[:1]
    sizes = {"job": job(DENSE, Layout(fsdp=1)), "rows": 2, "tokens": 1, "context": 16}
    stacked, apart = (kind(**sizes).trace(on, devices) for kind in (ServingProgram, ApartProgram))
    assert apart.facts == stacked.facts
    arguments = [len(program.traced.jaxpr.in_avals) for program in (stacked, apart)]
    steps = StepFunctions(sizes["job"], MeshTarget.of(sizes["job"], "cpu", devices))
    per_layer = sum(path.startswith("blocks/") for path in steps.network.params)
    assert arguments[1] - arguments[0] == (DENSE.layers - 1) * (per_layer + 2)  # keys and values
