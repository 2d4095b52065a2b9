"""The data of a run on the devices: which part this host reads, and where each batch goes."""

import jax

from systolic.data.place import Placed
from systolic.job import Job, Read, Split
from systolic.steps.steps import Steps


def training(job: Job, steps: Steps, workers: int) -> Placed:
    """Endless shuffled batches of the job's size, laid out as the train step wants them."""
    read = Read(
        split=Split.train,
        batch=steps.batch_size // jax.process_count(),
        seed=job.seed,
        shard=jax.process_index(),
        shards=jax.process_count(),
        workers=workers,
    )
    return Placed(job.data.open(read), steps.batch_shardings)


def evaluation(job: Job, steps: Steps, split: Split) -> Placed:
    """One pass over a split in order, the last batch padded."""
    read = Read(
        split=split,
        batch=steps.batch_size // job.layout.accumulate // jax.process_count(),
        seed=job.seed,
        shuffle=False,
        epochs=1,
        shard=jax.process_index(),
        shards=jax.process_count(),
    )
    return Placed(job.data.open(read), steps.batch_shardings)
