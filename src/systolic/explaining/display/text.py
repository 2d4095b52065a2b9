"""Explanations of steps as they are printed: the verdict, causes with evidence, changes with their commands, layouts that fit, and two steps compared."""

import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.text import Text

from systolic.chips.flags import described, spoken
from systolic.compiling import StepKind
from systolic.core.option_words import option_words
from systolic.core.units import duration, gibibytes, plural
from systolic.explaining.command import ExplainedKind
from systolic.explaining.explainer import RecipeStep, StepExplanation
from systolic.explaining.saved import StepComparison
from systolic.explaining.step import Cause
from systolic.forecasting import Forecast
from systolic.forecasting.display import readings
from systolic.planning.candidate import Candidate
from systolic.planning.display.readings import step
from systolic.planning.remedies import Remedy
from systolic.profile.table import ProfileTable
from systolic.report import terminal
from systolic.report.output import print_json
from systolic.report.terminal import print_lines

HEIGHT = 23
"""Lines of a screen, less one for the prompt."""

PROGRAMS = 3
"""Programs beside the step's that are named."""
LEAST_PROGRAM = 1e-3
"""Share of the step's program from which another one is named."""
LEAST_SHARE = 0.005
SPREAD = 1.05
"""Ratio of the slowest device's step to the fastest one's from which both are named."""
MAX_WIDTH = 100
COMMAND = re.compile(r"systolic (?:train --|explain )(?:'[^']*'|[^';])*")
"""A command to copy, up to the next semicolon."""
NO_BREAK = "\0"
"""Stands for a space of a command while its text is wrapped."""
LINES = (3, 2, 1)
"""Lines of evidence and of advice per cause; fewer where the screen can't hold all causes, and none for the last ones of many."""


QUICK = "from the compiler's schedule, the time of ops estimated: systolic forecast without --quick has the compiler's cycles"
"""Remark of every explanation of a step."""
GPU_QUICK = "from the GPU compiler's schedule, kernels priced by their sizes: none was timed"
"""The same of a GPU's step, whose compiler estimates no op."""
LEFT = 3
"""Most causes that are named of the best."""


def print_causes(
    title: str,
    causes: Sequence[Cause],
    *,
    remarks: Sequence[str] = (),
    notes: Sequence[str] = (),
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    width: int | None = None,
) -> None:
    """Prints the screen to ``stream`` (stdout), in colour on a terminal.

    Args:
        title: Name of what was explained.
        causes: Worst first.
        remarks: Figures to show even without a problem.
        notes: Questions that could not be judged.
        stream: Output stream.
        environ: Environment variables that describe the terminal.
        width: Columns; by default those of the terminal.
    """
    print_lines(
        lambda columns: lines(title, causes, columns, remarks=remarks, notes=notes),
        MAX_WIDTH,
        stream=stream,
        environ=environ,
        width=width,
    )


def lines(
    title: str,
    causes: Sequence[Cause],
    width: int,
    *,
    remarks: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> list[Text]:
    """Lines of the screen: at most :data:`HEIGHT` where the causes allow it, ``width`` columns wide."""
    head = [verdict(title, causes), Text("")]
    if sum(cause.share or 0.0 for cause in causes) > 1.0:
        remarks = ("causes overlap: their shares are more than the whole together", *remarks)
    tail = [_wrapped(remark, width, "  ", "dim") for remark in remarks]
    tail += [_wrapped(f"not judged: {note}", width, "  ", "dim") for note in notes]
    foot = [line for part in tail for line in part]
    for most in LINES:
        body = [line for i, cause in enumerate(causes) for line in _cause(i, cause, width, most)]
        if len(head) + len(body) + len(foot) <= HEIGHT:
            return [*head, *body, *foot]
    titles = [_cause(i, cause, width, 0) for i, cause in enumerate(causes)]
    body, left = [], sum(map(len, titles))
    for index, cause in enumerate(causes):
        detailed = _cause(index, cause, width, 1)
        left += len(detailed) - len(titles[index])
        if index and len(head) + left + len(foot) > HEIGHT:
            body += [line for title_lines in titles[index:] for line in title_lines]
            break
        body += detailed
    return [*head, *body, *foot]


def verdict(title: str, causes: Sequence[Cause]) -> Text:
    """The first line."""
    line = Text(title, style="bold")
    if not causes:
        return line.append(": no problem found", "green")
    count = f"{len(causes)} problem{'s' if len(causes) > 1 else ''}"
    return line.append(f": {count} found", "yellow")


def _cause(index: int, cause: Cause, width: int, most: int) -> list[Text]:
    cost = []
    if cause.share is not None:
        cost.append(f"{cause.share * 100:.1f} %")
    if cause.seconds is not None:
        cost.append(duration(cause.seconds))
    texts = _wrapped(cause.title, width - (24 if cost else 0), f"{index + 1}. ", "bold")
    if cost:
        texts[-1].append(f"  {', '.join(cost)}", "not bold yellow")
    if cause.work is not None and most > LINES[-1] and len(cause.evidence) > 1:
        texts += _wrapped(cause.work.text, width, "    ", "")
    for text in cause.evidence[:most]:
        texts += _wrapped(text, width, "    ", "")
    for number, text in enumerate(cause.advice[:most]):
        texts += _wrapped(text, width, "    try " if not number else "     or ", "cyan")
    return texts


def _wrapped(text: str, width: int, indent: str, style: str) -> list[Text]:
    """Text wrapped over several lines, never inside a command."""
    flat = " ".join(terminal.printable(text).split())
    whole = COMMAND.sub(lambda command: command[0].replace(" ", NO_BREAK), flat)
    wrapped = textwrap.wrap(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [Text(line.replace(NO_BREAK, " "), style) for line in wrapped]


def step_title(forecast: Forecast, name: str) -> str:
    """``lm on v5e-4: 4.59 ms a step, MFU 37.0 %`` of a step that fits."""
    assert forecast.step_seconds is not None
    title = f"{name} on {forecast.on.name}: {readings.least(forecast)}{duration(forecast.step_seconds)} a step"
    if forecast.mfu is not None and not forecast.is_lower_bound:
        title += f", MFU {forecast.mfu:.1%}"
    return title


def step_remarks(forecast: Forecast, flags: Sequence[str]) -> list[str]:
    """Remarks of a step's explanation beside its causes; ``flags`` are the compiler's."""
    words = described(flags)
    quick = GPU_QUICK if forecast.on.platform == "gpu" else QUICK
    return [*forecast.cautions, quick, *([f"compiled with {words}"] if words else [])]


def run_remarks(figures: Mapping[str, Any], unit: str) -> list[str]:
    """The figures in a line."""
    texts = {
        "update_ratio": "updates {:.1e} of the weights",
        "noise_scale": f"gradient noise scale {{:.3g}} {unit}",
        "batch": "batch {}",
        "epochs": "data read {:.3g} times",
        "training_loss": "training loss {:.4g}",
        "validation_loss": "validation {:.4g}",
    }
    known = [text.format(figures[k]) for k, text in texts.items() if figures[k] is not None]
    return [", ".join(known)] if known else []


def profile_remark(figures: Mapping[str, Any]) -> str:
    """The figures in a line."""
    parts = ", ".join(
        f"{name} {share:.0%}" for name, share in figures["shares"].items() if share >= LEAST_SHARE
    )
    steps = f"median of {figures['steps']}" if figures["steps"] > 1 else "the only one"
    if by := figures.get("simulated_by"):
        steps = f"simulated by {by}, no measurement"
    number = figures["devices"]
    on = f"{number} x {figures['device']}" if number > 1 else figures["device"]
    slow, fast = figures["slowest"], figures["fastest"]
    if slow["step_seconds"] > SPREAD * fast["step_seconds"]:
        steps += f"; {slow['device']} {duration(slow['step_seconds'])}, {fast['device']} {duration(fast['step_seconds'])}"
    if len(figures["hosts"]) > 1:
        steps += f"; hosts {', '.join(figures['hosts'])}"
    return f"a step on {on} takes {duration(figures['step_seconds'])} ({steps}): {parts}"


def overlap_remarks(figures: Mapping[str, Any]) -> list[str]:
    """Transfers beside the device's work, in a line; none without any."""
    parts = [
        f"{kind} {duration(times['hidden_seconds'])}, {duration(times['exposed_seconds'])} more exposed"
        for kind, times in figures["beside"].items()
        if times["hidden_seconds"] > LEAST_SHARE * figures["step_seconds"]
    ]
    return [f"under way while the device works: {'; '.join(parts)}"] if parts else []


def program_remarks(table: ProfileTable) -> list[str]:
    """A line for each program beside the step's, with the op that takes most of it."""
    first, *others = table.programs
    lines = []
    for program in others[:PROGRAMS]:
        if program.seconds < LEAST_PROGRAM * first.seconds:
            break
        row = next((row for row in table.ops if row.program == program.name), None)
        text = f"beside the step: {program.name}, {plural(round(program.runs), 'run')} of {duration(program.median)}"
        if row is not None:
            work = row.rate.text(row.flight) if row.rate is not None else ""
            text += f"; {row.op.raw.name} {duration(row.median)}" + (f", {work}" if work else "")
        lines.append(text)
    return lines


def plain(cause: Cause) -> dict[str, Any]:
    """A cause as JSON has it."""
    return asdict(cause)


def applied(
    of: RecipeStep | None, settings: Mapping[str, Any], candidate: Candidate, verb: str
) -> str | None:
    """The command with some settings, compiled with a candidate's flags; None where no command names the job.

    Args:
        of: The step whose settings they change.
        settings: By option: ``layout.fsdp``, ``batch``.
        candidate: Where, and with which flags.
        verb: ``forecast`` or ``train``.
    """
    if of is None or of.recipe.of_job:
        return None
    options = option_words(of.recipe.function, of.options, {**of.settings, **settings})
    if verb == "forecast":
        options += ["--on", candidate.on.name, "--quick"]  # as the figures above were made
    words = shlex.join(["systolic", verb, of.recipe.target, *options])
    flags = spoken(candidate.compiler_flags, candidate.on.chip)
    return f"{words} --flags={shlex.quote(flags)}" if flags else words


def calibration_name(forecast: Forecast) -> str | None:
    """Name of the calibration that corrects a forecast; None without one."""
    return None if forecast.calibration is None else forecast.calibration.name


def print_step(explanation: StepExplanation) -> None:
    """Causes of a step that fits."""
    title, remarks = (
        step_title(explanation.forecast, explanation.job.name),
        step_remarks(explanation.forecast, explanation.flags),
    )
    print_causes(title, explanation.causes, remarks=remarks)


def show_step(explanation: StepExplanation, *, as_json: bool) -> int:
    """Prints what to do about a step; returns the exit code, 1 where nothing fits."""
    if not explanation.forecast.fits:
        return show_attempts(explanation, as_json=as_json)
    remedies = show_remedies(explanation, "forecast", as_json=as_json)
    if as_json:
        print_json(
            {
                "target": explanation.target,
                "kind": ExplainedKind.forecast.value,
                "slice": explanation.on.name,
                "fits": True,
                "step": explanation.step.value,
                "quick": True,
                "layout": dict(explanation.forecast.layout),
                "step_seconds": explanation.forecast.step_seconds,
                "mfu": explanation.forecast.mfu,
                "lower_bound": explanation.forecast.is_lower_bound,
                "bound": explanation.forecast.bound.value,
                "given": list(explanation.forecast.given),
                "calibration": calibration_name(explanation.forecast),
                "flags": list(explanation.flags),
                "causes": [plain(cause) for cause in explanation.causes],
                **remedies,
            }
        )
    return 0


def show_remedies(explanation: StepExplanation, verb: str, *, as_json: bool) -> dict[str, Any]:
    """Prints the commands of the best changes; returns what JSON has of all."""
    stream: TextIO = sys.stderr if as_json else sys.stdout
    best, other, job = explanation.best, explanation.best_changed, explanation.job
    before = duration(explanation.forecast.step_seconds or 0.0)

    def command(remedy: Remedy | None) -> str | None:
        if remedy is None:
            return None
        return applied(explanation.of, remedy.candidate.settings(job), remedy.candidate, verb)

    lines: list[str | None] = []
    if best is not None:
        text = f"the best that keeps training the same: {best.text}, {best.verdict}, now {before}"
        lines += ["", text, command(best)]
        if explanation.remaining:
            left = (
                f"{cause.title} {cause.share or 0.0:.0%}" for cause in explanation.remaining[:LEFT]
            )
            lines.append(f"  where its time goes: {'; '.join(left)}")
    elif explanation.remedies:
        lines += ["", "none of the changes that keep training the same is faster"]
    if other is not None:
        text = f"faster, and changes training: {other.text}, {other.verdict}, now {before}"
        lines += ["", text, command(other)]
    if lines:
        print(
            "\n".join(
                f"  {line}" if line and line.startswith("systolic ") else line
                for line in lines
                if line is not None
            ),
            file=stream,
        )
    settings = [remedy.candidate.settings(job) for remedy in explanation.remedies]
    return {
        "remedies": [
            remedy.to_json(how) for remedy, how in zip(explanation.remedies, settings, strict=True)
        ],
        "command": command(best),
        "changes_training_command": command(other),
        "remaining": [plain(cause) for cause in explanation.remaining],
    }


def show_attempts(explanation: StepExplanation, *, as_json: bool) -> int:
    """Prints the command of a layout that fits, or that none does; returns the exit code."""
    last, fit = (explanation.attempts[-1] if explanation.attempts else None), explanation.fit
    typed, short = None, explanation.forecast.rejected
    if last is not None and fit is not None:
        settings = fit.candidate.settings(explanation.job)
        if not last.same_result:
            settings["optimizer.kind"] = last.facts.job.optimizer.kind.value
        typed = applied(explanation.of, settings, fit.candidate, "forecast")
    if as_json:
        print_json(
            {
                "target": explanation.target,
                "kind": ExplainedKind.forecast.value,
                "slice": explanation.on.name,
                "fits": False,
                "rejected": short and short.to_json(),
                "attempts": [attempt.to_json() for attempt in explanation.attempts],
                "command": typed,
            }
        )
    elif last is not None and fit is not None and fit.forecast is not None:
        peak = fit.forecast.memory.peak_bytes if fit.forecast.memory else 0
        print(
            f"\nthe fastest that fits: {fit.candidate.name}, {gibibytes(peak)} of "
            f"{gibibytes(fit.forecast.capacity_bytes)}, {step(fit.forecast.step_seconds or 0.0)} a step"
        )
        if not last.same_result:
            print("it changes the optimizer, and with it the result of training")
        if typed is not None:
            print(f"  {typed}")
    else:
        print(nothing_fits(explanation))
    return 0 if fit is not None else 1


def nothing_fits(explanation: StepExplanation) -> str:
    """The advice where no layout fits."""
    if explanation.attempts:
        return f"\nnothing that was tried fits; try a smaller model or batch, or another chip: systolic plan {explanation.target} --on any"
    if explanation.step is StepKind.train:
        return "\n--remedies 0 tries no layouts; leave it out to find one that fits"
    return f"\nlayouts are tried for train steps only, and this is a step of --step {explanation.step.value}; try a smaller batch, other --layout options or a larger slice"


def show_comparison(comparison: StepComparison, *, as_json: bool) -> int:
    """Prints what makes the first slower or faster; returns the exit code, 1 where one does not fit."""
    first, second = comparison.target, comparison.against_target
    mine, other = comparison.forecast.step_seconds, comparison.against.step_seconds
    if as_json:
        print_json(
            {
                "target": first,
                "against": second,
                "kind": ExplainedKind.forecast.value,
                "step_seconds": mine,
                "against_step_seconds": other,
                "causes": [asdict(row) for row in comparison.causes],
            }
        )
        return 0
    if mine is None or other is None:
        for path, forecast in ((first, comparison.forecast), (second, comparison.against)):
            print(f"{path}: {'fits' if forecast.fits else 'does not fit'} on {forecast.on.name}")
        return 1
    if comparison.alike:
        print(f"{first} and {second} take the same time: {duration(mine)} a step")
    else:
        word = "slower" if mine > other else "faster"
        ratio = max(mine, other) / min(mine, other)
        print(
            f"{first} is {ratio:.2f} times {word}: {duration(mine)} a step, {second} {duration(other)}"
        )
    both = {each.on.platform for each in (comparison.forecast, comparison.against)}
    print(f"both forecast {GPU_QUICK if both == {'gpu'} else QUICK}")
    rows = comparison.worth_showing
    if not rows:
        print("and no cause takes more in one of them")
        return 0
    print(f"\n{'':>10}  {'first':>8}  {'second':>8}  cause (they may overlap)")
    for row in rows:
        change = row.seconds - row.against_seconds
        sign = "+" if change >= 0 else "-"
        print(
            f"{sign + duration(abs(change)):>10}  {duration(row.seconds):>8}  {duration(row.against_seconds):>8}  {row.title}"
        )
    return 0
