"""A small Whisper of transformers with random weights."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
import transformers
from jax.sharding import AbstractMesh, AxisType

from systolic.data.arrays import Arrays
from systolic.job import Batch, Field, Job, Layout, Optimizer
from systolic.job.data import MASK
from systolic.models.whisper.config import Whisper
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import AnyMesh, MeshTarget, make_mesh
from systolic.steps.tasks import Transcription

MODEL = Whisper(
    encoder_layers=2,
    decoder_layers=3,
    d_model=32,
    d_ff=48,
    heads=4,
    vocab=101,
    mels=20,
    frames=30,
    positions=24,
)
TINY = replace(MODEL, encoder_layers=1, decoder_layers=1, d_model=16, d_ff=16, heads=2)


def config(model: Whisper = MODEL) -> transformers.WhisperConfig:
    """Its configuration, by the names of transformers."""
    return transformers.WhisperConfig(
        vocab_size=model.vocab,
        num_mel_bins=model.mels,
        d_model=model.d_model,
        encoder_layers=model.encoder_layers,
        decoder_layers=model.decoder_layers,
        encoder_attention_heads=model.heads,
        decoder_attention_heads=model.heads,
        encoder_ffn_dim=model.d_ff,
        decoder_ffn_dim=model.d_ff,
        max_source_positions=model.frames,
        max_target_positions=model.positions,
        bos_token_id=99,
        eos_token_id=99,
        pad_token_id=99,
        decoder_start_token_id=100,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


@cache
def foreign(model: Whisper = MODEL) -> Any:
    """The model, every parameter random; made once."""
    return random_model(model)


def random_model(model: Whisper = MODEL, seed: int = 0) -> Any:
    """The model, every parameter random: biases and norms too."""
    torch.manual_seed(seed)
    made = transformers.WhisperForConditionalGeneration(config(model)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "encoder.embed_positions" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def job(layout: Layout, model: Whisper = TINY) -> Job:
    """Learns texts of eleven tokens from random spectrograms."""
    fields = {
        "features": Field(shape=(2 * model.frames, model.mels), dtype="float32"),
        "tokens": Field(shape=(11,), dtype="int32", axes=("sequence",)),
        "targets": Field(shape=(11,), dtype="int32", axes=("sequence",)),
    }
    return Job(
        name="tiny",
        model=model,
        task=Transcription(),
        data=Arrays.call(dict, fields=fields),
        steps=20,
        batch=Batch(total=8),
        optimizer=Optimizer(learning_rate=1e-2, weight_decay=0.0),
        layout=layout,
    )


def steps(layout: Layout, model: Whisper = TINY, dtype: str = "float32") -> StepFunctions:
    """The programs of :func:`job` on as many devices as the layout has, or over none where there are fewer."""
    sizes = layout.mesh_shape
    mesh: AnyMesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    if layout.num_devices <= len(jax.devices()):
        mesh = make_mesh(layout, jax.devices()[: layout.num_devices])
    target = MeshTarget(platform="cpu", layout=layout, dtype=dtype, mesh=mesh)
    return StepFunctions(job(layout, model), target)


def batch(of: StepFunctions) -> dict[str, jax.Array]:
    """Eight recordings of one text, the last three places of it without a loss."""
    rng, fields = np.random.default_rng(0), of.job.data.fields()
    tokens = np.tile(rng.integers(0, 101, 12).astype(np.int32), (8, 1))
    rows = {
        "features": rng.normal(size=(8, *fields["features"].shape)).astype(np.float32),
        "tokens": tokens[:, :-1],
        "targets": np.where(np.arange(11) < 8, tokens[:, 1:], -1),
        MASK: np.ones(8, np.float32),
    }
    return {name: jax.device_put(a, of.batch_shardings[name]) for name, a in rows.items()}


def run(of: StepFunctions, count: int) -> tuple[list[float], Any]:
    """The losses of the first steps on one batch, and the state after them."""
    state = jax.jit(of.init, out_shardings=of.shardings)(jax.random.key(0))
    train, losses = jax.jit(of.train, out_shardings=(of.shardings, None)), []
    for _ in range(count):
        state, metrics = train(state, batch(of))
        losses.append(float(metrics["loss"]))
    return losses, state
