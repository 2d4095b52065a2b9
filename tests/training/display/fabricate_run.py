"""Fabricated run directories: the files that a trainer would have written, from a seed and no clock."""

import json
import math
import random
from pathlib import Path
from typing import Any

from systolic.runs import metrics

START = 1_760_000_000.0

JOB = {
    "systolic": "0.1.0",
    "recipe": "bytes",
    "options": {
        "steps": 3000,
        "model": {"d_model": 256, "layers": 6},
        "optimizer.learning-rate": 0.001,
    },
    "job": {
        "name": "bytes",
        "steps": 3000,
        "seed": 0,
        "precision": "auto",
        "sample": "The ",
        "batch": {"total": 16, "per_device": None},
        "model": {
            "type": "Decoder",
            "layers": 6,
            "d_model": 256,
            "d_ff": 1024,
            "heads": 4,
            "kv_heads": 4,
            "head_dim": 64,
            "vocab": 256,
            "tie_embeddings": True,
            "rope": {"base": 10000.0, "scaling": None},
        },
        "task": {"type": "NextToken", "z_loss": 0.0001},
        "data": {
            "type": "Text",
            "path": "corpus/<shakespeare> & co.txt",
            "sequence": 512,
            "tokenizer": "bytes",
            "validation": 0.05,
        },
        "optimizer": {
            "kind": "adamw",
            "learning_rate": 0.001,
            "weight_decay": 0.1,
            "b1": None,
            "b2": 0.95,
            "clip": 1.0,
            "ema": 0.0,
        },
        "schedule": {"kind": "cosine", "warmup": 200, "final": 0.1},
        "layout": {
            "data": 1,
            "fsdp": -1,
            "tensor": 1,
            "remat": "none",
            "remat_names": ["query", "key", "value"],
        },
        "evaluation": {"every": 250, "metric": "loss", "mode": "min"},
        "checkpoints": {"every": 500, "keep_last": 2},
        "guard": {"rule": "skip", "jump": 3.0, "patience": 10},
    },
    "layout": {"data": 1, "pipeline": 1, "fsdp": 2, "tensor": 1},
    "slice": "cpu",
    "digest": "0123456789abcdef",
}

ENVIRONMENT = {
    "python": "3.11.9",
    "platform": "Linux-6.8-x86_64",
    "host": "workstation",
    "packages": {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "optax": "0.2.8"},
    "devices": ["cpu:0", "cpu:1"],
    "variables": {"JAX_PLATFORMS": "cpu"},
    "git": None,
    "argv": ["/usr/bin/systolic", "train", "bytes", "--run", "somewhere", "--steps", "3000"],
    "pid": 4711,
}

SAMPLE = (
    "The king is come, and all the <b>banners</b> stand\n"
    "Upon the wall; \x1b[31mnow speak\x1b[0m, good friend & say\n"
    "What news of him that rode into the east."
)


def summary(path: Path, steps: int = 3000) -> dict:
    return {
        "run": str(path),
        "steps": steps,
        "final": {
            "loss": 1.3312,
            "metrics": {
                "validation_bits_per_byte": 1.9206,
                "validation_loss": 1.3312,
                "gzip_bits_per_byte": 2.6134,
            },
        },
        "tokens_per_second": 103_412.0,
        "mfu": 0.4123,
        "goodput": 0.8411,
        "forecast": {},
        "checkpoint": f"{path}/checkpoints/{steps}",
        "seconds": 291.6,
        "time": {
            "compile": 14.2,
            "step": 245.3,
            "data_wait": 6.1,
            "eval": 12.4,
            "checkpoint": 9.8,
            "other": 3.8,
        },
        "bad_steps": 4,
        "interrupted": None,
        "stopped": None,
        "recompiles": 1,
        "next": f"systolic generate {path} 'The '",
    }


def start(steps: int = 3000, time: float = START, resumed_from: int | None = None) -> dict:
    return {
        "kind": "start",
        "step": resumed_from or 0,
        "time": time,
        "name": "bytes",
        "recipe": "bytes",
        "steps": steps,
        "unit": "tokens",
        "num_parameters": 4_853_760,
        "devices": "2 x cpu",
        "slice": "cpu",
        "precision": "f32",
        "batch": 16,
        "resumed_from": resumed_from,
    }


def event(name: str, step: int, time: float, seconds: float = 0.0, detail: str = "") -> dict:
    return {
        "kind": "event",
        "name": name,
        "step": step,
        "time": time,
        "seconds": seconds,
        "detail": detail,
    }


def train(step: int, time: float, *, steps: int = 3000, chance: random.Random) -> dict:
    share = step / steps
    loss = 1.3 + 4.2 * math.exp(-share * 14) + 0.35 * (1 - share) + chance.gauss(0, 0.05)
    warm = min(step / 200, 1.0)
    rate = 1e-3 * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
    wait = max(chance.gauss(0.02, 0.01), 0.0) + (0.35 if chance.random() < 0.01 else 0.0)
    return {
        "kind": "train",
        "step": step,
        "time": time,
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": 0.4
        + 3 * math.exp(-share * 20)
        + abs(chance.gauss(0, 0.15))
        + (40 * chance.random() if chance.random() < 0.002 else 0.0),
        "tokens_per_second": 105_000 * (1 - wait) + chance.gauss(0, 1500),
        "step_seconds": 0.082 / (1 - min(wait, 0.9)),
        "mfu": 0.42 * (1 - wait),
        "data_wait": wait,
        "memory_bytes": 3_400_000_000 + int(share * 2e8),
        "eta_seconds": (steps - step) * 0.082,
        "accuracy": 0.3 + 0.3 * share,
    }


def records(steps: int = 3000, seed: int = 7) -> list[dict]:
    """A run that compiled, was interrupted once and resumed, met NaNs, and finished.

    As the trainer has it, the records after the checkpoint that it resumed from are gone.
    """
    chance = random.Random(seed)
    time = START
    found = [start(steps, time)]
    time += 13.1
    found.append(event("compile", 0, time, 11.6, "train step, 1.2 GFLOP <module>"))
    resume_at = steps // 2
    lost = resume_at + steps // 20

    def advance(first: int, last: int) -> None:
        nonlocal time
        for step in range(first, last + 1):
            time += 0.082
            record = train(step, time, steps=steps, chance=chance)
            if step in (steps // 3, steps // 3 + 1, steps * 3 // 4):
                record["loss"] = math.nan
                detail = (
                    f"the loss of step {step} is not a number; its batch is in bad/step-{step}.npz"
                )
                found.append(event("skip", step, time, 0, detail))
            found.append(record)
            if step % (steps // 12) == 0:
                time += 1.0
                loss = 1.34 + 4 * math.exp(-step / steps * 14) + 0.33 * (1 - step / steps)
                metrics = {"loss": loss, "bits_per_byte": loss / math.log(2)}
                found.append(
                    {
                        "kind": "eval",
                        "step": step,
                        "time": time,
                        "split": "validation",
                        "metrics": metrics,
                        "seconds": 1.0,
                    }
                )
            if step % (steps // 6) == 0:
                time += 1.6
                found.append(event("checkpoint", step, time, 1.6, f"checkpoints/{step}"))

    advance(1, lost)
    found.append(event("interrupt", lost, time, 0, "signal 15"))
    lasting = ("start", "event")
    found = [r for r in found if r["kind"] in lasting or r["step"] <= resume_at]
    time += 36_000
    found.append(start(steps, time, resumed_from=resume_at))
    time += 4
    found.append(event("recompile", resume_at, time, 2.6, "cached"))
    advance(resume_at + 1, steps)
    found.append({"kind": "sample", "step": steps, "time": time, "prompt": "The ", "text": SAMPLE})
    return found


def failed_records() -> list[dict]:
    """The same run under the rule ``stop``: its first NaN is the last thing on record."""
    lines = records()
    last = next(i for i, line in enumerate(lines) if line.get("name") == "skip")
    return [*lines[:last], lines[last] | {"name": "bad_step"}]


def write_run(path: Path, lines: list[dict], end: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "job.json").write_text(json.dumps(JOB))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (path / "metrics.jsonl").write_bytes(b"".join(map(metrics.encode, lines)))
    if end is not None:
        (path / "summary.json").write_bytes(metrics.encode(end))
    return path
