"""A bidirectional encoder (BERT) on any text, by masked tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from systolic.core.arguments import explained_by, with_types
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, Range
from systolic.data.text.masked import Masked
from systolic.job import (
    Batch,
    Checkpoints,
    Dtypes,
    Evaluation,
    Guard,
    Job,
    Layout,
    Optimizer,
    Precision,
    Schedule,
    ScheduleKind,
)
from systolic.models.encoder.config import Encoder
from systolic.recipes.lm import lm, rows_of, wide_enough
from systolic.steps.tasks import MaskedTokens

BATCH = Batch(per_device=8)
OPTIMIZER = Optimizer(learning_rate=1e-4, b2=0.999, weight_decay=0.01)
"""Defaults of BERT (Devlin et al. 2019)."""
SCHEDULE = Schedule(kind=ScheduleKind.linear, warmup=100, final=0.0)


@with_types
@explained_by(lm)
def mlm(
    path: Path | None = None,
    tokenizer: Path | None = None,
    validation: Path | None = None,
    field: str = "text",
    shuffle_windows: Annotated[int, COUNT] = 16,
    model: Encoder = Encoder(),
    sequence: int = 512,
    mask_share: Annotated[float, Range(above=0, most=1)] = 0.15,
    predictions: Annotated[int | None, COUNT] = None,
    batch_per_device: float | None = None,
    batch: int | None = None,
    steps: int = 1000,
    optimizer: Optimizer = OPTIMIZER,
    schedule: Schedule = SCHEDULE,
    precision: Precision = Precision.auto,
    dtypes: Dtypes = Dtypes(),
    layout: Layout = Layout(),
    evaluation: Evaluation = Evaluation(every=250, batches=32),
    checkpoints: Checkpoints = Checkpoints(every=250),
    guard: Guard = Guard(),
    seed: int = 0,
) -> Job:
    """Trains a bidirectional encoder (BERT: learned positions, norms after sums, GELU) on any text, by masked tokens.

    Args:
        model: The encoder's sizes.
        sequence: Tokens per row; documents are packed into rows and don't see each other.
        mask_share: Share of a row's tokens to predict; of these 80 % are masked, 10 % replaced, 10 % left.
        predictions: Most tokens to predict in a row; by default mask-share of the sequence, rounded down.
        optimizer: The update rule.
        schedule: The learning rate over the steps; the default warm-up is at most a tenth of them.
        seed: Seed of the initial weights, the order of the data and its masks.
    """
    if not model.head:
        raise OptionError(
            "model.head is False, and masked tokens are predicted by that head; leave it out"
        )
    text = rows_of(path, tokenizer, validation, field, shuffle_windows, sequence)
    if sequence > model.positions:
        raise OptionError(
            f"sequence is {sequence} and model.positions {model.positions}; lower the sequence, or give --model.positions {sequence}"
        )
    chosen = max(int(mask_share * sequence), 1) if predictions is None else predictions
    data = Masked(text=text, share=mask_share, predictions=chosen)
    return Job(
        name="mlm",
        model=replace(model, vocab=wide_enough(model.vocab, data.vocab_size())),
        task=MaskedTokens(),
        data=data,
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
    )
