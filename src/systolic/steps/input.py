"""Feed of a run: the part of the data that this process reads, and the placement of its batches."""

from systolic.data.device_batches import DeviceBatches, share_of
from systolic.data.host_shard import Blocks, FirstExamples, ProcessShare
from systolic.job import Job, Layout, Read, Split
from systolic.job.data import MASK, Batches
from systolic.steps.steps import StepFunctions


def training(
    job: Job, steps: StepFunctions, workers: int, meant: Layout | None = None
) -> DeviceBatches:
    """Endless shuffled batches of the job's size, laid out as the train step wants them.

    Where the job was ``meant`` for more devices, the batches are those that more processes like these would read.
    """

    def read(share: ProcessShare, block: int) -> Batches:
        return job.data.open(
            Read(
                split=Split.train,
                batch=share.block_rows,
                seed=job.seed,
                shard=block,
                shards=share.count,
                # ``workers`` is the number per process for any number of blocks.
                workers=-(-workers // len(share.blocks)),
            )
        )

    share = share_of(steps.batch_shardings[MASK], steps.batch_size)
    count = share.count
    if meant is not None:
        count = count * meant.batch_ways // job.layout.batch_ways
    return DeviceBatches(Blocks(job.data, share, read, count), steps.batch_shardings)


def evaluation(job: Job, steps: StepFunctions, split: Split, examples: int = 0) -> DeviceBatches:
    """One pass over a split in order, or over its first ``examples``, the last batch padded."""

    def read(share: ProcessShare, block: int) -> Batches:
        batches = job.data.open(
            Read(
                split=split,
                batch=share.block_rows,
                seed=job.seed,
                shuffle=False,
                epochs=1,
                shard=block,
                shards=share.count,
            )
        )
        return FirstExamples(batches, share, block, examples) if examples else batches

    share = share_of(steps.batch_shardings[MASK], evaluation_rows(job, steps))
    return DeviceBatches(Blocks(job.data, share, read), steps.batch_shardings)


def evaluation_rows(job: Job, steps: StepFunctions) -> int:
    """Examples of an evaluation's batch over all processes: those of one pass of a step."""
    return steps.batch_size // job.layout.accumulate
