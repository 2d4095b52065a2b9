"""Results of ``systolic tune`` in the terminal, and texts for a study's figures, which its page shows too."""

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from systolic.core.reporter import reporter
from systolic.core.units import dollars, si
from systolic.report import figures
from systolic.report.figures import TONE_COLOURS, Tone, Verdict
from systolic.report.output import print_json
from systolic.report.terminal import print_lines
from systolic.tuning.results import StudyResult, TrialRow

STATES = ("done", "stopped early", "refused", "failed", "running", "waiting")
"""States of a trial, in the order in which their counts are listed."""
WIDEST = 160
NAMES = 12
"""Columns of a row's name."""
FRONT = 12
"""Most trials of the Pareto front that are listed."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""


def settings_of(row: TrialRow) -> str:
    """Settings of a trial: ``optimizer.learning-rate 0.003, model.layers 6``."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in row.values.items())


def figure(study: StudyResult, name: str, value: float | None) -> str:
    """An objective's value as text."""
    if value is None or not math.isfinite(value):
        return figures.MISSING
    if name == "seconds":
        return figures.seconds(value)
    if name == "dollars":
        return dollars(value)
    if name == "parameters":
        return si(value)
    return figures.metric(name, value, study.shares)


def objectives(study: StudyResult, row: TrialRow) -> str:
    """A trial's objectives: ``accuracy 98.6 %, 12 s``."""
    return ", ".join(
        f"{figures.label(aim.name)} {figure(study, aim.name, row.figures[aim.name])}"
        for aim in study.aims
        if aim.name in row.figures
    )


def counted(study: StudyResult) -> str:
    """Trials by state: ``30 done, 9 stopped early, 1 refused``."""
    states = Counter(row.state for row in study.rows)
    return ", ".join(f"{states[name]} {name}" for name in STATES if states[name])


def verdict_of(study: StudyResult) -> Verdict:
    """Status of the study: a word and a sentence."""
    best = study.best
    if best is None:
        return Verdict(word="no result", sentence=_reason(study), tone=Tone.bad)
    sentence = f"best: {objectives(study, best)} with {settings_of(best)} (trial {best.number})"
    if len(study.front) > 1:
        sentence = f"{figures.plural(len(study.front), 'trial')} on the Pareto front"
    if study.finished < study.total:
        why = f"; {study.stopped}" if study.stopped else ""
        word = f"{study.finished} of {figures.plural(study.total, 'trial')}"
        return Verdict(word=word, sentence=f"{sentence}{why}", tone=Tone.neutral)
    return Verdict(word="done", sentence=sentence, tone=Tone.good)


def _reason(study: StudyResult) -> str:
    reasons = [row.reason for row in study.rows if row.reason]
    return study.stopped or (
        f"{counted(study)}; the last one: {reasons[-1]}" if reasons else "no trial has ended"
    )


def luck_of(study: StudyResult) -> str:
    """Verdict of the repeats, or how many other settings are as good as the best; empty if neither is known."""
    if study.repeats is not None:
        return study.repeats["sentence"]
    if study.best is None or not study.near:
        return ""
    others = figures.plural(study.near, "other trial")
    verb = "is" if study.near == 1 else "are"
    return f"{others} {verb} within one validation example (of {study.examples}); run --repeats 5 to test whether the gain is real"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedFigures:
    """Results of settings that were trained with several seeds, as text."""

    name: str
    """``best`` or ``default``."""
    mean: str
    deviation: str
    """Standard deviation; empty for fewer than two results."""
    seeds: str
    """``5 seeds``, ``3 of 5 seeds``."""


def spreads_of(study: StudyResult) -> list[SeedFigures]:
    """Mean and standard deviation of the best and the default settings; of those that have a result."""
    repeats, seed_figures = study.repeats, []
    if repeats is None:
        return []
    for which in ("best", "default"):
        repeated = repeats[which]
        count, total = len(repeated["values"]), repeats["seeds"]
        if not count:
            continue
        seed_figures.append(
            SeedFigures(
                name=which,
                mean=_precise(study, repeated["mean"], "#.4g"),
                deviation=""
                if repeated["deviation"] is None
                else _precise(study, repeated["deviation"], ".2g"),
                seeds=f"{'' if count == total else f'{count} of '}{figures.plural(total, 'seed')}",
            )
        )
    return seed_figures


def _precise(study: StudyResult, value: float, form: str) -> str:
    is_share = figures.is_share(study.aims[0].name, study.shares)
    return f"{value * 100:{form}} %" if is_share else f"{value:{form}}"


def edges_of(study: StudyResult) -> list[str]:
    """Sentences on best values at an end of their range."""
    return [
        f"the best {edge.option} {value_text(edge.value)} is at the end of its range; search {edge.search}"
        for edge in study.edges
    ]


def whole_percent(share: float) -> str:
    """A share as whole per cent; what rounds to 0 is below 1."""
    return "< 1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def value_text(value: Any) -> str:
    """A searched value as typed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def show(study: StudyResult, *, json: bool = False) -> int:
    """Prints the results of a search; returns the exit code.

    Args:
        study: The results.
        json: Print the study as one JSON object on stdout.
    """
    if json:
        print_json({**study.to_json(), "report": str(study.page)})
    else:
        print_study(study)
        print(f"{'report':<{NAMES}}{shlex.quote(str(study.page))}")
    if study.interrupted:
        reporter().warn("interrupted; rerun to continue")
        return INTERRUPTED
    return 0 if study.best is not None else 1


def print_study(study: StudyResult) -> None:
    """Prints a study's results and the command that trains the best settings at full size."""
    print_lines(lambda _: lines(study), WIDEST)


def lines(study: StudyResult) -> list[Text]:
    """Lines of the results."""
    verdict = verdict_of(study)
    head = Text(f"{study.recipe}: ", style="bold").append(verdict.word, TONE_COLOURS[verdict.tone])
    texts = [head, Text(verdict.sentence)]
    if study.rows:
        texts.append(_row("trials", counted(study)))
    if len(study.aims) > 1:
        for place, row in enumerate(study.front[:FRONT]):
            text = f"trial {row.number}: {objectives(study, row)}; {settings_of(row)}"
            texts.append(_row("" if place else "front", text))
        if len(study.front) > FRONT:
            texts.append(_row("", f"and {len(study.front) - FRONT} more, on the page"))
    if study.importance:
        shares = (f"{name} {whole_percent(share)}" for name, share in study.importance.items())
        texts.append(_row("importance", ", ".join(shares)))
    texts += [_row("range", sentence) for sentence in edges_of(study)]
    for spread in spreads_of(study):
        deviation = f", standard deviation {spread.deviation}" if spread.deviation else ""
        name = figures.label(study.aims[0].name)
        texts.append(_row(spread.name, f"mean {name} {spread.mean}{deviation} over {spread.seeds}"))
    if luck := luck_of(study):
        texts.append(_row("luck", luck))
    seconds = sum(row.seconds or 0.0 for row in study.rows)
    if seconds:
        texts.append(_row("time", f"{figures.seconds(seconds)} for all trials"))
    if study.dollars is not None:
        of = f" ({study.price})" if study.price else ""
        cost = f"{dollars(study.dollars)}{of} forecast for training steps on the slice; start-up, evaluations and repeats are not included"
        texts.append(_row("cost", cost))
    if study.command:
        texts.append(_row("train it", study.command))
    return texts


def _row(name: str, text: str) -> Text:
    return Text(f"{name:<{NAMES}}", style="dim").append(text, "not dim")
