"""Fine-tuning of a language model that is there already, on instructions."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from systolic.core.arguments import with_types
from systolic.core.ranges import COUNT, POSITIVE, SHARE
from systolic.data.text.chat import template_for
from systolic.data.text.instructions import Filling, Instructions, TooLong
from systolic.data.text.row_forms import Columns, NamedColumns, Pairs, RowReading
from systolic.formats.outline import outlined
from systolic.job import (
    Adapter,
    AdapterKind,
    Batch,
    ChangedOptimizer,
    Checkpoints,
    Dtypes,
    Evaluation,
    Guard,
    Job,
    Layout,
    Optimizer,
    OptimizerChange,
    Precision,
    Schedule,
)
from systolic.models.decoder.config import Decoder
from systolic.steps.tasks import LanguageModel

BATCH = Batch(per_device=4)
ADAPTERS = Optimizer(learning_rate=1e-4, b2=0.999, weight_decay=0.0)
WHOLE = replace(ADAPTERS, learning_rate=1e-5)
"""Optimizer of all weights: a tenth of the learning rate of adapters, which begin at zero."""
SCHEDULE = Schedule(warmup=20)


@with_types
def sft(
    from_: Path,
    data: Path | None = None,
    validation: Path | None = None,
    validation_share: Annotated[float, SHARE] = 0.05,
    template: Path | None = None,
    sequence: int = 1024,
    filling: Filling = Filling.packed,
    too_long: TooLong = TooLong.cut,
    columns: NamedColumns = Columns(),
    pairs: Pairs = Pairs.refuse,
    adapter: AdapterKind = AdapterKind.none,
    rank: Annotated[int, COUNT] = 16,
    alpha: Annotated[float, POSITIVE] = 32.0,
    targets: tuple[str, ...] = (),
    batch_per_device: float | None = None,
    batch: int | None = None,
    steps: int = 200,
    optimizer: ChangedOptimizer = OptimizerChange(),
    schedule: Schedule = SCHEDULE,
    precision: Precision = Precision.auto,
    dtypes: Dtypes = Dtypes(),
    layout: Layout = Layout(),
    evaluation: Evaluation = Evaluation(every=50),
    checkpoints: Checkpoints = Checkpoints(every=50),
    guard: Guard = Guard(),
    seed: int = 0,
    sample: str | None = "",
) -> Job:
    """Fine-tunes a language model on instructions: all of it, or low-rank adapters beside frozen weights (LoRA, QLoRA).

    Args:
        from_: The model: a Hugging Face directory, a Bundle, a GGUF file or a run. A forecast reads its config.json only, and takes the name of a published model.
        data: Conversations, a row each: messages (role, content), ShareGPT's conversations (from, value), prompt and completion, question and answer, or instruction, input and output (history holds earlier turns); an answer of weight 0, or train or loss false, or before the first question without a weight of 1, is read and not learned. In JSONL, a JSON array, Parquet, CSV or TSV, or a folder of such files. A forecast does without.
        validation: Validation conversations; by default a share of the data.
        validation_share: That share, chosen by a hash of each line.
        template: A chat template in jinja2; by default the model's own, or "### Instruction:" and "### Response:" where it has none.
        sequence: Tokens per row, which conversations are packed into; the model's context stays what the model was made for.
        filling: Several conversations in a row, which don't see each other, or one.
        too_long: Whether a conversation that is longer than a row is cut at its end or left out.
        columns: Names of the data's columns where they are none of the usual ones.
        pairs: Whether preference pairs (chosen and rejected, or OpenAI's preferred_output and non_preferred_output, or hh-rlhf's dialogues) are refused, or their chosen answers learned like any others.
        adapter: What trains: all weights, low-rank adapters, or adapters beside matrices that are stored in 4 bits.
        rank: Columns of an adapter's first matrix, rows of its second.
        alpha: An adapter's product is scaled by alpha / rank.
        targets: Matrices with adapters: query key value out gate up down; by default all of attention and MLP. Experts of a mixture have none.
        batch_per_device: Rows per device and pass, by default 4; may be a fraction where an axis splits a row over devices.
        batch: Rows per optimizer step, instead of batch-per-device.
        steps: Optimizer steps.
        optimizer: The update rule; by default AdamW without decay, at 0.0001 for adapters and 0.00001 for all weights.
        schedule: The learning rate over the steps; the default warm-up is at most a tenth of them.
        precision: Compute dtype; auto is bf16 where the chip has it, f32 on a CPU. Frozen weights are stored in it.
        dtypes: Dtypes of what trains: weights, gradients and optimizer state.
        layout: Parallelism and memory settings.
        evaluation: When to evaluate, and early stopping.
        checkpoints: When to save, and which to keep. Frozen weights are not saved: they come from the model again.
        guard: Handling of a loss that is not a number or jumps.
        seed: Seed of the adapters' initial weights and the order of the data.
        sample: A message that the model answers after each evaluation; by default the first held-out conversation's. None for no samples.
    """
    own = WHOLE if adapter is AdapterKind.none else ADAPTERS
    rule = optimizer.of(own)
    source = outlined(from_)
    folder = None if source.tokenizer is None else source.tokenizer.parent
    chat = template_for(folder, template)
    rows = Instructions(
        path=data,
        tokenizer=folder,
        template=chat.text,
        tool_template=chat.with_tools,
        tokens=chat.tokens,
        sequence=sequence,
        validation=validation,
        validation_share=validation_share,
        filling=filling,
        too_long=too_long,
        reading=RowReading(columns=columns, pairs=pairs),
        stops=source.stops,
        vocab=source.model.vocab if isinstance(source.model, Decoder) else 0,
        around=source.around,
        positions=source.positions,
    )
    return Job(
        name="sft",
        model=source.model,
        task=LanguageModel(),
        data=rows,
        steps=steps,
        batch=Batch.given(batch, batch_per_device, BATCH),
        optimizer=rule,
        schedule=schedule.shortened(SCHEDULE, steps),
        precision=precision,
        dtypes=dtypes,
        layout=layout,
        evaluation=evaluation,
        checkpoints=checkpoints,
        guard=guard,
        seed=seed,
        sample=sample,
        start=from_,
        adapter=Adapter(kind=adapter, rank=rank, alpha=alpha, targets=targets),
    )
