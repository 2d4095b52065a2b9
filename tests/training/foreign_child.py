"""Trains the examples of other frameworks on the devices of this process; prints the losses of some steps."""

import json
import sys
from dataclasses import replace

import jax

from examples import frameworks
from systolic.job import Layout
from systolic.job.data import MASK
from systolic.setup import first_state, set_up

name, layout = sys.argv[1], Layout(**json.loads(sys.argv[2]))
job = replace(vars(frameworks)[name](steps=4), layout=layout)
setup = set_up(job)
steps = setup.steps
state = first_state(steps, job.seed)
train = jax.jit(steps.train)
split = job.data.held.splits()
arrays = next(iter(split.values()))
losses = []
for number in range(4):
    part = slice(number * steps.batch_size, (number + 1) * steps.batch_size)
    batch = {key: array[part] for key, array in arrays.items()}
    batch[MASK] = batch["label" if "label" in batch else "target"] * 0.0 + 1.0
    placed = {
        key: jax.device_put(
            array.astype(steps.abstract_batch()[key].dtype), steps.batch_shardings[key]
        )
        for key, array in batch.items()
    }
    state, metrics = train(state, placed)
    losses.append(float(metrics["loss"]))
sharded = sum(not p.sharding.is_fully_replicated for p in state.params.values())
print(json.dumps({"losses": losses, "sharded": sharded}))
