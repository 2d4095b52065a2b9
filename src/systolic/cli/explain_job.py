"""``systolic explain RECIPE --on SLICE``: why a step takes its time or does not fit, and what changes that."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from systolic import recipes
from systolic.aot import Compiled, Compiler, JobProgram, StepKind
from systolic.aot import compile as compile_program
from systolic.chips import Slice, slice
from systolic.chips.flags import described, resolved, spoken
from systolic.cli.output import bounded_workers, print_json
from systolic.cli.target import request, require_slice
from systolic.core.errors import OptionError
from systolic.core.ranges import NOT_NEGATIVE
from systolic.core.units import duration, gibibytes
from systolic.explaining.cause import Cause
from systolic.explaining.settings import Settings
from systolic.forecasting import Forecast
from systolic.job import Job
from systolic.session.command_line import command

if TYPE_CHECKING:
    from systolic.planning.candidate import Candidate
    from systolic.planning.ladder import Attempt

QUICK = "from the compiler's schedule, the time of ops estimated: systolic forecast without --quick has their cycles"
OWN = ("on", "step", "flags", "remedies", "workers", "json", "against")
"""The verb's options, which no recipe takes."""


def options(
    on: str,
    step: StepKind = StepKind.train,
    flags: str = "",
    remedies: Annotated[int, NOT_NEGATIVE] = 10,
    workers: Annotated[int, NOT_NEGATIVE] = 0,
    json: bool = False,
) -> None:
    """Why a step is slow or does not fit, and what changes that.

    Args:
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256.
        step: Which of the job's steps: train, eval, prefill or decode; changes of settings are tried for train steps only.
        flags: Of the compiler, on top of the set that all jobs on the chip share (systolic chips v5e lists it); none leaves that set out.
        remedies: Changes of settings to compile and forecast again where the step fits; 0 names causes only.
        workers: Compiles at once; 0 takes what cores and memory allow.
        json: Print one JSON object on stdout.
    """


def explain_recipe(target: str, args: Sequence[str]) -> int:
    """Causes of a recipe's step time with remedies, or the way out of memory."""
    require_slice("explain", target, args, "a slice; add --on v5e-16, systolic chips lists them")
    asked = request(target, args, "explain", options)
    on = slice(asked.verb["on"])
    if on.platform != "tpu":
        raise OptionError(
            f"{on.name} is a {on.platform}: a schedule to explain comes from the TPU compiler; systolic forecast shows the roofline of others"
        )
    known = Settings(recipes.plain(asked.options))
    verb = dict(asked.verb)
    if verb["step"] is not StepKind.train:
        verb["remedies"] = 0
    return Explanation(asked.job, on, target, list(args), verb).run(known)


class Explanation:
    """One call of the verb."""

    def __init__(
        self,
        job: Job,
        on: Slice,
        target: str,
        args: list[str],
        verb: Mapping[str, Any],
        shows: str = "forecast",
    ) -> None:
        self.job, self.on, self.target, self.args, self.verb = job, on, target, args, verb
        self.shows = shows
        """The verb of the command that is shown."""
        self.json = bool(verb["json"])
        self.compiler = Compiler(flags=self.flags(on))

    def run(self, known: Settings) -> int:
        """Forecasts the step, then explains it with advice in options that are ``known``; returns the exit code."""
        from systolic.explaining.causes import causes_of_forecast
        from systolic.forecasting.run import of_outcome
        from systolic.hlo import parse
        from systolic.report.progress import ProgressLine

        name, began, step = self.job.name, time.monotonic(), self.verb["step"]
        with ProgressLine(sys.stderr, f"{name} for {self.on.name}") as progress:
            outcome = compile_program(
                JobProgram(job=self.job, verb=step), self.on, self.compiler.quick(), progress.say
            )
        made = of_outcome(outcome, name, self.on, time.monotonic() - began)
        if not made.fits and (step is not StepKind.train or self.verb["remedies"] < 1):
            if not self.json:
                from systolic.report.forecast.text import print_forecast

                print_forecast(made)
            return self.show_attempts(made, [], sys.stderr)
        if not made.fits:
            return self.out_of_memory(made)
        assert isinstance(outcome, Compiled)
        causes = causes_of_forecast(made, parse(outcome.hlo), self.job.model)
        return self.slow(made, known.named(causes))

    def flags(self, on: Slice) -> tuple[str, ...]:
        """The compiler's flags on a slice: those that jobs share there, and the user's."""
        return resolved(self.verb["flags"], on.chip)

    @cached_property
    def workers(self) -> int:
        """Compiles at once."""
        from systolic.planning.search import Limits

        return Limits(workers=bounded_workers(self.verb["workers"])).at_once

    def applied(self, settings: Mapping[str, Any], candidate: "Candidate", verb: str) -> str:
        """The command with some settings, compiled with a candidate's flags."""
        drop = [name for name in OWN if name != "on" or verb == "train"]
        plain = recipes.find(self.target).layout
        words = command(verb, self.target, self.args, settings, drop, plain)
        if verb == "forecast":
            words += " --quick"  # what the figures above were made with
        flags = spoken(candidate.compiler_flags, candidate.on.chip)
        return f"{words} --flags={shlex.quote(flags)}" if flags else words

    # Slow

    def slow(self, made: Forecast, causes: Sequence[Cause]) -> int:
        """Causes, then each change with what it gains."""
        assert made.step_seconds is not None
        title = f"{self.job.name} on {self.on.name}: {duration(made.step_seconds)} a step"
        if made.mfu is not None:
            title += f", MFU {made.mfu:.1%}"
        if not self.json:
            from systolic.report.explain.text import print_causes

            words = described(self.compiler.flags)
            remarks = [f"compiled with {words}"] if words else []
            print_causes(title, causes, remarks=[QUICK, *remarks])
        found = self.remedies(made)
        if self.json:
            print_json(
                {
                    "target": self.target,
                    "kind": "forecast",
                    "slice": self.on.name,
                    "fits": True,
                    "step": self.verb["step"].value,
                    "quick": True,
                    "layout": dict(made.layout),
                    "step_seconds": made.step_seconds,
                    "mfu": made.mfu,
                    "flags": list(self.compiler.flags),
                    "causes": [asdict(cause) for cause in causes],
                }
                | found
            )
        return 0

    def remedies(self, made: Forecast) -> dict[str, Any]:
        """Changes with what each gains, told as they come, and the command of the best that trains the same."""
        from systolic.planning.evaluator import CompilingEvaluator
        from systolic.planning.facts import facts_of
        from systolic.planning.remedies import base_of, changes, try_all
        from systolic.report.progress import ProgressLine

        if self.verb["remedies"] < 1:
            return {"remedies": [], "command": None}
        facts = facts_of(self.job)
        base = base_of(facts, self.on, self.flags(self.on))
        wanted = changes(facts, base)[: self.verb["remedies"]]
        stream = sys.stderr if self.json else sys.stdout
        with ProgressLine(sys.stderr, "changes") as progress:

            def told(one: Any, done: int, of: int) -> None:
                mark = "" if one.same_result else "  [trains otherwise]"
                text = f"  {one.verdict:<42}  {one.text}{mark}"
                progress.told(text, stream, f"{done} of {of} compiled")

            count = f"{len(wanted)} changes" if len(wanted) != 1 else "1 change"
            title = f"\n{count}, each compiled and forecast again, and what helps together:"
            progress.told(title, stream, f"0 of {len(wanted)} compiled")
            with CompilingEvaluator(self.workers, self.compiler) as evaluator:
                found = try_all(facts, made, base, wanted, evaluator, told)
        better = [one for one in found if (one.gain or 0) > 0.005 and one.same_result]
        typed = None
        if better:
            chosen = better[0].candidate
            typed = self.applied(chosen.settings(self.job), chosen, self.shows)
            text = f"the best that trains the same: {better[0].text}, {better[0].verdict}"
            print(f"\n{text}\n  {typed}", file=stream)
        elif found:
            print("\nno change that trains the same is faster", file=stream)
        settings = [one.candidate.settings(self.job) for one in found]
        return {
            "remedies": [one.to_json(how) for one, how in zip(found, settings, strict=True)],
            "command": typed,
        }

    # Out of memory

    def out_of_memory(self, made: Forecast) -> int:
        """What holds the memory, then other layouts and slices until one fits; exit code 1 when none does."""
        from systolic.planning.facts import facts_of
        from systolic.planning.ladder import difference, find_fit
        from systolic.planning.plan import reason_of
        from systolic.report.forecast.text import print_forecast
        from systolic.report.plan.progress import stage
        from systolic.report.plan.readings import step
        from systolic.report.progress import ProgressLine

        if not self.json:
            print_forecast(made)
            print("\nlayouts that may fit, each compiled:", flush=True)
        stream = sys.stderr if self.json else sys.stdout
        before = self.job.layout.on(self.on.num_devices, self.on.num_slices)
        with ProgressLine(sys.stderr, "layouts") as progress:

            def watch(now: Any) -> None:
                one, done = now.latest, f"{now.compiled} compiled"
                if one is None:
                    if not now.compiled:
                        progress.say(stage(now))
                    return
                text = difference(before, one.candidate)
                where = "" if one.candidate.on == self.on else f"{one.candidate.on.name} "
                said = reason_of(one)
                if one.forecast is not None and one.total is not None:
                    peak = one.forecast.memory.peak_bytes if one.forecast.memory else 0
                    speed = step(one.forecast.step_seconds or 0.0)
                    said = f"fits, {gibibytes(peak)}, {speed} a step"
                progress.told(f"  {where}{text}: {said}", stream, done)

            attempts = find_fit(facts_of(self.job), self.on, self.flags, self.workers, watch)
        return self.show_attempts(made, attempts, stream)

    def show_attempts(self, made: Forecast, attempts: "Sequence[Attempt]", stream: TextIO) -> int:
        """The command of what fits at last, or that nothing does."""
        last = attempts[-1] if attempts else None
        found = None if last is None else last.best
        typed = None
        if last is not None and found is not None:
            settings = found.candidate.settings(self.job)
            if not last.same_result:
                settings["optimizer.kind"] = last.facts.job.optimizer.kind.value
            if found.candidate.on != self.on:
                settings["on"] = found.candidate.on.name
            typed = self.applied(settings, found.candidate, "forecast")
        if self.json:
            print_json(
                {
                    "target": self.target,
                    "kind": "forecast",
                    "slice": self.on.name,
                    "fits": False,
                    "rejected": made.rejected,
                    "attempts": [attempt.to_json() for attempt in attempts],
                    "command": typed,
                }
            )
        elif found is not None and found.forecast is not None:
            from systolic.report.plan.readings import step

            peak = found.forecast.memory.peak_bytes if found.forecast.memory else 0
            print(
                f"\nthe fastest that fits: {found.candidate.name}, {gibibytes(peak)} of "
                f"{gibibytes(found.forecast.capacity_bytes)}, {step(found.forecast.step_seconds or 0.0)} a step"
            )
            if last is not None and not last.same_result:
                print("it changes the optimizer, and with it the result of training")
            print(f"  {typed}")
        else:
            print(
                f"\nnothing that was tried fits; a smaller model or batch, or another chip: systolic plan {self.target} --on any",
                file=stream,
            )
        return 0 if found is not None else 1


def is_recipe(target: str) -> bool:
    """Whether a target names a recipe, or a function in a file."""
    if ".py:" in target or target.endswith(".py"):
        return True
    return target in recipes.shipped() and not os.path.exists(os.path.join(target, "job.json"))
