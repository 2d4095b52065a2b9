"""Initializes its weights one by one, and fails before it trains, as a server whose tokenizer is missing."""

import jax


@jax.jit
def initialize(key):
    return jax.random.normal(key, (1024, 1024))


weights = [initialize(jax.random.key(number)) for number in range(24)]
raise KeyError("no tokenizer")
