"""``systolic forecast RECIPE --on SLICE [options]``: memory, time and cost of a step on a slice that you need not have."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.aot import StepKind
from systolic.cli.forecast_serving import SERVE, ServingOptions, forecast_server
from systolic.cli.output import print_json
from systolic.cli.parse import Repeated, Required, parse, print_verb_help
from systolic.cli.target import Request, first, request
from systolic.core.files import check_writable
from systolic.session.command_line import option_words

if TYPE_CHECKING:
    from systolic.chips import Slice
    from systolic.forecasting import Forecast
    from systolic.job import Job

FORMS = """usage: systolic forecast RECIPE --on SLICE [options]
       systolic forecast MODEL --on SLICE [options]
       systolic forecast --serve MODEL --on SLICE [options]
       systolic forecast dump.txt --on SLICE [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function. Its step is compiled for
the slice by the slice's own compiler and the schedule is simulated; no such hardware is needed.
On cpu the program is compiled too and its time is a roofline at measured rates. A GPU that this
machine doesn't have (h100, 8xh100, 2xh200 …) gets a roofline of the partitioned program, marked as
assumed. MODEL is a published model that systolic recipes lists (llama-3.1-70b), a config.json, a Hugging Face folder
or a Bundle; weights are not needed. It takes the options of the recipe lm, with the model's sizes as defaults.
dump.txt is scheduled HLO that another program wrote: compiled.as_text(), or XLA's dump
after optimizations; it takes --on, --html, --perfetto, --xprof, --against, --trips, --cost and --json.
--serve forecasts a server of the model with continuous batching: tokens per second, time to the first
and to each further token, the requests that fit and dollars per million tokens, at several concurrencies.
SLICE is one of systolic chips: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu.

Exits with 1 when the step does not fit. systolic forecast RECIPE --help shows the recipe's options."""
SLICE = Required("a slice; add --on v5e-16, systolic chips lists them")


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """Options of the forecast of a recipe.

    Args:
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu.
        step: Which of the job's steps: train, eval, prefill or decode.
        flags: Compiler flags on top of the set that all jobs on the chip share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        quick: Stop at the compiler's schedule, after seconds: memory is exact, the time of ops estimated.
        save: Keep the compiled executable in this file.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: Print what changed since the forecast in this JSON file.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100 or train.py:42=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms or EighTpu=350us; may be repeated.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    step: StepKind = StepKind.train
    flags: str = ""
    quick: bool = False
    save: Path | None = None
    html: Path | None = None
    perfetto: Path | None = None
    xprof: Path | None = None
    against: Path | None = None
    trips: Repeated = ()
    cost: Repeated = ()
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class DumpOptions:
    """Forecasts scheduled HLO that another program dumped.

    Args:
        on: The slice that it was compiled for.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: Print what changed since the forecast in this JSON file.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100 or train.py:42=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms or EighTpu=350us; may be repeated.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    html: Path | None = None
    perfetto: Path | None = None
    xprof: Path | None = None
    against: Path | None = None
    trips: Repeated = ()
    cost: Repeated = ()
    json: bool = False


OPTIONS = (ForecastOptions, ServingOptions)
"""Classes of which ``systolic forecast --help`` lists the options."""


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, *OPTIONS)
    if SERVE in args:
        return forecast_server([word for word in args if word != SERVE])
    target, rest = first(args, "forecast", "a recipe or a model")
    if is_text(target):
        dump = parse(DumpOptions, rest, f"systolic forecast {target}")
        return forecast_dump(Path(target), ForecastOptions(**vars(dump)))
    return forecast_recipe(request(target, rest, "forecast", ForecastOptions))


def forecast_dump(path: Path, options: ForecastOptions) -> int:
    """Forecasts scheduled HLO text; returns the exit code."""
    from systolic.chips import slice
    from systolic.forecasting import forecast_text
    from systolic.sim.incomplete import given

    before = _before(options)
    made = forecast_text(path, slice(options.on), given(options.trips, options.cost))
    return show(made, options, before)


def forecast_recipe(asked: Request[ForecastOptions]) -> int:
    """Forecasts a step of a recipe's job; returns the exit code."""
    from systolic import recipes
    from systolic.chips import slice

    options, target = asked.verb, asked.recipe.target
    on, before = slice(options.on), _before(options)
    made = compiled(asked.job, on, options)
    remade = arguments_of(asked)
    if made.rejected is not None and options.step is StepKind.train and on.platform == "tpu":
        way_out = shlex.join(["systolic", "explain", target, *remade])
        made = replace(made, rejected={**made.rejected, "remedies": [way_out]})
    asked_for = {
        "target": target,
        "arguments": remade,
        "options": recipes.plain(asked.options),
        "step": options.step.value,
        "quick": options.quick,
    }
    return show(made, options, before, asked_for)


def arguments_of(asked: Request[ForecastOptions]) -> list[str]:
    """The words that say what was forecast, without those that say where results go."""
    options = replace(
        asked.verb,
        **dict.fromkeys(("save", "html", "perfetto", "xprof", "against")),
        **dict.fromkeys(("trips", "cost"), ()),
        json=False,
        quick=False,
    )
    words = option_words(asked.recipe.function, asked.options)
    open_parts = [
        *(word for text in asked.verb.trips for word in ("--trips", text)),
        *(word for text in asked.verb.cost for word in ("--cost", text)),
    ]
    return [*words, *option_words(ForecastOptions, vars(options)), *open_parts]


def is_text(target: str) -> bool:
    """Whether a target is a file of HLO rather than a recipe."""
    return ".py:" not in target and not target.endswith((".py", ".json")) and Path(target).is_file()


def compiled(job: "Job", on: "Slice", options: ForecastOptions) -> "Forecast":
    """The forecast of a job's step, with progress on stderr."""
    from systolic.report.progress import ProgressLine
    from systolic.session.forecast import forecast_step

    with ProgressLine(sys.stderr, f"{job.name} for {on.name}") as progress:
        return forecast_step(
            job,
            on=on,
            step=options.step,
            flags=options.flags,
            quick=options.quick,
            save=options.save,
            watch=progress.say,
            trips=options.trips,
            costs=options.cost,
        )


def show(
    made: "Forecast",
    options: ForecastOptions,
    before: Mapping[str, Any] | None,
    asked: Mapping[str, Any] | None = None,
) -> int:
    """Prints and writes what was asked for; returns the exit code."""
    from systolic.report.forecast import comparison

    written = write(made, options)
    now = made.to_json() if options.json or before else {}
    changes = [] if before is None else comparison.compare(before, now)
    if options.json:
        if before is not None:
            now["against"] = [change.to_json() for change in changes]
        print_json({**now, **(asked or {}), "written": written})
        return 0 if made.fits else 1
    from systolic.report.forecast.text import print_forecast

    print_forecast(made)
    if before is not None:
        named = [f"{one['recipe']} on {one['slice']}" for one in (before, now)]
        print("\n" + "\n".join(comparison.lines(changes, *named)))
        if text := comparison.depths(before, asked or {}):
            print(text)
    for what, path in written.items():
        print(f"{what:<9}{path}")
    for text in (made.rejected or {}).get("remedies", ()):
        print(f"{'next':<9}{text}")
    return 0 if made.fits else 1


def write(made: "Forecast", options: ForecastOptions) -> dict[str, str]:
    """Writes the files that were asked for; returns kind to path."""
    written: dict[str, str] = {}
    if options.save is not None and made.fits:
        written["saved"] = str(options.save)
    if options.html is not None:
        from systolic.report.forecast.page import write_page

        write_page(made, options.html)
        written["report"] = str(options.html)
    if made.timeline is None:
        return written
    if options.perfetto is not None:
        from systolic.report.forecast.trace import write_trace

        write_trace(made, options.perfetto)
        written["perfetto"] = str(options.perfetto)
    if options.xprof is not None:
        from systolic.report.forecast.xprof import write_xprof

        write_xprof(made, options.xprof)
        written["xprof"] = str(options.xprof)
    return written


def _before(options: ForecastOptions) -> dict[str, Any] | None:
    """The forecast of ``--against``. Checks first that the files to write can be written."""
    for path in (options.html, options.perfetto, options.save):
        if path is not None:
            check_writable(path)
    if options.against is None:
        return None
    from systolic.report.forecast import comparison

    return comparison.read(options.against)
