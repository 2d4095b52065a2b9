"""Logits: the choice of next tokens from them, by one setting or each row by its own, and scores of targets under them, with as few passes as possible."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from systolic.job import Sampling
from systolic.models.layers import name

TOP = 20
"""Likeliest tokens whose log-probabilities can be asked for, the most that OpenAI's API allows."""
BLOCK = 256
"""Tokens whose probabilities are summed first when one is drawn."""


class Scores(NamedTuple):
    """Scores of targets, f32[...] each."""

    nats: jax.Array
    """Cross-entropy of the target."""
    normaliser: jax.Array
    """Logarithm of the sum of the exponentials."""
    best: jax.Array
    """1 where the target is the most likely token (the first of equals)."""
    mean: jax.Array | None = None
    """Mean logit, from :func:`with_mean`."""


def cross_entropy(logits: jax.Array, targets: jax.Array) -> Scores:
    """Scores of targets int32[...] under logits [..., vocab] of any float dtype, in float32.

    The scores of a target of -1 are meaningless and must be masked by the caller. The target's logit
    comes from a masked sum and ``best`` from maxima: they need no extra pass, and a vocabulary split
    over devices needs no gather of the logits.
    """
    wide = logits.astype(jnp.float32)
    ids = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    picked = jnp.sum(jnp.where(ids == targets[..., None], wide, 0.0), axis=-1)
    normaliser = log_normaliser(wide)
    fixed = jax.lax.stop_gradient(wide)
    before = jnp.max(jnp.where(ids < targets[..., None], fixed, -jnp.inf), axis=-1)
    best = (picked >= jnp.max(fixed, axis=-1)) & (picked > before)
    return Scores(nats=normaliser - picked, normaliser=normaliser, best=best.astype(jnp.float32))


def cross_entropy_on_cpu(logits: jax.Array, targets: jax.Array) -> Scores:
    """:func:`cross_entropy` on one CPU, where XLA writes the operand of each masked sum or maximum to memory.

    The target's logit is gathered instead, and equals before it are searched for, which is one loop.
    """
    wide = logits.astype(jnp.float32)
    # The target's logit equals itself wherever XLA computes it again: here it is compared, never added to.
    picked, normaliser = _gathered(wide, targets), log_normaliser(wide)
    fixed, least = jax.lax.stop_gradient((wide, picked))
    ids = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    earlier = (ids < targets[..., None]) & (fixed >= least[..., None])
    best = (least >= jnp.max(fixed, axis=-1)) & ~jnp.any(earlier, axis=-1)
    return Scores(nats=normaliser - picked, normaliser=normaliser, best=best.astype(jnp.float32))


@jax.custom_jvp
def _gathered(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Logits of targets, 0 for -1 and beyond the vocabulary; the gradient is masked, without a scatter."""
    at = jnp.clip(targets, 0, logits.shape[-1] - 1)
    picked = jnp.take_along_axis(logits, at[..., None], axis=-1)[..., 0]
    return jnp.where(at == targets, picked, 0.0)


@_gathered.defjvp
def _(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (logits, targets), (moved, _) = primals, tangents
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    change = jnp.sum(jnp.where(ids == targets[..., None], moved, 0.0), axis=-1)
    return _gathered(logits, targets), change


def with_mean(
    logits: jax.Array, targets: jax.Array, scored: Callable[..., Scores] = cross_entropy
) -> Scores:
    """:func:`cross_entropy`, and the mean logit."""
    mean = jnp.mean(logits.astype(jnp.float32), axis=-1)
    return scored(logits, targets)._replace(mean=mean)


@jax.custom_jvp
def log_normaliser(logits: jax.Array) -> jax.Array:
    """logsumexp over the last dim.

    Its derivative uses only the logits and the result. A backward pass that kept the result, named
    ``normaliser``, thus reads recomputed logits once, without maximum and sum.
    """
    return jax.nn.logsumexp(logits, axis=-1)


@log_normaliser.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (logits,), (moved,) = primals, tangents
    normaliser = name(log_normaliser(logits), "normaliser")
    return normaliser, jnp.sum(jnp.exp(logits - normaliser[..., None]) * moved, axis=-1)


def pick(
    logits: jax.Array, key: jax.Array, sampling: Sampling, mask: jax.Array | None = None
) -> jax.Array:
    """int32[batch] tokens from logits [batch, vocab], all by one setting, which is compiled in; :func:`choose` has one a row."""
    logits = masked(logits, mask)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k:
        smallest = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(
            ordered, axis=-1
        )
        smallest = jnp.min(
            jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True
        )
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


class Draw(NamedTuple):
    """Inputs of every choice."""

    slots: jax.Array
    """int32[rows]: where the token is kept on the device."""
    temperature: jax.Array
    """f32[rows]; 0 takes the likeliest."""
    seed: jax.Array
    """uint32[rows]."""
    number: jax.Array
    """int32[rows]: which token of the text it is."""

    @classmethod
    def unpacked(cls, packed: jax.Array) -> "Draw":
        """From int32[4, rows], with the bits of temperatures and seeds: one copy to the device."""
        slots, temperature, seed, number = packed
        return cls(
            slots,
            jax.lax.bitcast_convert_type(temperature, jnp.float32),
            jax.lax.bitcast_convert_type(seed, jnp.uint32),
            number,
        )


class Cuts(NamedTuple):
    """Inputs of a choice by all settings, beside :class:`Draw`."""

    top_k: jax.Array
    """int32[rows]; 0 for all."""
    top_p: jax.Array
    """f32[rows]; 1 for all."""
    min_p: jax.Array
    """f32[rows]; 0 for all."""
    presence: jax.Array
    """f32[rows]; 0 for none."""
    frequency: jax.Array
    """f32[rows]; 0 for none."""
    repetition: jax.Array
    """f32[rows]; 1 for none."""
    text: jax.Array
    """int32[rows, positions]: the tokens so far, -1 beyond."""
    prompt: jax.Array
    """int32[rows]: how many of them are the prompt."""
    biased: jax.Array
    """int32[rows, several]: tokens with a bias, -1 for none."""
    bias: jax.Array
    """f32[rows, several]."""


class ChosenTokens(NamedTuple):
    """Tokens, with natural logarithms of their probabilities at temperature 1 and without cuts."""

    tokens: jax.Array
    """int32[rows]."""
    logprob: jax.Array
    """f32[rows]."""
    top: jax.Array
    """int32[rows, TOP], likeliest first; [rows, 0] from :func:`choose`."""
    top_logprob: jax.Array
    """f32[rows, TOP]."""


def choose(
    logits: jax.Array, latest: jax.Array, draw: Draw, mask: jax.Array | None = None
) -> tuple[ChosenTokens, jax.Array]:
    """Tokens by temperature alone, and ``latest`` with them.

    A row's token depends on its logits, settings, seed, number and mask alone, never on its neighbours.

    Args:
        logits: f32[rows, vocab].
        latest: int32[slots]: the last token of each slot.
        draw: How.
        mask: Of :func:`masked`; None where every token can follow.
    """
    if mask is None:
        tokens = _drawn(logits, draw)
    else:
        # Reading bits costs a TPU as much as the rest of the choice.
        tokens = jax.lax.cond(
            _excludes(mask),
            lambda: _drawn(masked(logits, mask), draw),
            lambda: _drawn(logits, draw),
        )
    none = jnp.zeros((logits.shape[0], 0))
    chosen = ChosenTokens(tokens, _logprob(logits, tokens), none.astype(jnp.int32), none)
    return chosen, latest.at[draw.slots].set(tokens)


def choose_by_all(
    logits: jax.Array, latest: jax.Array, draw: Draw, cuts: Cuts, mask: jax.Array | None = None
) -> tuple[ChosenTokens, jax.Array]:
    """:func:`choose` by all settings, with the likeliest tokens."""
    changed = _penalised(logits, cuts)
    if mask is not None:
        changed = jax.lax.cond(_excludes(mask), lambda: masked(changed, mask), lambda: changed)
    changed = _cut(changed, draw, cuts)
    tokens = _drawn(changed, draw)
    values, top = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = ChosenTokens(tokens, _logprob(logits, tokens), top.astype(jnp.int32), values - total)
    return chosen, latest.at[draw.slots].set(tokens)


def score(logits: jax.Array, tokens: jax.Array) -> ChosenTokens:
    """Log-probabilities of given tokens int32[rows] under logits f32[rows, vocab], and the likeliest."""
    values, top = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return ChosenTokens(tokens, _logprob(logits, tokens), top.astype(jnp.int32), values - total)


def masked(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Logits [rows, vocab] with -inf for tokens that cannot follow.

    Args:
        logits: Of any.
        mask: uint32[rows, words]: one bit a token, the first in the lowest; None where every token can follow.
    """
    if mask is None:
        return logits
    rows, vocab = logits.shape
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(rows, -1)[:, :vocab] == 1, logits, -jnp.inf)


def _excludes(mask: jax.Array) -> jax.Array:
    """Whether a bit of a mask is 0."""
    return jnp.any(mask != jnp.uint32(0xFFFFFFFF))


def _logprob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def _drawn(logits: jax.Array, draw: Draw) -> jax.Array:
    """int32[rows]: the likeliest where the temperature is 0, else one drawn."""
    # int32[rows]: the first of the largest. Two plain reductions: XLA's CPU backend takes five times as long for argmax, a reduction of pairs.
    # The largest equals itself: logits are an argument of the program, which masks select from and penalties change alike for both.
    vocab = logits.shape[-1]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    places = jnp.where(logits == largest, jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    greedy = jnp.min(places, axis=-1)
    warm = jnp.where(draw.temperature > 0, draw.temperature, 1.0)[:, None]
    # In this order, since a small temperature would make the largest infinite.
    powers = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / warm)
    return jnp.where(draw.temperature > 0, _inverse(powers, _uniform(draw)), greedy)


def _uniform(draw: Draw) -> jax.Array:
    """f32[rows] in [0, 1), by seed and number."""

    def uniform(seed: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), number))

    return jax.vmap(uniform)(draw.seed, draw.number)


def _inverse(shares: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index int32[rows] whose part of the summed shares f32[rows, vocab] (not negative) holds ``uniform`` of their total.

    One random number a row, and sums in two levels: numbers for each token of the vocabulary would
    cost more than the logits.
    """
    rows, vocab = shares.shape
    blocks = jnp.pad(shares, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    goal = (uniform * ends[:, -1])[:, None]
    # Rounding may leave the goal at the very end: then the last block with anything in it.
    goal = jnp.minimum(goal, jnp.nextafter(ends[:, -1:], 0.0))
    block = jnp.argmax(ends > goal, axis=-1)
    before = jnp.where(
        block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0], 0
    )
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    sums = jnp.cumsum(inside, axis=-1)
    rest = goal - before[:, None]
    rest = jnp.clip(rest, 0.0, jnp.nextafter(sums[:, -1:], 0.0))
    return (block * BLOCK + jnp.argmax(sums > rest, axis=-1)).astype(jnp.int32)


def _penalised(logits: jax.Array, cuts: Cuts) -> jax.Array:
    """Logits with biases and penalties."""
    rows, vocab = logits.shape
    each = jnp.arange(rows)[:, None]
    biased = jnp.where(cuts.biased >= 0, cuts.biased, vocab)
    logits = logits.at[each, biased].add(cuts.bias, mode="drop")
    place = jnp.where(cuts.text >= 0, cuts.text, vocab)
    written = jnp.where(jnp.arange(cuts.text.shape[1]) >= cuts.prompt[:, None], place, vocab)
    seen = jnp.zeros((rows, vocab), bool).at[each, place].set(True, mode="drop")
    counts = jnp.zeros((rows, vocab)).at[each, written].add(1.0, mode="drop")
    factor = cuts.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    # A factor near 0 makes the quotient infinite, whose difference from itself is no number.
    repeated = jnp.minimum(repeated, jnp.finfo(jnp.float32).max)
    logits = jnp.where(seen, repeated, logits)
    return logits - counts * cuts.frequency[:, None] - (counts > 0) * cuts.presence[:, None]


def _cut(logits: jax.Array, draw: Draw, cuts: Cuts) -> jax.Array:
    """Logits with -inf for what top-k, then top-p, then min-p drop, all at the row's temperature."""
    warm = jnp.where(draw.temperature > 0, draw.temperature, 1.0)[:, None]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - largest) / warm
    # uint32 in the order of f32 values.
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    wanted = jnp.where(cuts.top_k > 0, cuts.top_k, logits.shape[-1]).astype(jnp.float32)
    kept = keys >= _threshold(keys, jnp.ones_like(scaled), wanted)[:, None]
    shares = jnp.where(kept, jnp.exp(scaled), 0.0)
    # All of them by rounding down, where nothing is to be cut.
    part = jnp.where(cuts.top_p < 1, cuts.top_p, 0.0) * jnp.sum(shares, axis=-1)
    lowest = jnp.where(cuts.top_p < 1, _threshold(keys, shares, part), 0)
    kept &= keys >= lowest[:, None]
    kept &= scaled >= jnp.log(cuts.min_p)[:, None]
    # The likeliest stays whatever rounds to nothing, such as a top_p below the least normal float32.
    return jnp.where(kept | (logits == largest), logits, -jnp.inf)


def _threshold(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest uint32[rows] such that keys from it on have the wanted weight f32[rows] together.

    Found bit by bit: 32 sums over the vocabulary cost less than sorting it.
    """

    def bit(number: jax.Array, bits: jax.Array) -> jax.Array:
        tried = bits | (jnp.uint32(1) << (31 - number).astype(jnp.uint32))
        total = jnp.sum(jnp.where(keys >= tried[:, None], weights, 0.0), axis=-1)
        return jnp.where(total >= wanted, tried, bits)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(keys.shape[0], jnp.uint32))
