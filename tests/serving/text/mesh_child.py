"""Engines on four virtual devices, for the tests of the same name: prints a JSON object a line."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from systolic.models.decoder.config import Decoder, Dispatch, Latent
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import TextRequest, TokenChoice
from systolic.steps.mesh import make_mesh
from systolic.steps.paged_sharding import engine_layout
from systolic.steps.steps import StepFunctions
from systolic.steps.target import MeshTarget
from tests.cli.tiny import job

GROUPED = Decoder(
    layers=2, d_model=32, d_ff=32, heads=4, kv_heads=2, head_dim=16, vocab=264, qkv_bias=True
)
MIXTURE = replace(
    GROUPED, qkv_bias=False, experts=4, experts_per_token=2, dispatch=Dispatch.dropless
)
UNTIED = replace(GROUPED, tie_embeddings=False, qk_norm=True, window=20, vocab=263)
LATENT = replace(
    GROUPED,
    qkv_bias=False,
    kv_heads=4,
    latent=Latent(
        kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    ),
)
MODELS = {"grouped": GROUPED, "mixture": MIXTURE, "untied": UNTIED, "latent": LATENT}
SIZES = EngineSizes(rows=4, context=96, chunk=24, page_size=8, programs=(1, 1, 1), strict=True)
PROMPTS = [[(7 * n * n + text) % 251 for n in range(length)] for text, length in enumerate((3, 30))]


def steps_on(model: Decoder, first: int = 0, tensor: int = 1, expert: int = 1) -> StepFunctions:
    layout = engine_layout(tensor, expert)
    devices = jax.devices()[first : first + tensor * expert]
    mesh = make_mesh(layout, devices)
    target = MeshTarget(platform="cpu", layout=layout, dtype="float32", mesh=mesh)
    return StepFunctions(replace(job(model=model, batch=2), layout=layout), target, trains=False)


def weights_on(steps: StepFunctions) -> tuple[Any, Any]:
    """Random weights that say something; the same on every mesh."""
    alone = steps_on(steps.job.model)  # ty: ignore[invalid-argument-type]
    params, rest = jax.jit(alone.network.init)(jax.random.key(0))
    draw = jax.random.split(jax.random.key(1), len(params))
    drawn = {
        path: array + 0.3 * jax.random.normal(key, array.shape, jnp.float32)
        for key, (path, array) in zip(draw, params.items(), strict=True)
    }
    places = steps.shardings
    return jax.device_put(drawn, places.params), jax.device_put(rest, places.model_state)


def engine_on(steps: StepFunctions, **changed: Any) -> Engine:
    return open_engine(steps, *weights_on(steps), replace(SIZES, **changed))


def collectives(compiled: Any) -> dict[str, int]:
    """Kinds of collectives of a compiled program with the shapes of their results, and how many there are."""
    found = re.findall(
        r"= (\S+?)(?:\{\S*)? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(",
        compiled.as_text(),
    )
    return dict(Counter(f"{kind} {shape}" for shape, kind in found))


def ask(engine: Engine, **more: Any) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of greedy answers to all prompts at once."""
    greedy = TokenChoice(temperature=0.0)
    streams = [
        engine.submit(
            TextRequest(
                tokens=prompt, max_tokens=10, choice=greedy, ignore_ends=True, logprobs=0, **more
            )
        )
        for prompt in PROMPTS
    ]
    return [
        [(token.id, token.logprob) for piece in stream for token in piece.tokens]
        for stream in streams
    ]


def answers(name: str, tensor: int, expert: int) -> dict[str, Any]:
    steps = steps_on(MODELS[name], 0, tensor, expert)
    engine = engine_on(steps)
    engine.start()
    found = ask(engine)
    programs, pool = engine.runner.programs, engine.scheduler.pool
    pages = jax.tree.leaves(engine.runner._pages)
    engine.stop()
    shape = next(shape for shape in programs.read if shape.rows)
    compiled = programs.read[shape]
    return {
        "name": f"{name} tensor {tensor} expert {expert}",
        "tensor": tensor,
        "answers": found,
        "step": collectives(compiled),
        "choice": collectives(programs.choose[shape.texts]),
        "aliased_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "pages_bytes": engine.memory.pages_bytes,
        "weights_bytes": engine.memory.weights_bytes,
        "held_bytes": sum(page.addressable_shards[0].data.nbytes for page in pages),
        "in_use": pool.in_use,
        "pages": pool.total,
    }


def main(words: list[str]) -> None:
    # The numbers are the same, in less than half the time.
    jax.config.update("jax_disable_most_optimizations", True)
    for word in words:
        name, tensor, expert = word.split(":")
        print(json.dumps(answers(name, int(tensor), int(expert))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
