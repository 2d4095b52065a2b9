"""Figures of a plan as text, shared by the terminal and the page."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from systolic.core.units import GIB, dollars, duration, si
from systolic.forecasting.cautions import summary
from systolic.forecasting.display import readings
from systolic.job import Layout
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Objective, PriceTerm, days
from systolic.planning.plan import PAIRED_ERROR, CompileDepth, Plan, SearchStop, Trial, reason_of
from systolic.planning.space import RefusalRule, Refused
from systolic.planning.wall import Wall
from systolic.report import figures
from systolic.report.figures import Tone, Verdict

PLAN = "plan.json"
"""File name in commands where no plan was written."""

RULES = {
    RefusalRule.compiler: "compiled, but no answer",
    RefusalRule.goal: "break the goal even at the chip's peak rate",
    RefusalRule.memory_bound: "weights, optimizer state and inputs alone exceed the memory",
    RefusalRule.estimate: "estimated slower than others of the slice",
    RefusalRule.more_memory: "keep at least as much memory as one that did not fit",
    RefusalRule.larger: "larger or dearer than the slice that fits",
    RefusalRule.divisibility: "no mesh divides the model and the batch",
    RefusalRule.unknown_chip: "the catalogue lacks a rate",
    RefusalRule.not_compiled: "not compiled",
}
"""Reasons of rejection as text."""
DEPTHS = {
    CompileDepth.full: "full",
    CompileDepth.schedule: "schedule",
    CompileDepth.roofline: "roofline",
}
"""Depths of a compile as text."""
STOPS = {SearchStop.interrupted: "interrupted", SearchStop.time_limit: "time limit"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRow:
    """Row of the ranking: one candidate."""

    rank: int
    trial: Trial
    slice: str
    layout: str
    unlike: str
    """Settings that differ from the best candidate's, with their values; empty for the best."""
    batch: str
    step: str
    mfu: str
    memory: str
    """``13.1 of 15.8`` GiB of one device."""
    memory_share: float
    time: str
    usd: str
    kwh: str
    compile: str
    pareto: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Layouts that one rule rejected."""

    rule: RefusalRule
    words: str
    layouts: int
    slices: int
    """Number of slices."""
    nearest: str
    """Message of the layout that missed the limit by least."""


def money(usd: float | None) -> str:
    """``$1,040``; cents below a hundred dollars."""
    return figures.MISSING if usd is None else dollars(usd)


def step(seconds: float) -> str:
    """Step time with three digits, since candidates differ by little."""
    return f"{seconds:.3g} s" if 0.9995 <= seconds < 100 else duration(seconds)


def energy(kwh: float | None) -> str:
    """Kilowatt-hours, three digits."""
    return figures.MISSING if kwh is None else readings.figure(kwh)


def wall_time(wall: Wall) -> str:
    """The whole wall-clock, or that it has no end."""
    return days(wall.seconds) if math.isfinite(wall.seconds) else "never ends"


def wall(clock: Wall) -> str:
    """Wall-clock as text: ``4.1 days: 4 days of steps, start-up 3 m 20 s, …``."""
    parts = [f"{days(clock.train_seconds)} of steps", f"start-up {duration(clock.start_seconds)}"]
    size = f"{clock.checkpoint_bytes / 1e9:.3g} GB"
    count = figures.plural(clock.checkpoints, "checkpoint")
    parts.append(f"{count} of {size} {duration(clock.checkpoint_seconds)}")
    need, have = clock.data_bytes_per_second / 1e9, clock.host_bytes_per_second / 1e9
    data = f"data {need:.2g} GB/s a host, which reads {have:.3g}"
    if clock.data_seconds:
        data += f": {days(clock.data_seconds)} of waiting"
    parts.append(data)
    if clock.preemptions and math.isfinite(clock.seconds):
        lost = days(clock.lost_seconds)
        parts.append(f"preemptions expected: {clock.preemptions:.2g}, which cost {lost}")
    elif clock.preemptions:
        parts.append("preemptions undo more than a start and half the steps of a checkpoint take")
    ends = [money(clock.usd)] if clock.usd is not None else []
    if clock.kg_co2 is not None:
        ends.append(f"{energy(clock.kg_co2)} kg CO2")
    return f"{wall_time(clock)}: {', '.join(parts)}" + (f"; {', '.join(ends)}" if ends else "")


def interval(trial: Trial) -> str:
    """Interval of the step time: ``−8 to +12 %``; empty where unknown."""
    forecast = trial.forecast
    if forecast is None or not forecast.step_seconds or forecast.low is None:
        return ""
    if forecast.high is None:
        return f"{readings.bound(forecast)}: {summary(forecast.incomplete)}"
    low, high = (bound / forecast.step_seconds - 1 for bound in (forecast.low, forecast.high))
    return f"{low * 100:+.0f} to {high * 100:+.0f} %".replace("-", "−")


def memory(trial: Trial) -> str:
    """``13.10 of 15.75 GiB`` of one device."""
    forecast = trial.forecast
    if forecast is None:
        return figures.MISSING
    need, have = forecast.need_bytes, forecast.capacity_bytes
    return f"{need / GIB:.2f} of {have / GIB:.2f} GiB" if have else f"{need / GIB:.2f} GiB"


def verdict(plan: Plan) -> Verdict:
    """Verdict of a plan: the answer with its totals, or what is nearest to one."""
    best = plan.best
    if best is None:
        broken = any(trial.broken for trial in plan.tried) or any(
            refused.rule is RefusalRule.goal for refused in plan.refused
        )
        word = "none meets the goal" if broken else "nothing fits"
        if plan.stopped:
            word = "no answer yet"
        return Verdict(word=word, sentence=f"{nearest(plan)}.", tone=Tone.bad)
    assert best.total is not None
    parts = [days(best.total.seconds)]
    if best.total.usd is not None:
        of = ", ".join(filter(None, plan.goal.priced(best.candidate.on).values()))
        parts.append(f"{money(best.total.usd)} ({of})" if of else money(best.total.usd))
    if best.forecast is not None and best.forecast.mfu is not None:
        parts.append(f"{figures.percent(best.forecast.mfu)} MFU")
    parts.append(memory(best))
    text = f"{best.candidate.name}: {', '.join(parts)}"
    if within := interval(best):
        text += f"; step time within {within}"
    tone = Tone.good if not plan.stopped else Tone.fair
    words = {
        None: "planned",
        SearchStop.interrupted: "best so far",
        SearchStop.time_limit: "best in the time",
    }
    return Verdict(word=words[plan.stopped], sentence=f"{text}.", tone=tone)


def nearest(plan: Plan) -> str:
    """The rejected candidate nearest to an answer, with its figures."""
    tried = (RefusalRule.compiler, RefusalRule.goal)
    if failures := [reason for reason in reasons(plan) if reason.rule in tried]:
        return f"nearest is {failures[0].nearest}"
    others = reasons(plan)
    if others:
        return f"nothing was worth a compile: {others[0].nearest}"
    return "no layout was found" if plan.stopped is None else STOPS[plan.stopped]


def command(plan: Plan, path: Path | None, number: int = 1) -> str:
    """Command that runs a candidate; of a Job, which no command names, the call."""
    if not plan.target:
        more = f", candidate={number}" if number > 1 else ""
        return f"systolic.train(job, plan=plan{more})"
    words = ["systolic", "train", plan.target, "--plan", str(path or PLAN)]
    return shlex.join([*words, *(["--candidate", str(number)] if number > 1 else [])])


def tie(plan: Plan) -> str:
    """``1 to 3 lie within 4 %: …``; empty where the forecast can tell the best from the others."""
    if not (ranks := plan.tie):
        return ""
    named = f"1 {'and' if len(ranks) == 2 else 'to'} {ranks[-1]}"
    if ranks[-1] > len(ranks):
        named = f"1 and {figures.plural(len(ranks) - 1, 'other')} of its slice"
    return f"{named} lie within {PAIRED_ERROR:.1%} (1 sigma): the forecast can't tell them apart; the simplest is first"


def rows(plan: Plan) -> list[RankingRow]:
    """The ranking."""
    front, ranking = {id(trial) for trial in plan.pareto}, plan.ranking
    return [
        _row(rank, trial, ranking[0], id(trial) in front) for rank, trial in enumerate(ranking, 1)
    ]


def _row(rank: int, trial: Trial, best: Trial, pareto: bool) -> RankingRow:
    forecast, total = trial.forecast, trial.total
    assert forecast is not None
    assert total is not None
    need, have = forecast.need_bytes, forecast.capacity_bytes
    return RankingRow(
        rank=rank,
        trial=trial,
        slice=trial.candidate.on.name,
        layout=trial.candidate.text,
        unlike=unlike(best.candidate, trial.candidate),
        batch=f"{trial.candidate.batch:,}",
        step=step(forecast.step_seconds or 0.0),
        mfu=figures.MISSING if forecast.mfu is None else f"{forecast.mfu * 100:.1f} %",
        memory=f"{need / GIB:.1f} of {have / GIB:.1f}",
        memory_share=need / have if have else 0.0,
        time=days(total.seconds),
        usd=money(total.usd),
        kwh=energy(total.kwh),
        compile=DEPTHS[trial.depth],
        pareto=pareto,
    )


def unlike(best: Candidate, candidate: Candidate) -> str:
    """Settings of a candidate that differ from the best: ``data 4, remat full``; ``+out`` for an added name."""
    now, then = best.layout.words(), candidate.layout.words()
    parts = []
    for name, value in then.items():
        if value == now[name]:
            continue
        if name == "remat" and candidate.layout.remat is best.layout.remat:
            parts.append(_names(best.layout, candidate.layout))
        else:
            parts.append(f"{name} {value}")
    if candidate.flags != best.flags and candidate.flags.generations:
        parts.append(f"flags {candidate.flags.name}")
    elif candidate.flags != best.flags:
        parts.append(f"no flags {best.flags.name}")
    if candidate.precision is not best.precision:
        parts.append(f"precision {candidate.precision.value}")
    return ", ".join(parts)


def _names(best: Layout, layout: Layout) -> str:
    """Names added to or removed from a policy: ``remat +out -mlp, keep +attention``."""

    def change(before: Sequence[str], after: Sequence[str]) -> str:
        more = [f"+{name}" for name in after if name not in before]
        return " ".join([*more, *(f"-{name}" for name in before if name not in after)])

    kinds = {
        "remat": change(best.remat_names, layout.remat_names),
        "keep": change(best.saved_names, layout.saved_names),
    }
    return ", ".join(f"{kind} {text}" for kind, text in kinds.items() if text)


def shown(ranked: Sequence[RankingRow], room: int) -> list[RankingRow]:
    """At most ``room`` rows: the first, the best of each slice and the front, then by rank."""
    firsts: dict[str, RankingRow] = {}
    for row in ranked:
        firsts.setdefault(row.slice, row)
    wanted = [*ranked[:1], *firsts.values(), *(row for row in ranked if row.pareto), *ranked]
    kept = {row.rank: row for row in wanted[:1]}
    for row in wanted:
        if len(kept) == room:
            break
        kept[row.rank] = row
    return [kept[rank] for rank in sorted(kept)]


def reasons(plan: Plan) -> list[Reason]:
    """Rejected layouts by rule."""
    rejections = []
    failed = plan.failed
    if failed:
        words = _failed_words(failed)
        names = {trial.candidate.on.name for trial in failed}
        rejections.append(
            Reason(
                rule=RefusalRule.compiler,
                words=words,
                layouts=len(failed),
                slices=len(names),
                nearest=_nearest_failed(plan, failed),
            )
        )
    by_rule: dict[RefusalRule, list[Refused]] = {}
    for refusal in plan.refused:
        by_rule.setdefault(refusal.rule, []).append(refusal)
    for rule in sorted(by_rule, key=list(RefusalRule).index):
        group = by_rule[rule]
        near = min(group, key=_miss)
        if rule is RefusalRule.not_compiled:
            near = group[0]  # the search puts the most promising first
        rejections.append(
            Reason(
                rule=rule,
                words=RULES[rule],
                layouts=sum(refusal.count for refusal in group),
                slices=len({refusal.on.name for refusal in group}),
                nearest=f"{near.on.name}: {near.reason}",
            )
        )
    return rejections


def _miss(refusal: Refused) -> tuple[float, int, str]:
    """Sort key of a near miss: the rule's figure, else the strongest slice; never the order of ``--on``."""
    memory = refusal.on.num_chips * (refusal.on.chip.hbm_bytes or 0)
    return math.inf if refusal.miss is None else refusal.miss, -memory, refusal.on.name


def _failed_words(failed: Sequence[Trial]) -> str:
    """``3 do not fit, 2 break the goal, 1 did not compile``."""
    unfit = sum(trial.forecast is not None and not trial.forecast.fits for trial in failed)
    broken = sum(trial.broken is not None for trial in failed)
    numbers = [
        (unfit, "does not fit" if unfit == 1 else "do not fit"),
        (broken, "breaks the goal" if broken == 1 else "break the goal"),
        (len(failed) - unfit - broken, "did not compile"),
    ]
    return "compiled: " + ", ".join(f"{number} {text}" for number, text in numbers if number)


def _nearest_failed(plan: Plan, failed: Sequence[Trial]) -> str:
    """The nearest failed trial: one that breaks the goal before one that does not fit, before an error."""

    def miss(trial: Trial) -> tuple[int, float, str]:
        name = trial.candidate.name
        if trial.total is not None:
            return 0, plan.goal.excess(trial.total), name
        if trial.forecast is not None:
            have = trial.forecast.capacity_bytes
            return 1, trial.forecast.need_bytes / have if have else 0.0, name
        return 2, 0.0, name

    trial = min(failed, key=miss)
    failure = "" if trial.problem is None else "failed: "
    return f"{trial.candidate.name}, which {failure}{reason_of(trial)}"


def work(plan: Plan) -> str:
    """``20 G tokens, shortest time, within 3 days, below $1,000``."""
    goal = plan.goal
    words = {
        Objective.time: "shortest time",
        Objective.cost: "lowest cost",
        Objective.energy: "lowest energy",
        Objective.pareto: "time and cost",
        Objective.fit: "the smallest slice that fits",
    }
    parts = [f"{si(goal.units)} {goal.unit}", words[goal.objective]]
    if goal.deadline_seconds is not None:
        parts.append(f"within {days(goal.deadline_seconds)}")
    if goal.budget_usd is not None:
        parts.append(f"for {money(goal.budget_usd)} at most")
    if goal.chip_usd is not None:
        parts.append(f"{dollars(goal.chip_usd)} a chip and hour")
    elif goal.price is not PriceTerm.on_demand:
        parts.append(f"{goal.price.value} prices")
    return ", ".join(parts)


def searched(plan: Plan) -> str:
    """``12,345 layouts of 3 slices analysed, 24 compiled (2 in full), 4 m 05 s``."""
    names = {trial.candidate.on.name for trial in plan.tried} | {
        refused.on.name for refused in plan.refused
    }
    full = sum(trial.full for trial in plan.tried)
    text = f"{figures.plural(plan.searched, 'layout')} of {figures.plural(len(names), 'slice')} analysed, {len(plan.tried)} compiled"
    if full:
        text += f" ({full} in full)"
    text += f", {duration(plan.seconds)}"
    return text if plan.stopped is None else f"{text}; {STOPS[plan.stopped]}"
