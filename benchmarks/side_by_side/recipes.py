"""Systolic's side: recipes for ``systolic train benchmarks/side_by_side/recipes.py:language``."""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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
    Target,
)
from systolic.models.attention import Masking, attention
from systolic.models.vision.config import Depth, Pixels, ResNet, Stem
from systolic.steps.tasks import Classification, LanguageModel

sys.path.insert(0, str(Path(__file__).parent))
import sizes as shared  # ty: ignore[unresolved-import]
from dense import dense  # ty: ignore[unresolved-import]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float, axes) -> nnx.Param:
    return nnx.Param(deviation * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def zeros(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape))


class Norm(nnx.Module):
    """LayerNorm."""

    def __init__(self, size: int) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones((size,))), zeros(size)

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + 1e-5) * self.scale[...] + self.bias[...]


class Dense(nnx.Module):
    """x @ kernel + bias."""

    def __init__(
        self, shape: tuple[int, int], deviation: float, axes, rngs, target: Target
    ) -> None:
        self.kernel, self.bias = normal(rngs, shape, deviation, axes), zeros(shape[1])
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        return dense(self.target, x, self.kernel[...]) + self.bias[...]


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: "GPT2", rngs: nnx.Rngs, target: Target) -> None:
        d, last = config.d_model, 0.02 * (2 * config.layers) ** -0.5
        self.norm1, self.norm2 = Norm(d), Norm(d)
        self.qkv = Dense((d, 3 * d), 0.02, ("embed", "heads"), rngs, target)
        self.out = Dense((d, d), last, ("heads", "embed"), rngs, target)
        self.up = Dense((d, 4 * d), 0.02, ("embed", "mlp"), rngs, target)
        self.down = Dense((4 * d, d), last, ("mlp", "embed"), rngs, target)
        self.heads, self.target = config.heads, target

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, d = x.shape
        query, key, value = (
            part.reshape(batch, length, self.heads, d // self.heads)
            for part in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        )
        attended = attention(self.target, query, key, value, Masking(causal=True))
        x = x + self.out(attended.reshape(batch, length, d))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True))


class GPT2Module(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: "GPT2", rngs: nnx.Rngs, target: Target) -> None:
        d = config.d_model
        self.embedding = normal(rngs, (config.vocab, d), 0.02, ("vocab", "embed"))
        self.positions = normal(rngs, (config.sequence, d), 0.02, (None, "embed"))
        self.blocks = nnx.List([Block(config, rngs, target) for _ in range(config.layers)])
        self.norm, self.target = Norm(d), target

    def __call__(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """Rows are whole documents here, as for the others: segments and positions say nothing new."""
        x = self.embedding[...][tokens] + self.positions[...][: tokens.shape[1]]
        for block in self.blocks:
            # Kept, or XLA's CPU compiler adds up all blocks again wherever their sum is read.
            x = jax.lax.optimization_barrier(block(x))
        return dense(self.target, self.norm(x), self.embedding[...].T)


@dataclass(frozen=True, kw_only=True)
class GPT2(Model):
    """The sizes of a decoder in the shape of GPT-2 (Radford et al. 2019)."""

    layers: int = 6
    d_model: int = 320
    heads: int = 5
    vocab: int = 8192
    sequence: int = 256

    def build(self, rngs: nnx.Rngs, target: Target) -> nnx.Module:
        return GPT2Module(self, rngs, target)


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

    data = Arrays.call(load)
    return common("side_by_side", batch, steps, GPT2(**made), LanguageModel(), data)


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
