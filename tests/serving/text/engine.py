"""A small real engine: random weights, programs compiled for it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from systolic.models.decoder.config import Decoder
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.scheduler import PagePool
from systolic.serving.text.sequence import EngineWatcher
from systolic.setup import set_up
from tests.cli.tiny import job

SMALL = Decoder(layers=2, d_model=32, d_ff=32, heads=2, kv_heads=1, head_dim=16, vocab=264)
SIZES = EngineSizes(rows=4, context=96, chunk=24, page_size=8, programs=(2, 2, 2), strict=True)
"""A chunk that is no power of two."""


class Small:
    """Steps and weights that say something: random output matrices prefer one token everywhere."""

    def __init__(self, model: Decoder = SMALL, seed: int = 0) -> None:
        self.steps = set_up(job(model=model, batch=2)).steps
        params, self.rest = jax.jit(self.steps.network.init)(jax.random.key(seed))
        draw = np.random.default_rng(seed + 1)  # without a compile for each shape
        self.params = {
            path: array + 0.3 * draw.standard_normal(array.shape).astype(np.float32)
            for path, array in jax.device_get(params).items()
        }
        self.params = jax.device_put(self.params)

        @jax.jit
        def whole(row: jax.Array) -> jax.Array:
            module = self.steps.network.module(self.params, self.rest, train=False)
            positions = jnp.arange(row.shape[1])[None]
            return jax.nn.log_softmax(module(row, jnp.ones_like(row), positions)[0])

        self.whole = whole
        """Log-probabilities f32[positions, vocab] after each token of a row int32[1, positions]."""

    def engine(self, sizes: EngineSizes = SIZES, **changed) -> Engine:
        engine = self.opened(replace(sizes, **changed))
        engine.start()
        return engine

    def opened(self, sizes: EngineSizes, watcher: EngineWatcher | None = None) -> Engine:
        """An engine that is not started."""
        return open_engine(self.steps, self.params, self.rest, sizes, watcher)

    def greedy(self, tokens: list[int], count: int, change=None) -> tuple[list[int], list[float]]:
        """The likeliest ``count`` tokens after some, each by reading the whole text anew, and their log-probabilities."""
        text, scores = list(tokens), []
        for _ in range(count):
            row = np.array([[*text, *[0] * (SIZES.context - len(text))]], np.int32)
            found = np.array(np.asarray(self.whole(row))[len(text) - 1])
            if change is not None:
                change(found, text)
            text.append(int(found.argmax()))
            scores.append(float(found.max()))
        return text[len(tokens) :], scores


def with_pages(engine: Engine, count: int) -> Engine:
    """An engine that is not started, of fewer pages than its programs have, which are those of other tests."""
    pool = engine.scheduler.pool
    assert count < pool.num_pages
    engine.scheduler.pool = PagePool(num_pages=count, page_size=pool.page_size)
    return engine


@cache
def shared() -> Small:
    """The usual one, made once for all tests of a process."""
    return Small()
