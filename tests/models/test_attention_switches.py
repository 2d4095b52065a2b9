"""Windows, soft caps and sinks: every path against a definition in float64, and a decoder with them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Layout
from systolic.models.attention import BalancedOrder, Logits, Masking, attention
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.layer_groups import run_layers
from systolic.models.splash import LongCausalMask, active_blocks, splash_attention
from tests.models.decoders import arrays, check_cache, check_slopes, module, program, slopes
from tests.models.drawing import normal
from tests.models.test_attention import inputs, target
from tests.steps import tiny
from tests.tiers import some

GEMMA = replace(
    tiny.MODEL,
    layers=5,
    window=3,
    global_every=2,
    local_rope_theta=100.0,
    attention_cap=0.5,
    logit_cap=0.4,
    qk_norm=True,
)
GPT_OSS = replace(tiny.MODEL, window=4, global_every=2, sinks=True, tie_embeddings=False)
LOCAL = replace(tiny.MODEL, window=2)


def softmax_by_hand(arrays: Any, window: int, cap: float, sinks: Any) -> np.ndarray:
    """One head and position at a time, in float64."""
    query, key, value = (np.asarray(a, np.float64) for a in arrays[:3])
    segments, (batch, sequence, heads, head_dim) = np.asarray(arrays[3]), query.shape
    out, place = np.zeros_like(query), np.arange(sequence)
    for b, s, h in np.ndindex(batch, sequence, heads):
        group = h // (heads // key.shape[2])
        seen = (place <= s) & (s - place < (window or sequence))
        seen &= segments[b] == segments[b, s]
        logits = key[b, seen, group] @ query[b, s, h] / head_dim**0.5
        logits = cap * np.tanh(logits / cap) if cap else logits
        total = np.exp(logits).sum() + (0 if sinks is None else np.exp(float(sinks[h])))
        out[b, s, h] = np.exp(logits) @ value[b, seen, group] / total
    return out


SWITCHES = [(5, 0.0, False), (0, 0.7, False), (0, 0.0, True), (5, 0.7, True)]


@pytest.mark.parametrize(("window", "cap", "sinks"), SWITCHES)
def test_plain_attention_is_its_definition(window: int, cap: float, sinks: bool) -> None:
    given = inputs(16, 8)
    logits = Logits(cap=cap, sinks=jnp.array([0.5, -1.0, 2.0, 0.0]) if sinks else None)
    wanted = softmax_by_hand(given, window, cap, logits.sinks)
    masking = Masking(segments=given[3], causal=True, window=window)
    order = BalancedOrder(2)

    @jax.jit
    def attend(*given: Any) -> Any:
        placed = [order.arrange(array) for array in given]
        balanced = replace(masking, segments=placed[3], order=order)
        found = attention(target("cpu"), *placed[:3], balanced, logits)
        return attention(target("cpu"), *given[:3], masking, logits), order.restore(found)

    for found in attend(*given):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_splash_attention_with_every_switch_and_its_gradients() -> None:
    given = [array[:1] for array in inputs(256, 64)]
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    masking = Masking(segments=given[3], causal=True, window=100)

    def splash(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        logits = Logits(cap=0.7, sinks=sinks)
        return splash_attention(target("tpu"), query, key, value, masking, logits, interpret=True)

    def plain(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return attention(target("cpu"), query, key, value, masking, Logits(cap=0.7, sinks=sinks))

    weight = normal(5, given[0].shape)

    def both(attend: Any) -> Any:
        def summed(*args: Any) -> Any:
            out = attend(*args)
            return (out * weight).sum(), out

        return jax.value_and_grad(summed, (0, 1, 2, 3), has_aux=True)(*given[:3], sinks)

    ((_, found), grads), ((_, wanted), known) = jax.jit(lambda: (both(splash), both(plain)))()
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    for ours, theirs in zip(grads, known, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("block", [(128, 128), (256, 128), (128, 512)])
@pytest.mark.parametrize("order", [None, BalancedOrder(2)])
@pytest.mark.parametrize("window", [1, 100, 128, 129, 700])
def test_blocks_of_a_window(
    block: tuple[int, int], order: BalancedOrder | None, window: int
) -> None:
    sequence = 2048
    index = np.arange(sequence) if order is None else order.indices(sequence)
    back = index[:, None] - np.arange(sequence)[None, :]
    whole = (back >= 0) & (back < window)
    mask = LongCausalMask(sequence, order, window)
    for row in range(0, sequence, block[0]):
        for column in range(0, sequence, block[1]):
            part = (slice(row, row + block[0]), slice(column, column + block[1]))
            assert np.array_equal(mask[part], whole[part])
    kept = whole.reshape(sequence // block[0], block[0], sequence // block[1], block[1])
    counts = kept.any(axis=(1, 3)).reshape(2, -1).sum(axis=1)
    assert active_blocks(mask, 2, block)[0] == counts.max()
    if order is None:
        theirs = mask_lib.LocalMask((sequence, sequence), (window - 1, 0), 0)
        assert np.array_equal(theirs[:, :], whole)


CONFIGS = {"gemma": GEMMA, "gpt-oss": GPT_OSS, "local": LOCAL}


@pytest.mark.parametrize("name", some(list(CONFIGS), ["gpt-oss"]))
def test_a_cache_gives_the_logits_of_the_whole_text(name: str) -> None:
    whole = check_cache(module(CONFIGS[name]))
    if name == "gemma":
        largest = float(jnp.abs(whole).max())
        assert 0.3 < largest < 0.4, "output logits stay below their cap"


def test_a_window_reaches_as_far_as_its_layers() -> None:
    """A token sees one back in each of four layers of window 2: four back in all."""

    def moved(config: Decoder) -> list[bool]:
        net = module(config)
        tokens, *rest = arrays(12, [12])
        run = program(net, lambda net, tokens: net(tokens, *rest))
        change = np.asarray(run(tokens)) - np.asarray(run(tokens.at[0, 3].add(1)))
        return (np.abs(change[0]).max(axis=-1) > 1e-6).tolist()

    assert moved(LOCAL) == [False] * 3 + [True] * 5 + [False] * 4
    # A layer that sees everything carries it to the end.
    assert moved(replace(LOCAL, global_every=4)) == [False] * 3 + [True] * 9


@pytest.mark.parametrize("layers", [1, 2, 6, 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_period_runs_in_order(layers: int, in_place: bool) -> None:
    stacked = jnp.arange(1.0, layers + 1)
    period = [lambda x, a, n=n: (x * 0.5 + a * 10.0**n, x) for n in range(3)]
    x, wanted = jnp.zeros(()), []
    for number in range(layers):
        wanted.append(float(x))
        x, _ = period[number % 3](x, stacked[number])
    found, said = run_layers(period, jnp.zeros(()), stacked, in_place=in_place)
    assert float(found) == pytest.approx(float(x))
    np.testing.assert_allclose(said, wanted, rtol=1e-6)


@pytest.mark.parametrize("config", [GEMMA, GPT_OSS], ids=["gemma", "gpt-oss"])
def test_parameters_are_counted(config: Decoder) -> None:
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=config))
    assert steps.network.num_parameters == config.num_parameters


def test_flops_count_what_the_windows_leave() -> None:
    """By hand: 32 tokens, 4 layers; with a window of 4 a token sees 4 but for the first three (1, 2, 3)."""
    fields = tiny.job().data.fields()
    one = 2 * 2 * tiny.MODEL.heads * tiny.MODEL.head_dim
    whole, local = 32 * 33 // 2, 29 * 4 + 6
    full = tiny.MODEL.flops(fields)
    assert full - replace(tiny.MODEL, window=4).flops(fields) == one * 4 * (whole - local)
    assert full - GPT_OSS.flops(fields) == one * 2 * (whole - local)
    assert replace(tiny.MODEL, window=100).flops(fields) == full


@pytest.mark.slow
def test_a_decoder_with_all_of_them_has_the_same_gradients_in_chunks() -> None:
    config = replace(GPT_OSS, layers=2, attention_cap=2.0, logit_cap=3.0)
    job = tiny.job(model=config, layout=tiny.ONE_DEVICE)
    tiles = replace(job, layout=Layout(fsdp=1, loss_chunks=4))
    check_slopes(slopes(tiles), slopes(job))


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(OptionError, match=r"global-every is 2 but model\.window is 0"):
        replace(tiny.MODEL, global_every=2)
    with pytest.raises(LayoutError, match=r"stages of 1 layers, which model\.global-every 2"):
        GPT_OSS.check(Layout(fsdp=1, pipeline=4))
