"""Wall-clock of a plan besides its steps: start-up, checkpoints, data, preemptions, and the carbon of its energy.

Whatever the job and the slice don't tell is an assumption, listed with the option that replaces it.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.units import duration
from systolic.planning.analytic import Facts
from systolic.planning.goal import HOUR, Goal, PriceTerm
from systolic.planning.plan import Trial
from systolic.sim.calibration import constant

FOLDER = Path(__file__).parent
START_SECONDS: float = constant("wall.start_seconds", FOLDER)
STORAGE_BYTES_PER_SECOND: float = constant("wall.storage_bytes_per_second", FOLDER)
SPOT_PREEMPTIONS_PER_DAY: float = constant("wall.spot_preemptions_per_day", FOLDER)
DAY = 24 * HOUR


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Conditions of a plan's wall-clock that only the user knows; None for the assumptions of this module."""

    start_seconds: float | None = None
    """Start of the job, its compile included."""
    storage_bytes_per_second: float | None = None
    """Rate at which a host reads from and writes to storage."""
    preemptions_per_day: float | None = None
    """Preemptions of the whole slice."""
    grid_g_per_kwh: float | None = None
    """Grams of CO2 per kilowatt-hour; None leaves carbon out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wall:
    """Wall-clock of one candidate; seconds are of the whole job."""

    seconds: float
    """Everything; infinite where preemptions come faster than the work that they undo."""
    train_seconds: float
    """The steps alone."""
    start_seconds: float
    """One start."""
    checkpoints: int
    checkpoint_bytes: float
    """One checkpoint: weights that train and their optimizer state."""
    checkpoint_seconds: float
    """Writing all checkpoints, which the steps wait for."""
    data_bytes_per_second: float
    """Rate at which one host must read so that no step waits."""
    host_bytes_per_second: float
    """Rate at which one host reads."""
    data_seconds: float
    """Waiting for data."""
    preemptions: float
    """Expected number."""
    lost_seconds: float
    """Restarts after preemptions, and steps computed again."""
    usd: float | None
    kwh: float | None
    kg_co2: float | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values under their published names."""
        return {
            "seconds": self.seconds if math.isfinite(self.seconds) else None,
            "train_seconds": self.train_seconds,
            "start_seconds": self.start_seconds,
            "checkpoints": self.checkpoints,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_seconds": self.checkpoint_seconds,
            "data_bytes_per_second_per_host": self.data_bytes_per_second,
            "host_bytes_per_second": self.host_bytes_per_second,
            "data_seconds": self.data_seconds,
            "preemptions": self.preemptions if math.isfinite(self.preemptions) else None,
            "lost_seconds": self.lost_seconds if math.isfinite(self.lost_seconds) else None,
            "usd": self.usd,
            "kwh": self.kwh,
            "kg_co2": self.kg_co2,
            "assumptions": list(self.assumptions),
        }


def wall_of(facts: Facts, goal: Goal, trial: Trial, conditions: Conditions) -> Wall | None:
    """Wall-clock of a compiled candidate; None of one without a step time.

    A preemption undoes half the steps between two checkpoints, and costs a start and reading a checkpoint. With
    ``p`` preemptions a second that cost ``c`` seconds each, work of ``w`` seconds takes ``w / (1 - p c)``.
    """
    forecast, total = trial.forecast, trial.total
    if forecast is None or total is None or not forecast.step_seconds:
        return None
    on, job, step = trial.candidate.on, facts.job, forecast.step_seconds
    start, assumptions = _start(forecast.compiler.seconds, conditions, full=trial.full)
    rate = conditions.storage_bytes_per_second or STORAGE_BYTES_PER_SECOND
    if conditions.storage_bytes_per_second is None:
        assumptions.append(
            f"storage of {rate / 1e9:g} GB/s for each host: assumed; --storage-rate sets it"
        )
    saved, every = facts.saved_bytes, job.checkpoints.every
    checkpoints = math.ceil(total.steps / every) if every else 1
    each = saved / (rate * on.num_hosts)
    example = sum(
        math.prod(feature.shape) * np.dtype(feature.dtype).itemsize
        for feature in job.data.fields().values()
    )
    read = example * trial.candidate.batch / on.num_hosts
    waiting = max(read / rate - step, 0.0) * total.steps
    work = total.seconds + start + checkpoints * each + waiting
    daily = conditions.preemptions_per_day
    if daily is None:
        daily = SPOT_PREEMPTIONS_PER_DAY if goal.price is PriceTerm.spot else 0.0
        if daily:
            assumptions.append(
                f"{daily:g} preemption a day: assumed; --preemptions-per-day sets the slice's own"
            )
    between = min(every or math.inf, total.steps) * (step + waiting / total.steps)
    cost = start + each + between / 2
    kept = 1.0 - daily / DAY * cost
    seconds = work / kept if kept > 0 else math.inf
    share = seconds / total.seconds
    hourly = goal.hourly(on)
    kwh = None if total.kwh is None or not math.isfinite(share) else total.kwh * share
    grid = conditions.grid_g_per_kwh
    return Wall(
        seconds=seconds,
        train_seconds=total.seconds,
        start_seconds=start,
        checkpoints=checkpoints,
        checkpoint_bytes=saved,
        checkpoint_seconds=checkpoints * each,
        data_bytes_per_second=read / step,
        host_bytes_per_second=rate,
        data_seconds=waiting,
        preemptions=daily / DAY * seconds if daily else 0.0,
        lost_seconds=seconds - work,
        usd=None if hourly is None or not math.isfinite(seconds) else hourly * seconds / HOUR,
        kwh=kwh,
        kg_co2=None if kwh is None or grid is None else kwh * grid / 1000.0,
        assumptions=tuple(assumptions),
    )


def _start(
    compile_seconds: float | None, conditions: Conditions, *, full: bool
) -> tuple[float, list[str]]:
    """Seconds of one start, and what is assumed of them."""
    if conditions.start_seconds is not None:
        return conditions.start_seconds, []
    known = compile_seconds or 0.0
    text = f"start-up of {duration(START_SECONDS)} besides compiling: assumed"
    if known:
        depth = "in full" if full else "up to the schedule, a full compile takes longer"
        text += f"; compiling takes {duration(known)} on this machine ({depth})"
    else:
        text += "; the time of the compile is not known and left out"
    return START_SECONDS + known, [f"{text}; --start-up sets both"]
