"""Feed of a run: the part of the data that this process reads, and the placement of its batches."""

from collections.abc import Callable

from systolic.data.device_batches import DeviceBatches, share_of
from systolic.data.process_share import Blocks, ProcessShare
from systolic.job import Job, Read, Split
from systolic.job.data import MASK, Batches
from systolic.steps.steps import StepFunctions


def training(job: Job, steps: StepFunctions, workers: int) -> DeviceBatches:
    """Endless shuffled batches of the job's size, laid out as the train step wants them."""

    def read(share: ProcessShare, block: int) -> Read:
        return Read(
            split=Split.train,
            batch=share.block_rows,
            seed=job.seed,
            shard=block,
            shards=share.count,
            # ``workers`` is the number per process for any number of blocks.
            workers=-(-workers // len(share.blocks)),
        )

    return _placed(job, steps, steps.batch_size, read)


def evaluation(job: Job, steps: StepFunctions, split: Split) -> DeviceBatches:
    """One pass over a split in order, the last batch padded."""

    def read(share: ProcessShare, block: int) -> Read:
        return Read(
            split=split,
            batch=share.block_rows,
            seed=job.seed,
            shuffle=False,
            epochs=1,
            shard=block,
            shards=share.count,
        )

    return _placed(job, steps, steps.batch_size // job.layout.accumulate, read)


def _placed(
    job: Job, steps: StepFunctions, rows: int, read: Callable[[ProcessShare, int], Read]
) -> DeviceBatches:
    """Batches of ``rows`` over all processes, of which this one reads what its devices hold."""
    share = share_of(steps.batch_shardings[MASK], rows)

    def open_block(block: int) -> Batches:
        return job.data.open(read(share, block))

    return DeviceBatches(Blocks(job.data, share, open_block), steps.batch_shardings)
