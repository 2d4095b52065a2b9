"""A run made ready for use: its job, its programs on the devices at hand, its weights."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.artifact.run import Run
from systolic.job import Job
from systolic.session.planned import plan_of
from systolic.session.run_files import rebuild
from systolic.session.run_flags import kept


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What eval, generate and predict work with."""

    run: Run
    setup: Any
    weights: Any


def load(path: Path, checkpoint: str, *, trust: bool = False) -> Trained:
    """The run's weights on this machine's devices; a damaged checkpoint that was passed over is said on stderr."""
    from systolic.artifact import weights
    from systolic.core.store import cache_home
    from systolic.training.programs import compiler_cache

    # The next command on the same run finds its programs compiled.
    compiler_cache(str(cache_home() / "xla"))
    run = Run.open(path)
    _, job, _ = rebuild(run, trust_code=trust)
    setup = set_up_here(job, run)
    found = weights.load(run, setup.steps, checkpoint)
    for line in found.skipped:
        print(f"systolic: {line}; using step {found.step}", file=sys.stderr)
    return Trained(run=run, setup=setup, weights=found)


def set_up_here(job: Job, run: Run) -> Any:
    """The job of a run on this machine's devices, however many there are: any number can use what any layout trained."""
    from dataclasses import replace

    from systolic.job import Layout, Remat
    from systolic.training.machine import LocalDevices
    from systolic.training.setup import set_up

    machine = LocalDevices.here()
    ways = len(machine.devices)
    batch = (
        replace(job.batch, total=job.batch.resolve(Layout(data=1, fsdp=1)), per_device=None)
        if job.batch.total
        else job.batch
    )
    free = Layout(data=1, fsdp=-1, remat=Remat.none)
    if job.batch.total and job.batch.total % ways:
        batch = replace(batch, total=-(-job.batch.total // ways) * ways)
    record = run.read_job()
    flags = kept(record, plan_of(record), None)["compiler"]
    return set_up(replace(job, layout=free, batch=batch), machine, flags, reads=False)
