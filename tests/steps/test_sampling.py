"""Choices of tokens against definitions written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systolic.steps import logits as choosing
from systolic.steps.logits import Cuts, Draw
from tests.compiles import as_users_do

# As a server runs them, and in one compile a shape.
choose, choose_by_all = jax.jit(choosing.choose), jax.jit(choosing.choose_by_all)
penalised, score = jax.jit(choosing._penalised), jax.jit(choosing.score)
VOCAB = 700
CUTS = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
}


def draw(rows: int, temperature: float, first: int = 0) -> Draw:
    return Draw(
        jnp.arange(rows),
        jnp.full((rows,), temperature, jnp.float32),
        jnp.arange(first, first + rows, dtype=jnp.uint32),
        jnp.zeros((rows,), jnp.int32),
    )


def cuts(rows: int, text=(), prompt: int = 0, bias=(), **given) -> Cuts:
    values = {**CUTS, **given}
    one = [
        jnp.full((rows,), value, jnp.int32 if name == "top_k" else jnp.float32)
        for name, value in values.items()
    ]
    text = jnp.asarray([[*text, -1, -1]] * rows, jnp.int32)
    ids = jnp.asarray([[*[i for i, _ in bias], -1]] * rows, jnp.int32)
    by = jnp.asarray([[*[b for _, b in bias], 0.0]] * rows, jnp.float32)
    return Cuts(*one, text, jnp.full((rows,), prompt, jnp.int32), ids, by)


def kept(logits: np.ndarray, k: int, p: float, least: float) -> np.ndarray:
    """Tokens that top-k, top-p and min-p leave, by their definitions."""
    order = np.argsort(-logits, kind="stable")
    order = order[: k or len(order)]
    shares = np.exp(logits[order] - logits.max())
    shares = shares / shares.sum()
    before = np.cumsum(shares) - shares
    order = order[before < p]
    every = np.exp(logits - logits.max())
    return np.array([i for i in order if every[i] >= least])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 30),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([0.5, 1.0, 1.7]),
)
def test_only_what_the_cuts_leave_is_drawn(seed, k, p, least, temperature):
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    rows = 64
    many = jnp.broadcast_to(jnp.asarray(logits), (rows, VOCAB))
    given = cuts(rows, top_k=k, top_p=p, min_p=least)
    made = choose_by_all(many, jnp.zeros((rows,), jnp.int32), draw(rows, temperature), given)
    allowed = kept(logits / temperature, k, p, least)
    assert set(np.asarray(made[0].tokens)) <= set(allowed)
    np.testing.assert_array_equal(made[1], made[0].tokens)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_draws_have_the_probabilities_of_the_softmax(temperature):
    logits = np.array([0.0, 1.0, 2.0, -1.0, 3.0, *[-np.inf] * 400, 2.5], np.float32)
    rows = 20_000
    many = jnp.broadcast_to(jnp.asarray(logits), (rows, len(logits)))
    made = choose(many, jnp.zeros((rows,), jnp.int32), draw(rows, temperature))[0]
    wanted = np.exp(logits / temperature)
    wanted /= wanted.sum()
    found = np.bincount(np.asarray(made.tokens), minlength=len(logits)) / rows
    # Four standard deviations of a share of 20,000 draws.
    assert np.all(np.abs(found - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / rows))


def test_no_temperature_takes_the_likeliest_and_says_its_logarithm():
    logits = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    made, latest = choose(jnp.asarray(logits), jnp.zeros((7,), jnp.int32), draw(5, 0.0))
    np.testing.assert_array_equal(made.tokens, logits.argmax(-1))
    np.testing.assert_array_equal(latest[:5], logits.argmax(-1))
    wanted = jax.nn.log_softmax(logits)[np.arange(5), logits.argmax(-1)]
    np.testing.assert_allclose(made.logprob, wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_likeliest_is_found_behind_a_norm_and_penalties(dtype):
    """As users compile it: XLA may compute logits again, rounded otherwise than the largest that they are compared with."""
    full = as_users_do() | {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    rows, choices = 16, [choosing.choose_by_all, lambda *given: choosing.choose(*given[:3])]

    def chosen(x, kernel, scale, bias, how, given):
        y = x @ kernel
        centred = y - y.mean(-1, keepdims=True)
        y = centred * (jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale) + bias
        logits, latest = y.astype(jnp.float32), jnp.zeros((rows,), jnp.int32)
        return logits, [choice(logits, latest, how, given)[0].tokens for choice in choices]

    compiled = None
    for seed in range(10):
        rng = np.random.default_rng(seed)
        shapes = ((rows, 24), (24, VOCAB), VOCAB, VOCAB)
        arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
        given = cuts(rows, rng.integers(0, VOCAB, 90).tolist(), 7, [(3, 0.7)], presence=0.3,
                     frequency=0.21, repetition=1.37, top_p=0.9, min_p=0.1)  # fmt: skip
        arguments = (*arrays, draw(rows, 0.0), given)
        compiled = compiled or jax.jit(chosen).lower(*arguments).compile(full)
        logits, tokens = compiled(*arguments)
        for scores, found in zip((penalised(logits, given), logits), tokens, strict=True):
            own = np.take_along_axis(np.asarray(scores), np.asarray(found)[:, None], -1)[:, 0]
            assert (own >= scores.max(-1) - 1e-4).all()


def test_a_row_is_the_same_alone_and_among_others():
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    latest = jnp.zeros((8,), jnp.int32)
    together = choose(jnp.asarray(logits), latest, draw(8, 1.0))[0].tokens
    for row in range(8):
        alone = choose(jnp.asarray(logits[row : row + 1]), latest, draw(1, 1.0, row))[0].tokens
        assert alone[0] == together[row]


def test_penalties_and_biases_are_those_of_the_definitions():
    logits = np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32)
    text, prompt = [3, 5, 5, 9, 9, 9], 2
    given = cuts(
        1,
        text,
        prompt,
        [(11, 2.5), (5, -1.0)],
        presence=0.3,
        frequency=0.2,
        repetition=1.5,
    )
    wanted = logits[0].copy()
    wanted[11] += 2.5
    wanted[5] -= 1.0
    for token in {3, 5, 9}:
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    for token, times in {5: 1, 9: 3}.items():
        wanted[token] -= 0.2 * times + 0.3
    np.testing.assert_allclose(penalised(jnp.asarray(logits), given)[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0])
def test_settings_below_the_least_float_keep_the_likeliest(temperature):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 123], logits[:, 124] = 30.0, 29.0
    latest = jnp.zeros((3,), jnp.int32)
    small = {"top_p": 1e-40, "repetition": 1e-39}
    for name, value in small.items():
        given = cuts(3, [5, 123], 1, **{name: value})
        made = choose_by_all(jnp.asarray(logits), latest, draw(3, temperature), given)[0]
        np.testing.assert_array_equal(made.tokens, [123] * 3, name)


def test_the_likeliest_come_first_with_their_logarithms():
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32)
    tokens = jnp.asarray([1, 2, 3])
    made = score(jnp.asarray(logits), tokens)
    every = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(made.logprob, every[np.arange(3), [1, 2, 3]], rtol=1e-5)
    order = np.argsort(-every, axis=-1)[:, : made.top.shape[1]]
    np.testing.assert_array_equal(made.top, order)
    np.testing.assert_allclose(made.top_logprob, np.take_along_axis(every, order, -1), rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_tokens_of_the_mask_are_chosen_with_the_probabilities_of_the_model(temperature):
    rows, drawn = 64, np.random.default_rng(3)
    logits = drawn.normal(0, 3, (rows, VOCAB)).astype(np.float32)
    allowed = drawn.random((rows, VOCAB)) < 0.01
    allowed[:, 699], allowed[0] = True, True
    bits = np.zeros((rows, 704), bool)  # 22 words
    bits[:, :VOCAB] = allowed
    mask = jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.uint32))
    each, latest = draw(rows, temperature), jnp.zeros((rows,), jnp.int32)
    plain = choose(jnp.asarray(logits), latest, each, mask)[0]
    every = choose_by_all(jnp.asarray(logits), latest, each, cuts(rows, top_k=2), mask)[0]
    best = np.argsort(np.where(allowed, -logits, np.inf), axis=1)[:, :2]
    for made in (plain, every):
        tokens = np.asarray(made.tokens)
        assert allowed[np.arange(rows), tokens].all()
        wanted = jax.nn.log_softmax(logits)[np.arange(rows), tokens]
        np.testing.assert_allclose(made.logprob, wanted, rtol=1e-4)
    # Cuts are made among the tokens of the mask.
    assert all(token in pair for token, pair in zip(np.asarray(every.tokens), best, strict=True))
    np.testing.assert_array_equal(every.top[0, :5], np.argsort(-logits[0])[:5])
    if not temperature:
        np.testing.assert_array_equal(plain.tokens, best[:, 0])
    unmasked = choose(jnp.asarray(logits), latest, each)[0]
    assert unmasked.tokens[0] == plain.tokens[0]
