"""Systolic's side: recipes for ``systolic train benchmarks/side_by_side/recipes.py:language``."""

import sys
from pathlib import Path

import numpy as np

from systolic.data.arrays import Arrays
from systolic.job import (
    Batch,
    Evaluation,
    Job,
    Model,
    Optimizer,
    Precision,
    Schedule,
    ScheduleKind,
)
from systolic.models.decoder.config import Decoder, Mlp, NormKind
from systolic.models.vision.config import Depth, Pixels, ResNet, Stem
from systolic.steps.tasks import Classification, LanguageModel

sys.path.insert(0, str(Path(__file__).parent))
import sizes as shared  # ty: ignore[unresolved-import]


def common(name: str, batch: int, steps: int, model: Model, task, data: Arrays) -> Job:
    """The optimizer, precision and rates that all contenders share."""
    rule = shared.ADAMW
    return Job(
        name=name,
        model=model,
        task=task,
        data=data,
        steps=steps,
        batch=Batch(total=batch),
        optimizer=Optimizer(
            learning_rate=rule.learning_rate,
            weight_decay=rule.weight_decay,
            b1=rule.b1,
            b2=rule.b2,
            eps=rule.eps,
            clip=rule.clip,
        ),
        schedule=Schedule(kind=ScheduleKind.constant),
        precision=Precision.f32,
        evaluation=Evaluation(),
    )


def language(
    layers: int = 6,
    d_model: int = 320,
    heads: int = 5,
    vocab: int = 8192,
    sequence: int = 256,
    batch: int = 8,
    steps: int = shared.BATCHES,
) -> Job:
    """A decoder in the shape of GPT-2 on made-up text."""
    made = {"layers": layers, "d_model": d_model, "heads": heads}
    made |= {"vocab": vocab, "sequence": sequence}

    def load() -> dict[str, dict[str, np.ndarray]]:
        rows = shared.tokens(shared.Language(**made, batch=batch))
        places = np.broadcast_to(np.arange(sequence, dtype=np.int32), rows.shape)
        found = {"tokens": rows, "targets": shared.targets(rows, -1), "positions": places}
        return {"train": found | {"segments": np.zeros_like(rows)}}

    model = Decoder(
        layers=layers,
        d_model=d_model,
        d_ff=4 * d_model,
        heads=heads,
        kv_heads=heads,
        head_dim=d_model // heads,
        mlp=Mlp.gelu,
        mlp_bias=True,
        qkv_bias=True,
        out_bias=True,
        norm=NormKind.layer,
        norm_eps=1e-5,
        learned_positions=sequence,
        vocab=vocab,
    )
    return common("side_by_side", batch, steps, model, LanguageModel(), Arrays.call(load))


def vision(
    width: int = 64, size: int = 32, classes: int = 10, batch: int = 64, steps: int = shared.BATCHES
) -> Job:
    """ResNet-18 on made-up images."""

    def load() -> dict[str, dict[str, np.ndarray]]:
        made = shared.Vision(width=width, size=size, classes=classes, batch=batch)
        image, label = shared.images(made)
        return {"train": {"image": image, "label": label}}

    model = ResNet(
        depth=Depth.d18,
        width=width,
        stem=Stem.small,
        num_classes=classes,
        pixels=Pixels(size=size, mean=(0.5,), std=(0.25,)),
    )
    return common("side_by_side", batch, steps, model, Classification(), Arrays.call(load))
