"""The verdict on a run in a word and a sentence, and the commands that follow from it."""

import enum
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from systolic.report import figures
from systolic.report.run import Run, State
from systolic.report.terminal import one_line

LEVEL = 0.02
"""Compression within this share of gzip's counts as level with it."""


class Tone(enum.Enum):
    """How a verdict is coloured."""

    good = "good"
    fair = "fair"
    bad = "bad"
    neutral = "neutral"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What to think of a run at first sight."""

    word: str
    sentence: str
    tone: Tone


def judge(run: Run) -> Verdict:
    """The verdict from how the run ended, its last loss and its metrics against their baseline."""
    place = f"step {figures.count(run.step)} of {figures.count(run.steps)}"
    loss = run.final_loss
    if run.state is State.interrupted:
        return Verdict(
            word="interrupted",
            sentence=f"Interrupted at {place}{_detail(run, 'interrupt')}.",
            tone=Tone.fair,
        )
    diverged = loss is not None and not math.isfinite(loss)
    if run.state is State.stopped:
        tone = Tone.fair if run.summary is not None and not diverged else Tone.bad
        return Verdict(
            word="stopped", sentence=f"Stopped at {place}{_detail(run, 'stop')}.", tone=tone
        )
    if run.state is State.unfinished:
        what = "it is still training or was killed"
        where = f"the last record is of {place}" if run.train else "no step is on record yet"
        return Verdict(
            word="unfinished", sentence=f"No summary: {what}; {where}.", tone=Tone.neutral
        )
    if diverged:
        return Verdict(
            word="diverged", sentence="The last loss is not a number.", tone=Tone.bad
        )
    return _judge_metrics(run.final_metrics, loss)


def _judge_metrics(metrics: Mapping[str, Any], loss: float | None) -> Verdict:
    own = figures.number(metrics.get("validation_bits_per_byte"))
    gzip = figures.number(metrics.get("gzip_bits_per_byte"))
    if own is not None and gzip is not None and gzip > 0 and math.isfinite(own):
        gain = 1 - own / gzip
        where = f"{own:.3f} bits per byte on held-out text, where gzip needs {gzip:.3f}"
        if abs(gain) <= LEVEL:
            return Verdict(word="level with gzip", sentence=f"{where}.", tone=Tone.fair)
        if gain > 0:
            sentence = f"{where}: {gain * 100:.0f} % less."
            return Verdict(word="beats gzip", sentence=sentence, tone=Tone.good)
        sentence = f"{where}: {-gain * 100:.0f} % more. Train longer or take a larger model."
        return Verdict(word="behind gzip", sentence=sentence, tone=Tone.bad)
    for name in ("test_accuracy", "validation_accuracy"):
        accuracy = figures.number(metrics.get(name))
        if accuracy is not None:
            sentence = f"{figures.label(name).capitalize()} {figures.percent(accuracy)}."
            return Verdict(word="trained", sentence=sentence, tone=Tone.good)
    sentence = "" if loss is None else f"Final loss {figures.figure(loss)}."
    return Verdict(word="trained", sentence=sentence, tone=Tone.good)


def _detail(run: Run, name: str) -> str:
    details = [e.get("detail") for e in run.last_session_events if e.get("name") == name]
    return f": {one_line(str(details[-1]), 200).rstrip('.')}" if details and details[-1] else ""


def commands(run: Run) -> list[tuple[str, str]]:
    """What to type: (purpose, command) pairs from the recipe and options that job.json keeps."""
    where = shlex.quote(str(run.path))
    found = []
    recipe = run.job.get("recipe")
    if recipe:
        options = _options(run.job.get("options") or {})
        found.append(("the same run again", shlex.join(["systolic", "train", str(recipe), *options])))
        if ".py" in str(recipe):
            copy = shlex.join(["systolic", "train", _copied(run, str(recipe)), *options])
            found.append(("from the copy of the recipe kept with the run", copy))
        if run.state is not State.finished:
            found.append(("go on from the last checkpoint", f"systolic train --resume {where}"))
    if run.summary is not None:
        found.append(("evaluate it", f"systolic eval {where}"))
    following = (run.summary or {}).get("next")
    if following and str(following) not in [command for _, command in found]:
        found.append(("next", str(following)))
    return found


def _copied(run: Run, recipe: str) -> str:
    _, _, function = recipe.rpartition(".py:")
    return str(run.path / "recipe.py") + (f":{function}" if ".py:" in recipe else "")


def _options(options: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """Options as words: nested or dotted names, lists as several words, true as a plain flag."""
    words: list[str] = []
    for name, value in options.items():
        option = prefix + str(name).replace("_", "-")
        if isinstance(value, Mapping):
            words += _options(value, f"{option}.")
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        elif value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words
