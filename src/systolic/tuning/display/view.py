"""Results of ``systolic tune`` in the terminal."""

import shlex

from rich.text import Text

from systolic.core.reporter import reporter
from systolic.core.units import dollars
from systolic.report import figures
from systolic.report.figures import TONE_COLOURS
from systolic.report.output import print_json
from systolic.report.terminal import print_lines
from systolic.tuning.display import readings
from systolic.tuning.results import StudyResult

WIDEST = 160
NAMES = 12
"""Columns of a row's name."""
FRONT = 12
"""Most trials of the Pareto front that are listed."""


INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""


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
    verdict = readings.verdict(study)
    head = Text(f"{study.recipe}: ", style="bold").append(verdict.word, TONE_COLOURS[verdict.tone])
    texts = [head, Text(verdict.sentence)]
    if study.rows:
        texts.append(_row("trials", readings.counted(study)))
    if len(study.aims) > 1:
        for place, row in enumerate(study.front[:FRONT]):
            text = (
                f"trial {row.number}: {readings.objectives(study, row)}; {readings.settings(row)}"
            )
            texts.append(_row("" if place else "front", text))
        if len(study.front) > FRONT:
            texts.append(_row("", f"and {len(study.front) - FRONT} more, on the page"))
    if study.importance:
        shares = (
            f"{name} {readings.whole_percent(share)}" for name, share in study.importance.items()
        )
        texts.append(_row("importance", ", ".join(shares)))
    texts += [_row("range", sentence) for sentence in readings.edges(study)]
    for spread in readings.spreads(study):
        deviation = f", standard deviation {spread.deviation}" if spread.deviation else ""
        name = figures.label(study.aims[0].name)
        texts.append(_row(spread.name, f"mean {name} {spread.mean}{deviation} over {spread.seeds}"))
    if luck := readings.luck(study):
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
