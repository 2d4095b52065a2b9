"""A configurable decoder language model on any text."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from systolic.core.arguments import with_types
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT
from systolic.data.text.documents import Documents, StandardLibrary
from systolic.data.text.text_data import TextData
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
)
from systolic.models.decoder.config import Decoder
from systolic.steps.tasks import LanguageModel, Unit

BATCH = Batch(per_device=8)
SCHEDULE = Schedule(warmup=100)
VOCAB_MULTIPLE = 128
"""Multiple that vocabularies are rounded up to: the matrix units' lane count, which also splits evenly."""


@with_types
def lm(
    path: Path | None = None,
    tokenizer: Path | None = None,
    validation: Path | None = None,
    field: str = "text",
    shuffle_windows: Annotated[int, COUNT] = 16,
    model: Decoder = Decoder(),
    sequence: int = 1024,
    batch_per_device: float | None = None,
    batch: int | None = None,
    steps: int = 1000,
    optimizer: Optimizer = Optimizer(),
    schedule: Schedule = SCHEDULE,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    precision: Precision = Precision.auto,
    dtypes: Dtypes = Dtypes(),
    layout: Layout = Layout(),
    evaluation: Evaluation = Evaluation(every=250, batches=32),
    checkpoints: Checkpoints = Checkpoints(every=250),
    guard: Guard = Guard(),
    seed: int = 0,
    prompt: str = "",
) -> Job:
    """Trains a decoder (RMSNorm, RoPE, grouped queries or latents, SwiGLU, dense or mixture of experts) on any text.

    Args:
        path: Text, JSONL, Parquet or ArrayRecord files, a datasets folder, or a folder from systolic data pack; by default the Python standard library.
        tokenizer: A tokenizer.json or its folder; by default bytes, or the tokenizer of packed data.
        validation: Validation text; by default a share of the documents.
        field: The JSONL field or the column that holds the text.
        shuffle_windows: Windows of text, of about 256 rows each, whose rows are shuffled together; more need more memory and shuffle longer documents.
        model: The decoder's sizes.
        sequence: Tokens per row; documents are packed into rows and don't see each other.
        batch_per_device: Rows per device and pass, by default 8; may be a fraction where an axis splits a row over devices.
        batch: Rows per optimizer step, instead of batch-per-device.
        steps: Optimizer steps.
        optimizer: The update rule.
        schedule: The learning rate over the steps; the default warm-up is at most a tenth of them.
        z_loss: Weight of the squared log normaliser.
        label_smoothing: Share of the probability spread evenly over the vocabulary.
        precision: Compute dtype; auto is bf16 where the chip has it, f32 on a CPU.
        dtypes: Dtypes of weights, gradients and optimizer state.
        layout: Parallelism and memory settings.
        evaluation: When to evaluate, and early stopping.
        checkpoints: When to save, and which to keep.
        guard: Handling of a loss that is not a number or jumps.
        seed: Seed of the initial weights and the order of the data.
        prompt: Start of the sample at the end of training.
    """
    data = rows_of(path, tokenizer, validation, field, shuffle_windows, sequence)
    vocab = wide_enough(model.vocab, data.vocab_size())
    whole = data.get_tokenizer().path is None
    return Job(
        name="lm",
        model=replace(model, vocab=vocab),
        task=LanguageModel(
            unit=Unit.byte if whole else Unit.token,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            router_loss=model.router_loss if model.experts > 1 else 0.0,
        ),
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
        sample=prompt,
    )


def rows_of(
    path: Path | None,
    tokenizer: Path | None,
    validation: Path | None,
    field: str,
    shuffle_windows: int,
    sequence: int,
) -> TextData:
    """Data of a recipe's options: the text at ``path``, or the Python standard library in bytes.

    Raises:
        OptionError: a tokenizer or validation text without a path.
    """
    if path is not None:
        return Documents(
            path=path,
            tokenizer=tokenizer,
            sequence=sequence,
            field=field,
            validation=validation,
            shuffle_windows=shuffle_windows,
        )
    for name, value in (("tokenizer", tokenizer), ("validation", validation)):
        if value is not None:
            raise OptionError(
                f"{name} is {value} but no path is given, and the built-in text is bytes; give --path with your text"
            )
    return StandardLibrary(sequence=sequence)


def wide_enough(vocab: int, ids: int) -> int:
    """Vocabulary of a model: the given one, or ``ids`` token ids, rounded up.

    Raises:
        OptionError: the given vocabulary is smaller than ``ids``.
    """
    if vocab and vocab < ids:
        raise OptionError(
            f"model.vocab is {vocab} but the tokenizer has {ids} tokens; leave model.vocab out, or raise it to {_round_up(ids)}"
        )
    return vocab or _round_up(ids)


def _round_up(vocab: int) -> int:
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
