"""Plans made of numbers alone: nothing is compiled."""

from dataclasses import replace
from functools import cache

from systolic import recipes
from systolic.chips import slice
from systolic.core.units import GIB, Origin
from systolic.forecasting import Forecast
from systolic.forecasting.cost import bill_of
from systolic.forecasting.memory import MemoryMap, MemoryShortage
from systolic.job import Axis, Layout, Precision, Remat
from systolic.planning.analytic import Facts, analyse, facts_of
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Goal, Objective
from systolic.planning.notes import NoAnswer, WayToAnswer
from systolic.planning.plan import Plan, SearchStop, Trial
from systolic.planning.space import RefusalRule, Refused

OPTIONS = {
    "model": {
        "layers": 16,
        "d_model": 2048,
        "d_ff": 8192,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 32768,
    },
    "sequence": 2048,
    "batch": 256,
}
GOAL = Goal(units=20e9, unit="tokens", objective=Objective.pareto)


@cache
def facts() -> Facts:
    """Of a language model of 1.3 B parameters."""
    recipe = recipes.find("lm")
    return facts_of(recipe(recipes.typed(recipe, OPTIONS)))


def candidate(on: str, batch: int = 256, **layout: object) -> Candidate:
    """``candidate("v5e-16", fsdp=16, remat=Remat.full)``."""
    base = replace(Layout(), **{axis.value: 1 for axis in Axis})
    return Candidate(
        on=slice(on),
        layout=replace(base, **layout),  # ty: ignore[invalid-argument-type]
        batch=batch,
        precision=Precision.bf16,
    )


def tried(
    one: Candidate, seconds: float, gib: float, goal: Goal = GOAL, full: bool = False
) -> Trial:
    """One that takes so long a step and so much of each device; above the capacity it does not fit."""
    on = one.on
    have = (on.chip.hbm_bytes or 0) // (on.chip.devices_per_chip or 1)
    need = int(gib * GIB)
    fits = need <= have
    made = Forecast(
        recipe="lm",
        on=on,
        origin=Origin.simulated,
        fits=fits,
        capacity_bytes=have,
        memory=MemoryMap(
            peak_bytes=need,
            estimated_bytes=need,
            by_kind={"parameters": need // 2, "temporaries": need - need // 2},
            buffers=(),
        )
        if fits
        else None,
        step_seconds=seconds if fits else None,
        low=seconds * 0.92 if fits else None,
        high=seconds * 1.12 if fits else None,
        model_flops=facts().train_flops * one.batch,
        unit="tokens",
        units=one.batch * 2048,
        bill=bill_of(on),
        rejected=None if fits else MemoryShortage(need_bytes=need, have_bytes=have),
    )
    total = goal.total(goal.tariff(on), one.batch * 2048, seconds) if fits else None
    return Trial(
        candidate=one,
        analysis=analyse(facts(), one),
        forecast=made,
        total=total,
        broken=None if total is None else goal.broken(total),
        full=full,
    )


def plan(goal: Goal = GOAL, stopped: SearchStop | None = None) -> Plan:
    """Of four slices: five layouts fit, one does not, one did not compile."""
    keep_none, most = Remat.full, Remat.minimal
    found = (
        tried(candidate("v5e-64", data=4, fsdp=16, remat=most), 1.02, 13.1, goal, full=True),
        tried(candidate("v5e-64", fsdp=64, remat=keep_none), 1.21, 7.4, goal),
        tried(candidate("v5e-16", fsdp=16, remat=keep_none, accumulate=2), 4.4, 11.9, goal),
        tried(candidate("v5p-16", data=2, fsdp=2, tensor=2, remat=Remat.none), 2.65, 61.0, goal),
        tried(candidate("v6e-16", fsdp=16, remat=most, attention_block=1024), 1.31, 22.0, goal),
        tried(candidate("v5e-16", fsdp=16, remat=Remat.none), 4.0, 20.3, goal),
        Trial(
            candidate=candidate("v6e-16", fsdp=8, tensor=2, remat=keep_none),
            analysis=analyse(facts(), candidate("v6e-16", fsdp=8, tensor=2, remat=keep_none)),
            problem="compiling lm for v6e-16 failed: the compiler died of SIGKILL",
        ),
    )
    refused = (
        Refused(
            on=slice("v5e-4"),
            layouts=1204,
            rule=RefusalRule.memory_bound,
            reason="weights, optimizer state and layer inputs alone need at least 18.20 GiB of 15.75 GiB (nearest: fsdp 4 remat full)",
        ),
        Refused(
            on=slice("v5e-64"),
            layouts=412,
            rule=RefusalRule.not_compiled,
            reason="estimated slower than what was compiled, or less likely to fit",
        ),
    )
    return Plan(
        facts=facts(),
        goal=goal,
        tried=found,
        refused=refused,
        searched=3120,
        seconds=245.0,
        stopped=stopped,
        target="lm",
        options=OPTIONS,
        notes=(NoAnswer(ways=tuple(WayToAnswer)),),
    )
