"""Explanation of a run: poor learning and lost time, from its records and a probe of its newest checkpoint."""

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.errors import SystolicError
from systolic.core.reporter import reporter
from systolic.core.units import duration
from systolic.explaining import learning
from systolic.explaining.settings import changes, settings_of
from systolic.explaining.step import Cause
from systolic.runs import record as records
from systolic.runs.job_record import read_record
from systolic.runs.metrics import ProbeRecord, probe_of
from systolic.runs.record import RunRecord, load_run
from systolic.runs.run import Run

WAIT = 0.05
"""Share of the wall time from which waiting for data is reported."""
EVALUATION = 0.10
CHECKPOINT = 0.05
COMPILE = 0.30
OTHER = 0.30
DIAGNOSE = 0.02
STALL = 0.05
SLOW = 2.0
"""Ratio to the median step time that makes a stretch of steps slow."""
IDLE = 0.05
"""Share of time the host waits for the accelerator below which the host limits the run."""


def speed(history: RunRecord) -> list[Cause]:
    """Causes of a session's time besides its steps, largest first; shares are of the wall time.

    Args:
        history: Records of the last session only, which the summary's times are of.
    """
    spent = seconds_by_kind(history)
    total = sum(spent.values())
    if not history.train or not total:
        return []
    rules: tuple[Callable[[RunRecord, Mapping[str, float], float], Cause | None], ...] = (
        input_wait,
        host,
        recompilation,
        stalls,
        evaluation,
        checkpoints,
        compiling,
        probes,
        other,
    )
    causes = [cause for rule in rules if (cause := rule(history, spent, total)) is not None]
    return sorted(causes, key=lambda cause: -(cause.share or 0.0))


def seconds_by_kind(history: RunRecord) -> dict[str, float]:
    """The summary's ``time``; without one the sum of the records, which lacks the start-up."""
    if history.summary is not None:
        return defaultdict(float, history.summary.time)
    return records.spent(history.train, history.evals, history.events, history.resumed_from)


def input_wait(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Time in which steps waited for their batches."""
    waited = spent["data_wait"]
    if waited < WAIT * total:
        return None
    worst = max(history.train, key=lambda record: record.data_wait or 0.0)
    evidence = [
        f"{duration(waited)} of {duration(waited + spent['step'])} in the loop; worst before step {worst.step}: {(worst.data_wait or 0.0) * 100:.0f} %"
    ]
    cores, now = os.cpu_count() or 2, history.start.workers
    more = max(cores // 2, 1)
    advice = [f"--workers {more if more > now else cores}" if now < cores else ""]
    if history.reads_text and _is_streamed(history):
        advice.append("systolic data pack, so that text is tokenized once and not while training")
    if not any(advice):
        advice = [
            f"files on a faster disk, or a larger model: {now} workers fill this machine's {cores} cores"
        ]
    return _cause("input-wait", "Steps wait for their batches", (waited, total), evidence, advice)


def host(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Time in which the accelerator waits for Python, seen by a host that never waits for it."""
    name = history.start.devices or "cpu"
    known = [wait for record in history.train if (wait := record.device_wait) is not None]
    if "cpu" in name.lower() or not known or statistics.median(known) > IDLE:
        return None
    seconds = _usual_seconds(history)
    evidence = [
        f"the host waited for results in {statistics.median(known) * 100:.1f} % of the time, so {name} ran out of work",
        f"a step takes {duration(seconds)} (median)",
    ]
    size = history.start.batch
    advice = ["systolic doctor, to see what else this machine does"]
    if size:
        advice.insert(0, settings_of(history).batch(2 * size, size))
    return _cause(
        "host-synchronisation", "The host is slower than the device", None, evidence, advice
    )


def recompilation(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Steps compiled again because a batch had another shape."""
    events = [event for event in history.events if event.name == "recompile"]
    if not events:
        return None
    seconds = sum(event.seconds for event in events)
    evidence = [
        f"step {event.step}: {event.detail} ({duration(event.seconds)})" for event in events[:3]
    ]
    advice = ["batches of one shape: pad the odd ones, mask 0, or leave them out"]
    title = f"The step was compiled again {len(events)} time" + ("s" if len(events) > 1 else "")
    return _cause("recompilation", title, (seconds, total), evidence, advice)


def stalls(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Stretches in which steps took far longer than usual."""
    if len(history.train) < 12:
        return None
    usual = _usual_seconds(history)
    lost, slow = 0.0, list[tuple[int, float]]()
    for record, steps in records.steps_of(history.train, history.resumed_from):
        each = record.step_seconds or 0.0
        own = each * (1 - (record.data_wait or 0.0))
        if own > SLOW * usual and steps > 0:
            lost += (own - usual) * steps
            slow.append((record.step, each))
    if lost < STALL * total:
        return None
    worst = sorted(slow, key=lambda stretch: -stretch[1])[:3]
    evidence = [f"{len(slow)} of {len(history.train)} stretches; a step takes {duration(usual)}"]
    evidence += [f"before step {step}: {duration(each)} a step" for step, each in worst]
    advice = ["systolic doctor, to see what else this machine does"]
    return _cause("stalls", "Some steps are far slower than most", (lost, total), evidence, advice)


def evaluation(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Evaluations that are long or frequent."""
    seconds = spent["eval"]
    if seconds < EVALUATION * total:
        return None
    count = len(history.evals)
    each = seconds / max(count, 1)
    factor = math.ceil(seconds / total / (EVALUATION / 2))
    evidence = [f"{count} {'evaluation' if count == 1 else 'evaluations'} of {duration(each)}"]
    settings = settings_of(history)
    within = [record for record in history.evals if not record.final]
    last = [record for record in history.evals if record.final]
    advice = [_rarer(history, "evaluation.every", factor)] if within else []
    name = "evaluation.batches" if within else "evaluation.final_batches"
    name = name if settings.has(name) else "evaluation.batches"
    read = max((record.batches or 0 for record in within or last), default=0)
    if read:
        evidence[0] += f", up to {read} batches each" if count > 1 else f", {read} batches"
    if read > 1:
        advice.append(settings.lower(name, value=max(read // factor, 1)))
    if last and not within:
        advice.append("more steps: there is one evaluation, at the end, however long the run is")
    return _cause("evaluation", "Evaluation takes long", (seconds, total), evidence, advice)


def checkpoints(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Checkpoints that are slow or frequent."""
    seconds = spent["checkpoint"]
    if seconds < CHECKPOINT * total:
        return None
    count = sum(event.name == "checkpoint" for event in history.events)
    evidence = [
        f"{count} {'checkpoint' if count == 1 else 'checkpoints'}, {duration(seconds / max(count, 1))} each"
    ]
    factor = math.ceil(seconds / total / (CHECKPOINT / 2))
    advice = [_rarer(history, "checkpoints.every", factor), "a faster disk for --run"]
    if count == 1:
        advice.append("more steps: there is one checkpoint, at the end, however long the run is")
    return _cause("checkpoints", "Saving takes long", (seconds, total), evidence, advice)


def compiling(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Compile time, where it is a large share of a short run."""
    seconds = spent["compile"]
    if seconds < COMPILE * total:
        return None
    evidence = [f"{duration(seconds)} of {duration(total)}"]
    advice = ["the same job again, which starts sooner: its programs are kept"]
    return _cause(
        "compile",
        "Compiling takes a large share of this short run",
        (seconds, total),
        evidence,
        advice,
    )


def probes(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Gradient probes that are too frequent."""
    seconds, count = spent.get("diagnose", 0.0), len(history.diagnoses)
    if seconds < DIAGNOSE * total or count < 2:
        return None
    gap = history.diagnoses[-1].step - history.diagnoses[-2].step
    evidence = [f"{count} probes, {duration(seconds / count)} each"]
    every = max(gap, 1) * math.ceil(seconds / total / (DIAGNOSE / 2))
    every = every if every < (history.steps or math.inf) else 0
    return _cause(
        "diagnosis",
        "Gradient probes take long",
        (seconds, total),
        evidence,
        [f"--diagnose {every}"],
    )


def other(history: RunRecord, spent: Mapping[str, float], total: float) -> Cause | None:
    """Start-up and all other time."""
    seconds = spent.get("start", 0.0) + spent.get("other", 0.0)
    if seconds < OTHER * total:
        return None
    evidence = [
        f"{duration(seconds)} of {duration(total)}: imports, listing the data, opening the run"
    ]
    return _cause("start-up", "Starting took long", (seconds, total), evidence, ["systolic doctor"])


def _usual_seconds(history: RunRecord) -> float:
    """Median time of a step."""
    return statistics.median(record.step_seconds or 0.0 for record in history.train)


def _is_streamed(history: RunRecord) -> bool:
    """Whether text is tokenized while it trains; rows of instructions and packed data are not."""
    from systolic.data.text.packed import MANIFEST

    data = history.job.outline.data
    if data.kind not in ("", "Documents"):
        return False
    return not (Path(data.path or "") / MANIFEST).is_file()


def _rarer(history: RunRecord, name: str, factor: int) -> str:
    """An option of steps between events, times a factor; 0, for the end alone, where that is beyond the run. "" where only the end has one."""
    settings = settings_of(history)
    every, steps = settings.get(name), history.steps or history.step
    if not every or every >= steps:
        return ""
    rarer = every * factor
    return settings.change(name, value=rarer if rarer < steps else 0)


def _cause(
    name: str,
    title: str,
    of: tuple[float, float] | None,
    evidence: list[str],
    advice: list[str],
) -> Cause:
    """``of`` is (seconds, wall seconds); ``None`` where the loss of time is not measured."""
    seconds, share = (None, None) if of is None else (of[0], of[0] / of[1])
    return Cause(
        name=name,
        title=title,
        share=share,
        seconds=seconds,
        evidence=evidence,
        advice=changes(advice),
    )


@dataclass(frozen=True, kw_only=True)
class RunExplanation:
    """Problems of a run."""

    path: Path
    causes: Sequence[Cause]
    """Causes of poor learning, then of lost time, each worst first."""
    figures: Mapping[str, Any]
    """``update_ratio``, ``noise_scale``, ``batch``, ``epochs`` and losses; None if unknown."""
    unit: str
    """Unit of ``noise_scale`` and ``batch``."""
    damage: Sequence[str]
    """Records that could not be read."""
    notes: Sequence[str]
    """Checks that were not possible, and why."""
    target: str = ""
    """The run's directory, as it was named."""

    def __repr__(self) -> str:
        """The causes' names on one line."""
        names = ", ".join(cause.name for cause in self.causes) or "no problem found"
        return f"<RunExplanation of {self.path}: {names}>"

    def _repr_html_(self) -> str:
        from systolic.explaining.display.text import lines, run_remarks
        from systolic.report.notebook import WIDTH, screen

        remarks = [*run_remarks(self.figures, self.unit), *self.damage]
        return screen(lines(str(self.path), self.causes, WIDTH, remarks=remarks, notes=self.notes))


def explain_run(
    path: Path,
    *,
    quick: bool = False,
    trust: bool = False,
) -> RunExplanation:
    """Explains a run that has ended or is still training.

    Args:
        path: The run.
        quick: Use its records only; otherwise a run without gradient probes is probed at its newest checkpoint.
        trust: Execute its recipe even if it is another user's.

    Raises:
        NotFoundError: the run does not exist.
        RunError: its records are damaged.
    """
    with Run.open(path) as run:
        notes: list[str] = []
        history = load_run(path)
        if not quick and not history.diagnoses:
            probes, why = probe(run, trust=trust)
            history = replace(history, diagnoses=probes)
            notes += [why] if why else []
    session = load_run(path, last_session=True)
    return RunExplanation(
        path=path,
        causes=[*learning.learning(history), *speed(session)],
        figures=learning.vitals(history),
        unit=history.unit,
        damage=history.damage,
        notes=[*notes, *learning.unknown(history, probed=not quick)],
    )


def probe(run: Run, *, trust: bool = False) -> tuple[list[ProbeRecord], str]:
    """Measures gradients, updates and noise by layer at the newest checkpoint; returns them, or the reason for none."""
    from systolic.inference.model import set_up_here
    from systolic.recipes.jobs.run import rebuild
    from systolic.setup import with_start
    from systolic.training.diagnosis import examine, too_large

    if not any(run.checkpoints.glob("[0-9]*")):
        return [], "there is no checkpoint to probe"
    try:
        setup = set_up_here(rebuild(run, trust_code=trust).job, run)
        if reason := too_large(setup):
            return [], reason
        reporter().stage("probing the newest checkpoint, layer by layer")
        if setup.steps.network.frozen:
            setup, _ = with_start(setup, run.path, read_record(run))
        return [probe_of(probed) for probed in examine(setup, run)], ""
    except SystolicError as error:
        return [], f"the newest checkpoint could not be probed: {error}"
