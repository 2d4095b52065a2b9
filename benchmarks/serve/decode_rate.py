"""Decode bandwidth and prefill MFU of a decoder's serving step on this machine's accelerator, beside transformers.

    python benchmarks/serve/decode_rate.py --json results.json

A decoder of the shape of Llama 3.2 1B with random bfloat16 weights, 512 tokens behind every text. Ours is
the step that `systolic serve` runs, its tokens chosen on the device; transformers' is a forward pass of
the same shape with a static cache under torch.compile (mode reduce-overhead, which uses CUDA graphs).
Rates are bytes that have to be read (weights once, keys and values of each text) over seconds a step.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

CONTEXT = 512
BATCHES = (1, 16, 64, 256)
PROMPT = 2048
SIZE = 64
STEPS = 40
SHAPE = {
    "layers": 16,
    "d_model": 2048,
    "d_ff": 8192,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab": 128256,
}


def median(values):
    return sorted(values)[len(values) // 2]


def copy_rate():
    """Bytes read and written a second by a copy of 2 GiB."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((1 << 30,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    copy(x).block_until_ready()
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        copy(x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 2 * x.nbytes / median(seconds)


def model():
    """Steps and bfloat16 weights of the decoder."""
    import jax

    from systolic.data.text.documents import StandardLibrary
    from systolic.job import Batch, Job, Layout, Precision
    from systolic.models.decoder.config import Decoder
    from systolic.steps.paged import PagedSteps
    from systolic.steps.step_functions import StepFunctions
    from systolic.steps.target import MeshTarget
    from systolic.steps.tasks import LanguageModel

    platform = jax.devices()[0].platform
    platform = "gpu" if platform == "cuda" else platform
    job = Job(
        name="serve",
        model=Decoder(**SHAPE, tie_embeddings=True),
        task=LanguageModel(),
        data=StandardLibrary(sequence=128),
        steps=1,
        batch=Batch(total=1),
        precision=Precision.bf16,
        layout=Layout(data=1, fsdp=1),
    )
    steps = StepFunctions(job, MeshTarget.of(job, platform, jax.devices()[:1]))
    paged = PagedSteps(steps, SIZE)
    weights = jax.jit(lambda key: paged.weights(*steps.network.init(key)))(jax.random.key(0))
    return paged, weights


def seconds_of_a_step(paged, weights, rows, prompt=0):
    """Median seconds of a step, tokens chosen on the device, and seconds of compiling it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from systolic.steps.logits import Draw, choose
    from systolic.steps.paged import StepInput, StepShape

    parts, behind = (1, 0) if prompt else (0, CONTEXT)
    wide = -(-(prompt or CONTEXT + 4 * STEPS) // SIZE)
    texts, tokens = rows + parts, rows + prompt
    pages = jax.jit(lambda: paged.empty_pages(texts * wide + 1))()
    latest = jnp.zeros((texts + 1,), jnp.int32)
    shape = StepShape(rows, parts, prompt, wide)
    table = (1 + np.arange(texts * wide)).astype(np.int32)
    numbers = np.arange(texts, dtype=np.int32)
    draw = np.stack([numbers, *np.zeros((3, texts), np.int32)])

    def asked(step):
        arrays = (
            np.zeros(tokens),
            np.arange(rows),
            np.full(texts, behind + step),
            np.full(texts, prompt or 1),
            table,
        )
        return np.concatenate([array.astype(np.int32) for array in arrays])

    def read(weights, pages, latest, packed):
        asked = StepInput.unpacked(packed, shape, 0)
        return paged.read(weights, pages, latest, asked, (parts, prompt))

    begin = time.perf_counter()
    program = jax.jit(read, donate_argnums=1).lower(weights, pages, latest, asked(0)).compile()
    compiled = time.perf_counter() - begin
    pick = jax.jit(lambda *given: choose(*given[:2], Draw.unpacked(given[2])), donate_argnums=1)
    seconds = []
    for turn in range(4):
        begin, count = time.perf_counter(), STEPS if turn else 3
        for step in range(count):
            logits, pages = program(weights, pages, latest, asked(step if rows else 0))
            _, latest = pick(logits, latest, draw)
        latest.block_until_ready()
        seconds.append((time.perf_counter() - begin) / count)
    return median(seconds[1:]), compiled


def ours(found):
    import jax

    paged, weights = model()
    parameter_bytes = sum(a.nbytes for a in jax.tree.leaves(weights))
    row_bytes = paged.page_bytes() // SIZE * CONTEXT
    for batch in BATCHES:
        # A GPU's matmuls of fewer rows are slower than of eight: the engine pads to these.
        second, compiled = seconds_of_a_step(paged, weights, max(batch, 8))
        rate = (parameter_bytes + batch * row_bytes) / second
        found[f"ours decode {batch}"] = {
            "seconds": second,
            "bytes_per_second": rate,
            "tokens_per_second": batch / second,
            "compile_seconds": compiled,
        }
        print(batch, found[f"ours decode {batch}"], flush=True)
    second, compiled = seconds_of_a_step(paged, weights, 0, PROMPT)
    flops = prompt_flops(parameter_bytes // 2)
    found["ours prefill"] = {"seconds": second, "flops_per_second": flops / second}
    print("prefill", found["ours prefill"], flush=True)


def prompt_flops(parameters):
    """Of a prompt without its logits but the last: two for each weight of a matrix and token, and causal attention."""
    matrices = parameters - SHAPE["vocab"] * SHAPE["d_model"]
    attention = 2 * SHAPE["layers"] * SHAPE["heads"] * SHAPE["head_dim"] * PROMPT * PROMPT
    return 2 * matrices * PROMPT + attention + 2 * SHAPE["vocab"] * SHAPE["d_model"]


def their_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=SHAPE["d_model"],
        intermediate_size=SHAPE["d_ff"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        head_dim=SHAPE["head_dim"],
        vocab_size=SHAPE["vocab"],
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(torch.bfloat16)
    return config, LlamaForCausalLM(config).to("cuda").eval()


def timed(step, count):
    import torch

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / count)
    return median(seconds)


def their_step(config, model, batch):
    """A decode step over a static cache that holds the context."""
    import torch
    from transformers import StaticCache

    torch._dynamo.reset()
    cache = StaticCache(config=config, max_cache_len=CONTEXT + 256)
    ids = torch.zeros((batch, CONTEXT), dtype=torch.long, device="cuda")
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    position = torch.full((1,), CONTEXT, dtype=torch.long, device="cuda")
    tokens = torch.zeros((batch, 1), dtype=torch.long, device="cuda")

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        out = forward(
            input_ids=tokens,
            past_key_values=cache,
            cache_position=position,
            position_ids=position[None],
        )
        tokens.copy_(out.logits[:, -1:].argmax(-1))

    return step


def transformers(found):
    import torch

    config, model = their_model()
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    row_bytes = 2 * SHAPE["layers"] * SHAPE["kv_heads"] * SHAPE["head_dim"] * 2 * CONTEXT
    with torch.inference_mode():
        for batch in BATCHES:
            second = timed(their_step(config, model, batch), STEPS)
            found[f"transformers decode {batch}"] = {
                "seconds": second,
                "bytes_per_second": (parameter_bytes + batch * row_bytes) / second,
                "tokens_per_second": batch / second,
            }
            print(batch, found[f"transformers decode {batch}"], flush=True)
        ids = torch.zeros((1, PROMPT), dtype=torch.long, device="cuda")
        torch._dynamo.reset()
        forward = torch.compile(model.forward, fullgraph=True)
        second = timed(lambda: forward(input_ids=ids, logits_to_keep=1, use_cache=False), 10)
        found["transformers prefill"] = {
            "seconds": second,
            "flops_per_second": prompt_flops(parameter_bytes // 2) / second,
        }
        print("prefill", found["transformers prefill"], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["ours", "transformers"])
    options = parser.parse_args()
    found = {}
    if options.only != "transformers":
        import jax

        found["device"] = jax.devices()[0].device_kind
        found["copy bytes_per_second"] = copy_rate()
        print(found, flush=True)
        ours(found)
    if options.only != "ours":
        transformers(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
