"""Verdict on a run, the figures that the summary and the page both show, and the commands to type next."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from systolic.report import figures
from systolic.report.figures import Tone, Verdict
from systolic.report.terminal import one_line
from systolic.runs.metrics import EventRecord
from systolic.runs.record import RunRecord, State
from systolic.runs.run import RECIPE
from systolic.training.display import readings

RERUN = "the same run again"
"""The purpose of the command that made a run."""
LEVEL = 0.02
"""Difference to gzip's compression that counts as equal."""


def judge(run: RunRecord) -> Verdict:
    """Judges a run by how it ended, its last loss, and its metrics against their baseline."""
    place = f"step {figures.count(run.step)} of {figures.count(run.steps)}"
    if run.state is State.interrupted:
        return Verdict(
            word="interrupted",
            sentence=f"Interrupted at {place}{_reason(run.summary.interrupted if run.summary else None)}.",
            tone=Tone.fair,
        )
    if run.state is State.failed:
        detail = one_line(_bad_step(run).detail or "a bad step", 200)
        return Verdict(word="failed", sentence=f"Ended at {place}: {detail}.", tone=Tone.bad)
    if run.state is State.unfinished:
        what = "it is still training or was killed"
        where = f"the last record is of {place}" if run.train else "no step is on record yet"
        return Verdict(
            word="unfinished", sentence=f"No summary: {what}; {where}.", tone=Tone.neutral
        )
    if run.has_diverged:
        sentence = f"The loss of step {figures.count(run.train[-1].step)}, the last on record, is not a number."
        return Verdict(word="diverged", sentence=sentence, tone=Tone.bad)
    if run.state is State.stopped:
        return Verdict(
            word="stopped",
            sentence=f"Stopped at {place}{_reason(run.summary.stopped if run.summary else None)}.",
            tone=Tone.fair,
        )
    ranking = run.job.outline.evaluation.metric or "loss"
    return _judge_metrics(run, ranking)


def _judge_metrics(run: RunRecord, ranking: str) -> Verdict:
    """Judges a finished run by its metrics; ``ranking`` is that of its checkpoints."""
    metrics, loss, text = run.final_metrics, run.final_loss, run.reads_text
    own = figures.number(metrics.get("validation_bits_per_byte"))
    gzip = figures.number(metrics.get("gzip_bits_per_byte"))
    if own is not None and gzip is not None and gzip > 0 and math.isfinite(own):
        gain = 1 - own / gzip
        where = f"{own:.3f} bits per byte on held-out text, gzip needs {gzip:.3f}"
        if abs(gain) <= LEVEL:
            return Verdict(word="level with gzip", sentence=f"{where}.", tone=Tone.fair)
        if gain > 0:
            sentence = f"{where}: {gain * 100:.0f} % less."
            return Verdict(word="beats gzip", sentence=sentence, tone=Tone.good)
        sentence = f"{where}: {-gain * 100:.0f} % more. Train longer or take a larger model."
        return Verdict(word="behind gzip", sentence=sentence, tone=Tone.bad)
    # The metric that ranks the run's checkpoints, where it is not the loss, is the one that is wanted.
    chosen = () if ranking == "loss" else (f"test_{ranking}", f"validation_{ranking}")
    if text and not any(name in metrics for name in chosen) and (sentence := _of_text(metrics)):
        return Verdict(word="trained", sentence=sentence, tone=Tone.good)
    usual = ("test_accuracy", "validation_bits_per_byte", "validation_accuracy", "validation_loss")
    best = (*chosen, *usual)
    for name in best:
        if name in metrics:
            value = figures.metric(name, metrics[name], run.start.shares)
            sentence = f"{figures.label(name).capitalize()} {value}."
            return Verdict(word="trained", sentence=sentence, tone=Tone.good)
    sentence = "" if loss is None else f"Final loss {figures.figure(loss)}."
    return Verdict(word="trained", sentence=sentence, tone=Tone.good)


def _of_text(metrics: Mapping[str, Any]) -> str:
    """Result on held-out text of a language model; "" without an evaluation."""
    for split in ("test", "validation"):
        bits = figures.number(metrics.get(f"{split}_bits_per_byte"))
        if bits is not None and math.isfinite(bits):
            return f"{bits:.3f} bits per byte on held-out text."
        value = readings.perplexity(metrics, split)
        if value is not None:
            loss = figures.figure(metrics[f"{split}_loss"])
            return f"Perplexity {value:.4g} on held-out text, a loss of {loss} per token."
    return ""


def _reason(reason: str | None) -> str:
    return f": {one_line(reason, 200)}" if reason else ""


def _bad_step(run: RunRecord) -> EventRecord:
    """The event that ended a failed run."""
    assert isinstance(run.last, EventRecord)
    return run.last


def commands(run: RunRecord) -> list[tuple[str, str]]:
    """Next commands: (purpose, command) pairs."""
    where = shlex.quote(str(run.path))
    argv = _started(run)
    pairs = [(RERUN, shlex.join(argv))] if argv else []
    copy = run.path / RECIPE
    if argv and copy.is_file():
        _, _, function = argv[2].rpartition(":")
        kept = ["systolic", "train", f"{copy}:{function}", *argv[3:]]
        pairs.append(("from the copy of the recipe kept with the run", shlex.join(kept)))
    if run.state is State.failed:
        batch = shlex.quote(str(run.path / "bad" / f"step-{_bad_step(run).step}.npz"))
        pairs.append(("replay the bad step", f"systolic train --replay {batch}"))
    if run.state is not State.finished:
        pairs.append(("continue from the last checkpoint", f"systolic train --resume {where}"))
    if run.summary is None:
        return pairs
    if run.summary.checkpoint:
        pairs.append(("evaluate it", f"systolic eval {where}"))
    following = run.summary.next
    if following and following not in [command for _, command in pairs]:
        pairs.append(("next", following))
    return pairs


def _started(run: RunRecord) -> list[str]:
    """Words of the command that started the run, without its directory; [] after a resume."""
    argv = [str(word) for word in run.environment.get("argv") or []]
    if len(argv) < 3 or argv[1] != "train" or argv[2].startswith("-"):
        return []
    words = ["systolic", *argv[1:]]
    if "--run" in words:
        at = words.index("--run")
        del words[at : at + 2]
    return [word for word in words if not word.startswith("--run=")]
