"""One of several processes of a job under layouts: what it holds of each batch, and the losses it sees.

Arguments: what to do (``batches`` or ``losses``), then names of :data:`CASES`. The number of processes
and the coordinator come from the environment. Prints one JSON object a case.
"""

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from systolic.data.arrays import Arrays
from systolic.data.batches import first_reader
from systolic.job import Job, Layout, Read, Split
from systolic.setup import Setup, first_state, set_up
from systolic.steps.machine import LocalDevices
from systolic.steps.programs import evaluation, training
from systolic.training import distributed
from tests.steps import tiny

SEQUENCE, EXAMPLES = 32, 56
V5E_16 = (0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3)
"""The process of each device of v5e-16's mesh with fsdp 4 x tensor 4, as libtpu 0.0.42.1 describes it."""
V5E_16_RING = (0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0)
"""The same with fsdp 16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout over devices of which each process has as many."""

    layout: Layout
    experts: int = 0
    processes: tuple[int, ...] = ()
    """The process of each device in the mesh's order; () is one after another."""


CASES = {
    "data": Case(layout=Layout(data=4, fsdp=1)),
    "fsdp": Case(layout=Layout(fsdp=4)),
    "tensor": Case(layout=Layout(tensor=4, fsdp=1)),
    "context": Case(layout=Layout(context=4, fsdp=1)),
    "pipeline": Case(layout=Layout(pipeline=4, fsdp=1)),
    "expert": Case(layout=Layout(expert=4, fsdp=1), experts=4),
    "expert-tensor": Case(layout=Layout(expert=2, tensor=2, fsdp=1), experts=4),
    # As where slices cross the pipeline: the stages are the outer axis, and slices share all rows.
    "slices-pipeline": Case(layout=Layout(pipeline=2, fsdp=2)),
    "context-fsdp": Case(layout=Layout(fsdp=2, context=2)),
    "accumulate": Case(layout=Layout(data=2, fsdp=1, tensor=2, accumulate=2)),
    "alternating": Case(layout=Layout(fsdp=4), processes=(0, 1, 0, 1)),
    "v5e-16": Case(layout=Layout(fsdp=4, tensor=4), processes=V5E_16),
    "v5e-16-ring": Case(layout=Layout(fsdp=16), processes=V5E_16_RING),
}


def tokens(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 64, (rows, SEQUENCE + 1)).astype(np.int32)
    return {
        "tokens": raw[:, :-1],
        "targets": raw[:, 1:],
        "segments": np.sort(rng.integers(1, 4, (rows, SEQUENCE)), axis=1).astype(np.int32),
        "positions": np.tile(np.arange(SEQUENCE, dtype=np.int32), (rows, 1)),
    }


DATA = Arrays.of(
    train=tokens(EXAMPLES, 0), validation=tokens(20, 1), fields=tiny.Tokens(SEQUENCE).fields()
)


def job(case: Case) -> Job:
    model = replace(tiny.MODEL, kv_heads=4, experts=case.experts or 1, d_ff=32)
    return tiny.job(layout=case.layout, model=model, data=DATA)


def machine(case: Case) -> LocalDevices:
    """The devices, in the order that puts each process where the case says."""
    devices: list[Any] = list(jax.devices())
    if case.processes and jax.process_count() > 1:
        of = {n: [d for d in devices if d.process_index == n] for n in set(case.processes)}
        devices = [of[process].pop(0) for process in case.processes]
    return LocalDevices(
        devices=devices, platform="cpu", kind="cpu", peak_bf16_flops_per_second=None
    )


def batches(setup: Setup) -> dict[str, Any]:
    """Arrays whose parts on this process differ from the batch that one process would read."""
    wrong, readers = [], 0
    for split in (Split.train, Split.validation):
        train = split is Split.train
        whole = setup.job.data.open(
            Read(
                split=split,
                batch=setup.steps.batch_size // (1 if train else setup.job.layout.accumulate),
                shuffle=train,
                epochs=None if train else 1,
            )
        )
        feed = (
            training(setup.job, setup.steps, 0)
            if train
            else evaluation(setup.job, setup.steps, split)
        )
        with feed:
            for number, (want, have) in enumerate(zip(whole, feed, strict=not train)):
                wrong += [
                    f"{split.value} {number} {name} {shard.index}"
                    for name, array in have.items()
                    for shard in array.addressable_shards
                    if array.shape != want[name].shape
                    or not np.array_equal(shard.data, want[name][shard.index])
                ]
                distributed.require_same(have)
                if train and number == 4:
                    break
            readers = max(readers, len(feed.share.blocks))
            same = json.loads(first_reader(feed.get_state())) == json.loads(whole.get_state())
            wrong += [] if same else [f"{split.value} position"]
        whole.close()
    return {"wrong": wrong, "readers": readers}


def losses(setup: Setup) -> dict[str, Any]:
    """Of the first steps."""
    state, found = first_state(setup.steps, 0), []
    with training(setup.job, setup.steps, 0) as feed:
        for _ in range(3):
            state, metrics = setup.jitted_train(state, next(feed))
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return {"losses": found}


def main(what: str, names: list[str]) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    distributed.join()
    for name in names:
        case = CASES[name]
        setup = set_up(job(case), machine(case))
        result = batches(setup) if what == "batches" else losses(setup)
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
