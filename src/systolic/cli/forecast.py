"""``systolic forecast RECIPE --on SLICE [options]``: memory, time and cost of a step on a slice that you need not have."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from systolic.cli.forecast_capture import END, CaptureOptions, forecast_program
from systolic.cli.forecast_serving import SERVE, ServingOptions, forecast_server
from systolic.cli.parse import Repeated, parse, print_verb_help
from systolic.cli.target import Request, first, request
from systolic.compiling import StepKind
from systolic.core.arguments import Required
from systolic.core.errors import OptionError
from systolic.core.files import check_writable, write_atomically
from systolic.core.option_words import option_words
from systolic.report.output import print_json

if TYPE_CHECKING:
    from systolic.chips import Slice
    from systolic.forecasting import Forecast
    from systolic.forecasting.display.op_table import Against
    from systolic.forecasting.op_changes import OpChange
    from systolic.forecasting.table import ForecastRow
    from systolic.job import Job

FORMS = """usage: systolic forecast RECIPE --on SLICE [options]
       systolic forecast MODEL --on SLICE [options]
       systolic forecast --serve MODEL --on SLICE [options]
       systolic forecast dump.txt --on SLICE [options]
       systolic forecast --on SLICE [options] -- python train.py [its options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function. Its step is compiled for
the slice by the slice's own compiler and the schedule is simulated; no such hardware is needed.
On cpu the program is compiled too and its time is a roofline at measured rates. A GPU that this
machine doesn't have (h100, 8xh100, 2xh200 …) gets a roofline of the partitioned program, marked as
assumed. MODEL is a published model that systolic recipes lists (llama-3.1-70b), a config.json, a Hugging Face folder
or a Bundle; weights are not needed. It takes the options of the recipe lm, with the model's sizes as defaults.
dump.txt is scheduled HLO that another program wrote: compiled.as_text(), or XLA's dump
after optimizations; it takes --on, --html, --perfetto, --xprof, --against, --trips, --cost, --calibration and --json.
--against old.txt, another dump of the program (before an upgrade of JAX or libtpu, or a flag), lists the ops that changed.
-- runs a JAX program of your own, unchanged and in its own environment, on a slice that is not there, until its step
is known: that step is compiled by that environment's libtpu and simulated, and the program ends before it trains.
--serve forecasts a server of the model with continuous batching: tokens per second, time to the first
and to each further token, the requests that fit and dollars per million tokens, at several concurrencies.
SLICE is one of systolic chips: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu. Several with commas, and
--vary layout.fsdp=4,8,16, make a table with a row for each combination.

Exits with 1 when the step does not fit, of a table when no row does.
systolic forecast RECIPE --help shows the recipe's options."""
SLICE = Required("a slice; add --on v5e-16, systolic chips lists them")


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """Options of the forecast of a recipe.

    Args:
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu. Several with commas make a table.
        vary: An option of the recipe with several values, for a table: --vary layout.fsdp=4,8,16. Repeat it for all combinations.
        step: Which of the job's steps: train, eval, prefill or decode.
        flags: Compiler flags on top of the set that all jobs on the chip share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        quick: Stop at the compiler's schedule, after seconds: memory is exact, the time of ops estimated.
        save: Keep the compiled executable in this file.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: Print what changed since the forecast in this JSON file.
        csv: Write the table to this file as CSV.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100 or train.py:42=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms or EighTpu=350us; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    step: StepKind = StepKind.train
    flags: str = ""
    quick: bool = False
    save: Path | None = None
    html: Path | None = None
    perfetto: Path | None = None
    xprof: Path | None = None
    against: Path | None = None
    csv: Path | None = None
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class DumpOptions:
    """Forecasts scheduled HLO that another program dumped.

    Args:
        on: The slice that it was compiled for. Several with commas make a table.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: Print what changed since the forecast in this JSON file, or since another dump of the program and which ops changed.
        csv: Write the table to this file as CSV.
        trips: Trips of a loop that the program leaves open, NAME=NUMBER, such as while.5=100 or train.py:42=100; may be repeated.
        cost: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms or EighTpu=350us; may be repeated.
        calibration: Corrects the simulator by profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        json: Print one JSON object on stdout.
    """

    on: Annotated[str, SLICE]
    html: Path | None = None
    perfetto: Path | None = None
    xprof: Path | None = None
    against: Path | None = None
    csv: Path | None = None
    trips: Repeated = ()
    cost: Repeated = ()
    calibration: str = ""
    json: bool = False


OPTIONS = (ForecastOptions, CaptureOptions, ServingOptions)
"""Classes of which ``systolic forecast --help`` lists the options."""


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, *OPTIONS)
    if END in args:
        return forecast_program(args)
    if SERVE in args:
        return forecast_server([word for word in args if word != SERVE])
    target, rest = first(args, "forecast", "a recipe or a model")
    if is_text(target):
        dump = parse(DumpOptions, rest, f"systolic forecast {target}")
        options = ForecastOptions(**vars(dump))
        return (
            forecast_dumps(Path(target), options)
            if _is_table(options)
            else forecast_dump(Path(target), options)
        )
    asked = request(target, rest, "forecast", ForecastOptions)
    return forecast_table(asked, rest) if _is_table(asked.verb) else forecast_recipe(asked)


def forecast_dump(path: Path, options: ForecastOptions) -> int:
    """Forecasts scheduled HLO text; returns the exit code."""
    from systolic.chips import slice
    from systolic.forecasting import compare_texts, forecast_text
    from systolic.forecasting.calibrations import given_with

    on = slice(options.on)
    supplied = given_with(options.trips, options.cost, options.calibration, on)
    if options.against is not None and _is_dump(options.against):
        _check_files(options)
        made, before, changed = compare_texts(path, options.against, on, supplied)
        # The same program twice: the rows of ops say more of it than a recipe's name.
        return show(made, options, before.to_json(), changed=changed)
    before = before_of(options)
    return show(forecast_text(path, on, supplied), options, before)


def forecast_recipe(asked: Request[ForecastOptions]) -> int:
    """Forecasts a step of a recipe's job; returns the exit code."""
    from systolic.chips import slice

    options = asked.verb
    on, before = slice(options.on), before_of(options)
    made = _with_remedy(compiled(asked.job, on, options), asked)
    return show(made, options, before, _asked_for(asked))


def forecast_table(asked: Request[ForecastOptions], args: Sequence[str]) -> int:
    """Forecasts a recipe's step for each slice and setting; returns the exit code.

    Args:
        asked: The request without the options that vary.
        args: The words after the target, which each combination is read from again.
    """
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.command import combinations, row_of, slices_of, values_of

    options, target = asked.verb, asked.recipe.target
    _check_table(options)
    varied = values_of(options.vary)
    for name in varied:
        if asked.gives(name):
            raise OptionError(f"--{name} and --vary {name}=… are both given; leave one of them out")
    places = slices_of(options.on)
    calibration_for(options.calibration, places)
    # All lines are read before the first compile: a wrong value costs no time.
    requests = [
        (place, settings, _narrowed(target, args, place, settings))
        for place in places
        for settings in combinations(varied)
    ]

    def row(
        number: int, on: "Slice", settings: Mapping[str, str], one: Request[ForecastOptions]
    ) -> "ForecastRow":
        words = (f"{name} {value}" for name, value in settings.items())
        title = " ".join([f"[{number}/{len(requests)}] {one.job.name} for {on.name}", *words])
        made = row_of(
            on, settings, lambda: _with_remedy(compiled(one.job, on, options, title), one)
        )
        return replace(made, request=_asked_for(one))

    rows = [row(number, *case) for number, case in enumerate(requests, 1)]
    return show_table(asked.job.name, rows, options)


def forecast_dumps(path: Path, options: ForecastOptions) -> int:
    """Forecasts scheduled HLO text on several slices; returns the exit code."""
    from systolic.forecasting import forecast_text
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.command import row_of, slices_of
    from systolic.sim.incomplete import given

    _check_table(options)
    places = slices_of(options.on)
    found = calibration_for(options.calibration, places)
    supplied = replace(given(options.trips, options.cost), calibration=found)

    def row(on: "Slice") -> "ForecastRow":
        return row_of(on, {}, lambda: forecast_text(path, on, supplied))

    return show_table(path.name, list(map(row, places)), options)


def show_table(name: str, rows: "Sequence[ForecastRow]", options: ForecastOptions) -> int:
    """Prints and writes a table; returns the exit code, 1 where no row fits."""
    from systolic.forecasting.table import ForecastTable

    table = ForecastTable(name=name, rows=rows)
    written = {} if options.csv is None else {"csv": str(options.csv)}
    if options.csv is not None:
        write_atomically(options.csv, table.to_csv())
    if options.json:
        print_json({**table.to_json(), "written": written})
    else:
        from systolic.forecasting.display.table import print_table

        print_table(table)
        for what, where in written.items():
            print(f"{what:<9}{where}")
    return 0 if any(row.fits for row in rows) else 1


def _narrowed(
    target: str, args: Sequence[str], on: "Slice", settings: Mapping[str, str]
) -> Request[ForecastOptions]:
    """The request of one row: its own slice, and its settings as options."""
    words = [f"--{name}={value}" for name, value in settings.items()]
    one = request(target, [*args, *words], "forecast", ForecastOptions)
    return replace(one, verb=replace(one.verb, on=on.name, vary=(), csv=None))


def _is_table(options: ForecastOptions) -> bool:
    return "," in options.on or bool(options.vary) or options.csv is not None


def _check_table(options: ForecastOptions) -> None:
    """Refuses, before anything is compiled, files that a table does not write."""
    for name in ("save", "html", "perfetto", "xprof", "against"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"--{name} is of one forecast, and --on and --vary ask for a table; leave it out, or name one slice"
            )
    if options.csv is not None:
        check_writable(options.csv)


def _with_remedy(made: "Forecast", asked: Request[ForecastOptions]) -> "Forecast":
    """The forecast with the command that finds a layout that fits, where the step does not."""
    on, options = made.on, asked.verb
    if made.rejected is None or options.step is not StepKind.train or on.platform != "tpu":
        return made
    way_out = shlex.join(["systolic", "explain", asked.recipe.target, *arguments_of(asked)])
    return replace(made, rejected={**made.rejected, "remedies": [way_out]})


def _asked_for(asked: Request[ForecastOptions]) -> dict[str, Any]:
    """What the JSON has of the command."""
    from systolic import recipes

    return {
        "target": asked.recipe.target,
        "arguments": arguments_of(asked),
        "options": recipes.plain(asked.options),
        "step": asked.verb.step.value,
        "quick": asked.verb.quick,
    }


def arguments_of(asked: Request[ForecastOptions]) -> list[str]:
    """The words that say what was forecast, without those that say where results go."""
    options = replace(
        asked.verb,
        **dict.fromkeys(("save", "html", "perfetto", "xprof", "against", "csv")),
        **dict.fromkeys(("trips", "cost"), ()),
        json=False,
        quick=False,
        calibration="",
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


def compiled(job: "Job", on: "Slice", options: ForecastOptions, title: str = "") -> "Forecast":
    """The forecast of a job's step, with progress on stderr."""
    from systolic.forecasting.command import forecast_step
    from systolic.report.progress import ProgressLine

    with ProgressLine(sys.stderr, title or f"{job.name} for {on.name}") as progress:
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
            calibration=options.calibration,
        )


def show(
    made: "Forecast",
    options: ForecastOptions,
    before: Mapping[str, Any] | None,
    asked: Mapping[str, Any] | None = None,
    changed: "Sequence[OpChange]" = (),
) -> int:
    """Prints and writes what was asked for; returns the exit code. ``changed`` has the ops of two dumps."""
    from systolic.forecasting.display import comparison, op_table

    now = made.to_json() if options.json or before else {}
    changes = [] if before is None else comparison.compare(before, now)
    step = made.step_seconds or 0.0
    against = None
    if before is not None:
        named = f"{before['recipe']} on {before['slice']}"
        against = op_table.for_page(named, changes, changed, step)
    written = write(made, options, against)
    if options.json:
        if before is not None:
            now["against"] = [change.to_json() for change in changes]
        if changed:
            now["against_ops"] = op_table.to_json(changed, step)
        print_json({**now, **(asked or {}), "written": written})
        return 0 if made.fits else 1
    from systolic.forecasting.display.text import print_forecast

    print_forecast(made)
    if before is not None:
        named = [f"{one['recipe']} on {one['slice']}" for one in (before, now)]
        print("\n" + "\n".join(comparison.lines(changes, *named)))
        if changed:
            print("\n".join(op_table.lines(changed, step)))
        if text := comparison.depths(before, asked or {}):
            print(text)
    for what, path in written.items():
        print(f"{what:<9}{path}")
    for text in (made.rejected or {}).get("remedies", ()):
        print(f"{'next':<9}{text}")
    return 0 if made.fits else 1


def write(
    made: "Forecast", options: ForecastOptions, against: "Against | None" = None
) -> dict[str, str]:
    """Writes the files that were asked for; returns kind to path."""
    written: dict[str, str] = {}
    if options.save is not None and made.fits:
        written["saved"] = str(options.save)
    if options.html is not None:
        from systolic.forecasting.display.page import write_page

        write_page(made, options.html, against)
        written["report"] = str(options.html)
    if made.timeline is None:
        return written
    if options.perfetto is not None:
        from systolic.forecasting.display.trace import write_trace

        write_trace(made, options.perfetto)
        written["perfetto"] = str(options.perfetto)
    if options.xprof is not None:
        from systolic.forecasting.display.xprof import write_xprof

        write_xprof(made, options.xprof)
        written["xprof"] = str(options.xprof)
    return written


def before_of(options: ForecastOptions) -> dict[str, Any] | None:
    """The forecast of ``--against``. Checks first that the files to write can be written."""
    _check_files(options)
    if options.against is None:
        return None
    if _is_dump(options.against):
        raise OptionError(
            f"--against {options.against} is a dump, which another dump is compared with: systolic forecast new.txt --against {options.against}; here it takes the JSON of a forecast"
        )
    from systolic.forecasting.display import comparison

    return comparison.read(options.against)


def _is_dump(path: Path) -> bool:
    """Whether a file is HLO and not the JSON of a forecast."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"HloModule")
    except OSError:
        return False


def _check_files(options: ForecastOptions) -> None:
    for path in (options.html, options.perfetto, options.save):
        if path is not None:
            check_writable(path)
