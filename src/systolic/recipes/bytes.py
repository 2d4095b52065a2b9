"""A byte-level language model on the Python standard library, in about three minutes on two cores."""

from systolic.core.arguments import explained_by, with_types
from systolic.data.text.documents import StandardLibrary
from systolic.job import (
    Batch,
    Checkpoints,
    Dtypes,
    Evaluation,
    Guard,
    Job,
    Layout,
    Optimizer,
    OptimizerKind,
    Precision,
    Schedule,
    ScheduleKind,
)
from systolic.models.decoder.config import Decoder
from systolic.recipes.lm import lm
from systolic.steps.tasks import LanguageModel, Unit

BATCH = Batch(total=16)
MODEL = Decoder(
    layers=2,
    d_model=128,
    d_ff=384,
    heads=2,
    kv_heads=2,
    head_dim=64,
    vocab=264,
    tie_embeddings=False,
    qk_norm=True,
    ngrams=5,
)
"""Two layers and hashed n-gram tables: the best found for three minutes on two cores."""

OPTIMIZER = Optimizer(
    kind=OptimizerKind.muon,
    learning_rate=0.03,
    adam_learning_rate=0.006,
    b2=0.99,
    weight_decay=0.0,
    clip=0.0,
)
SCHEDULE = Schedule(kind=ScheduleKind.linear, warmup=10, final=0.0)


@with_types
@explained_by(lm)
def bytes(
    model: Decoder = MODEL,
    steps: int = 500,
    batch: int | None = None,
    batch_per_device: float | None = None,
    sequence: int = 128,
    optimizer: Optimizer = OPTIMIZER,
    schedule: Schedule = SCHEDULE,
    precision: Precision = Precision.auto,
    dtypes: Dtypes = Dtypes(),
    layout: Layout = Layout(),
    evaluation: Evaluation = Evaluation(batches=64, final_batches=0, metric="bits_per_byte"),
    checkpoints: Checkpoints = Checkpoints(every=200),
    guard: Guard = Guard(),
    seed: int = 0,
) -> Job:
    """Learns to write Python from the standard library's own source, byte by byte.

    Args:
        model: The decoder's sizes.
        steps: Optimizer steps.
        batch: Rows per optimizer step; by default 16.
        batch_per_device: Rows per device and pass, instead of batch.
        sequence: Bytes per row.
        optimizer: The update rule.
        schedule: The learning rate over the steps; the default warm-up is at most a tenth of them.
        evaluation: When to evaluate, and early stopping; the last evaluation always reads all validation files.
        checkpoints: When to save, and which to keep.
    """
    return Job(
        name="bytes",
        model=model,
        task=LanguageModel(unit=Unit.byte),
        data=StandardLibrary(sequence=sequence),
        steps=steps,
        batch=Batch.given(batch, batch_per_device, BATCH),
        optimizer=optimizer,
        schedule=schedule.shortened(SCHEDULE, steps),
        precision=precision,
        dtypes=dtypes,
        layout=layout,
        evaluation=evaluation,
        checkpoints=checkpoints,
        guard=guard,
        seed=seed,
        sample="def ",
    )
