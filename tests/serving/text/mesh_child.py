"""Engines on four virtual devices, for the tests of the same name: prints a JSON object a line."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.data.text.text_data import TextData
from systolic.formats.source import open_source
from systolic.inference.model import from_source
from systolic.job import Adapter, AdapterKind, Precision
from systolic.models.adapters import BASE, merged
from systolic.models.decoder.config import Decoder, Dispatch, Latent
from systolic.serving.text import replicas as placement_module
from systolic.serving.text.converting import held_bytes
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.replicas import ReplicaPlacement, Replicas
from systolic.serving.text.request import SamplingParams, TextOutput, TextRequest
from systolic.serving.text.sequence import EngineLoad, StepFacts
from systolic.steps.paged import PagedSteps
from systolic.steps.serving_layout import DeviceShares, ServingLayout
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget, make_mesh
from tests import weights
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
NEW = 10
PROMPTS = [[(7 * n * n + text) % 251 for n in range(length)] for text, length in enumerate((3, 30))]


def steps_on(
    model: Decoder,
    first: int = 0,
    tensor: int = 1,
    expert: int = 1,
    adapter: Adapter = Adapter(),  # noqa: B008 (frozen)
) -> StepFunctions:
    layout = DeviceShares(devices=4, engines=1, tensor=tensor, expert=expert, reason="").layout
    devices = jax.devices()[first : first + tensor * expert]
    mesh = make_mesh(layout, devices)
    target = MeshTarget(platform="cpu", layout=layout, dtype="float32", mesh=mesh)
    own = replace(job(model=model, batch=2), layout=layout, adapter=adapter)
    return StepFunctions(own, target, trains=False)


def weights_on(steps: StepFunctions) -> tuple[Any, Any]:
    """Random weights that say something; the same on every mesh, and drawn without a compile."""
    draw, network, places = np.random.default_rng(0), steps.network, steps.shardings

    def some(path: str) -> np.ndarray:
        shape = network.params[path].shape
        centre = 1.0 if path.endswith("scale") else 0.0
        return (centre + 0.3 * draw.standard_normal(shape)).astype(np.float32)

    params = {path: jax.device_put(some(path), places.params[path]) for path in network.params}
    rest = {
        path: jax.device_put(np.zeros(a.shape, a.dtype), places.model_state[path])
        for path, a in network.model_state.items()
    }
    return params, rest


def engine_on(steps: StepFunctions, **changed: Any) -> Engine:
    return open_engine(steps, *weights_on(steps), replace(SIZES, **changed))


def collectives(compiled: Any) -> dict[str, int]:
    """Kinds of collectives of a compiled program with the shapes of their results, and how many there are."""
    found = re.findall(
        r"= (\S+?)(?:\{\S*)? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(",
        compiled.as_text(),
    )
    return dict(Counter(f"{kind} {shape}" for shape, kind in found))


def ask(engine: Engine | Replicas, **more: Any) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of greedy answers to all prompts at once."""
    greedy = SamplingParams(temperature=0.0)
    streams = [
        engine.submit(
            TextRequest(
                tokens=prompt, max_tokens=NEW, sampling=greedy, ignore_ends=True, logprobs=0, **more
            )
        )
        for prompt in PROMPTS
    ]
    return [
        [
            (token, value)
            for piece in stream
            for token, (value, _) in zip(piece.token_ids, piece.logprobs, strict=True)
        ]
        for stream in streams
    ]


def read_whole(name: str, own: Any = None) -> list[list[tuple[int, float]]]:
    """What :func:`ask` finds, by reading each text anew for every token, on one device; with parameters of its own, or those of :func:`weights_on`."""
    steps = steps_on(MODELS[name])
    params, rest = weights_on(steps)
    params = params if own is None else {path: jnp.asarray(own[path]) for path in params}

    @jax.jit
    def likeliest(rows: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        module = steps.network.module(params, rest, train=False)
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        logits = module(rows, jnp.ones_like(rows), positions)
        scores = jax.nn.log_softmax(logits[jnp.arange(len(PROMPTS)), last])
        return scores.argmax(axis=-1), scores.max(axis=-1)

    texts = [list(prompt) for prompt in PROMPTS]
    found: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
    for _ in range(NEW):
        rows = np.array([text + [0] * (48 - len(text)) for text in texts], np.int32)
        tokens, scores = likeliest(rows, np.array([len(text) - 1 for text in texts]))
        for text, made, token, score in zip(texts, found, tokens, scores, strict=True):
            text.append(int(token))
            made.append((int(token), float(score)))
    return found


def answers(name: str, tensor: int, expert: int) -> dict[str, Any]:
    engine = engine_on(steps_on(MODELS[name], 0, tensor, expert))
    engine.start()
    found = ask(engine)
    programs, pool = engine.runner.programs, engine.scheduler.pool
    pages = jax.tree.leaves(engine.runner._pages)
    engine.stop()
    shape = next(shape for shape in programs.read if shape.rows)
    compiled = programs.read[shape]
    alone = PagedSteps(steps_on(MODELS[name]), SIZES.page_size)
    return {
        "model": name,
        "tensor": tensor,
        "expert": expert,
        "answers": found,
        "step": collectives(compiled),
        "choice": collectives(programs.choose[shape.texts]),
        "aliased_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "pages_bytes": engine.memory.pages_bytes,
        "weights_bytes": engine.memory.weights_bytes,
        "held_bytes": sum(page.addressable_shards[0].data.nbytes for page in pages),
        "alone": {
            "weights_bytes": held_bytes(alone.placed_weights),
            "pages_bytes": held_bytes(alone.placed_pages(pool.num_pages)),
        },
        "in_use": pool.in_use,
        "pages": pool.total,
    }


def adapted(name: str, tensor: int) -> dict[str, Any]:
    """Answers of a model and of two adapters beside it on a mesh, and those of each merged on one device."""
    adapter = Adapter(kind=AdapterKind.lora, rank=4, alpha=4.0)
    steps, (plain, _) = (
        steps_on(MODELS[name], 0, tensor, 1, adapter),
        weights_on(steps_on(MODELS[name])),
    )
    params, state = steps.network.shapes
    zeros = {
        path: jnp.zeros(a.shape, device=steps.shardings.params[path]) for path, a in params.items()
    }
    frozen = {path: np.asarray(plain[path.removesuffix(f"/{BASE}")]) for path in state}
    placed = {
        path: jax.device_put(a, steps.shardings.model_state[path]) for path, a in frozen.items()
    }
    engine = open_engine(steps, zeros, placed, replace(SIZES, adapters=2))
    engine.start()
    found, expected, draw = [ask(engine)], [read_whole(name)], np.random.default_rng(1)
    shapes = engine.runner.programs.paged.adapter_shapes
    for number in (1, 2):
        own = {
            path: (0.3 * draw.standard_normal(shape)).astype(np.float32)
            for path, shape in shapes.items()
        }
        engine.place_adapter(number, own)
        found.append(ask(engine, adapter=number, root=bytes([number])))
        expected.append(read_whole(name, merged(own, frozen, adapter)))
    engine.stop()
    return {"answers": found, "expected": expected}


def busy(engine: Engine) -> dict[str, Any]:
    """An engine with too few pages for all its texts, of which one is cancelled: preempts, and ends with every page free."""
    engine.start()
    greedy = SamplingParams(temperature=0.0)
    requests = [
        TextRequest(tokens=prompt, max_tokens=40, sampling=greedy, ignore_ends=True)
        for prompt in (*PROMPTS, [9, 8, 7], [5] * 20)
    ]
    streams = [engine.submit(request) for request in requests]
    for piece in streams[2]:
        streams[2].cancel()
        if piece.finish is not None:
            cancelled = piece.finish.value
    ends = [list(stream)[-1].finish for stream in (*streams[:2], streams[3])]
    engine.drain(60)
    pool = engine.scheduler.pool
    return {
        "finished": [one.value for one in ends if one is not None],
        "cancelled": cancelled,
        "in_use": pool.in_use,
        "available": pool.available,
    }


def crowded(name: str) -> dict[str, Any]:
    preempted = []

    class Watcher:
        def stepped(self, facts: StepFacts) -> None:
            preempted.append(facts.preempted)

        def ended(self, output: TextOutput, load: EngineLoad) -> None:
            pass

    steps = steps_on(MODELS[name], 0, 2)
    sizes = replace(SIZES, pages=14)
    return busy(open_engine(steps, *weights_on(steps), sizes, Watcher())) | {
        "preempted": sum(preempted)
    }


def chosen(name: str, capacity: int) -> dict[str, Any]:
    """What is chosen for a model where nothing is asked for, with so many bytes a device."""
    placement = ReplicaPlacement(layout=ServingLayout(), sizes=SIZES)
    placement_module.capacity_bytes = lambda _: capacity
    given = job(model=MODELS[name], batch=2)
    places = [placement.place(given, "cpu", jax.devices(), number) for number in range(4)]
    return {
        "engines": placement.engines,
        "tensor": [one[0].tensor for one in places if one is not None],
        "devices": [[device.id for device in one[1]] for one in places if one is not None],
    }


def replicated(name: str) -> dict[str, Any]:
    """Two engines of two devices each, asked for the same texts twice."""
    engines = [engine_on(steps_on(MODELS[name], first, 2)) for first in (0, 2)]
    replicas = Replicas(engines, SIZES.page_size)
    replicas.start()
    found = [ask(replicas), ask(replicas)]
    replicas.drain(60)
    return {
        "expected": read_whole(name),
        "chosen": [chosen(name, 1 << 30), chosen(name, 250_000)],
        "answers": found,
        "devices": [
            sorted(device.id for device in jax.tree.leaves(engine.runner._pages)[0].devices())
            for engine in engines
        ],
        "made": [engine._number for engine in engines],
        "in_use": [engine.scheduler.pool.in_use for engine in engines],
    }


def real() -> dict[str, Any]:
    """SmolLM2, whose nine heads three devices divide, as a server opens it."""
    placement = ReplicaPlacement(layout=ServingLayout(data=1, tensor=3), sizes=SIZES)
    model = from_source(
        open_source(weights.smollm2()),
        Precision.f32,
        warn=print_to_stderr,
        place=lambda job, platform, devices: placement.place(job, platform, devices, 0),
    )
    sizes = EngineSizes(rows=1, context=32, chunk=32, page_size=32, programs=(1, 1, 1))
    held = model.weights.params["blocks/query"].addressable_shards
    engine = open_engine(model.setup.steps, model.weights.params, model.weights.model_state, sizes)
    engine.start()
    data = model.job.data
    assert isinstance(data, TextData)
    tokens = data.get_tokenizer().encode("The capital of France is")
    greedy = SamplingParams(temperature=0.0)
    stream = engine.submit(TextRequest(tokens=tokens, max_tokens=6, sampling=greedy))
    text = "".join(piece.text for piece in stream)
    engine.stop()
    return {
        "text": text,
        "query": [shard.data.shape for shard in held],
        "step": collectives(next(iter(engine.runner.programs.read.values()))),
    }


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def main(words: list[str]) -> None:
    # The numbers are the same, in less than half the time.
    jax.config.update("jax_disable_most_optimizations", True)
    expected: dict[str, Any] = {}
    for word in words:
        name, *sizes = word.split(":")
        if name == "smollm2":
            print(json.dumps(real()), flush=True)
            continue
        if sizes == ["busy"]:
            print(json.dumps(crowded(name)), flush=True)
            continue
        if sizes == ["replicas"]:
            print(json.dumps(replicated(name)), flush=True)
            continue
        tensor, expert = sizes
        if expert == "adapters":
            print(json.dumps(adapted(name, int(tensor))), flush=True)
            continue
        if name not in expected:
            expected[name] = read_whole(name)
        found = answers(name, int(tensor), int(expert))
        print(json.dumps({**found, "expected": expected[name]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
