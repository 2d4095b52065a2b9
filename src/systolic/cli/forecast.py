"""``systolic forecast RECIPE --on SLICE [options]``: what a step does on a slice that need not be there."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.aot import Compiler, StepKind
from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.cli.output import print_json
from systolic.cli.parse import arguments
from systolic.cli.target import first, request, require_slice
from systolic.core.errors import OptionError
from systolic.core.files import check_writable
from systolic.forecasting import Forecast

USAGE = """usage: systolic forecast RECIPE --on SLICE [options]
       systolic forecast dump.txt --on SLICE [options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function. Its step is compiled for
the slice by the real compiler and the schedule is simulated; nothing of the slice need be there.
On cpu the program is compiled too and its time is a roofline at measured rates. A GPU that is not
here (h100, 8xh100, 2xh200 …) gets a roofline of the partitioned program, marked as assumed.
dump.txt is scheduled HLO that another program wrote: compiled.as_text(), or XLA's dump after
optimizations.
SLICE is one of systolic chips: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu.

  --on SLICE       the slice
  --step STEP      train (default), eval, prefill or decode
  --flags="…"      of the compiler, on top of those that all jobs on the chip share (systolic chips
                   v5e lists them); none leaves these out
  --quick          stop at the compiler's schedule: seconds; the time of ops is estimated
  --save PATH      keep the compiled executable, to be loaded on that slice
  --html PATH      write a report: memory map, timeline, costs, roofline
  --perfetto PATH  write a trace for ui.perfetto.dev or chrome://tracing (.gz compresses)
  --xprof DIR      write a profile for xprof --logdir DIR
  --against JSON   what changed since another forecast's --json
  --json           print one JSON object

Exits with 1 when the step does not fit. systolic forecast RECIPE --help shows the recipe's options."""


def options(
    on: str,
    step: StepKind = StepKind.train,
    flags: str = "",
    quick: bool = False,
    save: Path | None = None,
    html: Path | None = None,
    perfetto: Path | None = None,
    xprof: Path | None = None,
    against: Path | None = None,
    json: bool = False,
) -> None:
    """The verb's own options.

    Args:
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu.
        step: Which of the job's steps: train, eval, prefill or decode.
        flags: Of the compiler, on top of the set that all jobs on the chip share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        quick: Stop at the compiler's schedule, after seconds: memory is exact, the time of ops estimated.
        save: Keep the compiled executable in this file.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: What changed since the forecast in this JSON file.
        json: Print one JSON object on stdout.
    """


def text_options(
    on: str,
    html: Path | None = None,
    perfetto: Path | None = None,
    xprof: Path | None = None,
    against: Path | None = None,
    json: bool = False,
) -> None:
    """Forecasts scheduled HLO that another program dumped.

    Args:
        on: The slice that it was compiled for.
        html: Write a report of one page to this file.
        perfetto: Write a trace for Perfetto or Chrome to this file; .gz compresses it.
        xprof: Write a profile into this folder, for xprof --logdir.
        against: What changed since the forecast in this JSON file.
        json: Print one JSON object on stdout.
    """


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    target, rest = first(args, "forecast", "a recipe")
    require_slice("forecast", target, rest, "a slice; add --on v5e-16, systolic chips lists them")
    if is_text(target):
        verb = arguments(text_options, rest, f"systolic forecast {target}")
        before = _before(verb)
        from systolic.forecasting import forecast_text

        return show(forecast_text(Path(target), slice(verb["on"])), verb, before)
    asked = request(target, rest, "forecast", options)
    verb = asked.verb
    on, before = slice(verb["on"]), _before(verb)
    if verb["quick"] and verb["save"] is not None:
        raise OptionError(
            "--save keeps what runs on the slice and --quick stops before there is such a thing; leave one of them out"
        )
    made = compiled(asked.job, on, verb)
    remade = _remade(rest)
    if made.rejected is not None and verb["step"] is StepKind.train and on.platform == "tpu":
        way_out = shlex.join(["systolic", "explain", target, *remade])
        made = replace(made, rejected={**made.rejected, "remedies": [way_out]})
    return show(made, verb, before, {"target": target, "arguments": remade})


def is_text(target: str) -> bool:
    """Whether a target is a file of HLO rather than a recipe."""
    return ".py:" not in target and not target.endswith(".py") and Path(target).is_file()


def compiled(job: Any, on: Slice, verb: Mapping[str, Any]) -> Forecast:
    """The forecast of a job's step, with progress on stderr."""
    from systolic.forecasting import forecast_job
    from systolic.report.forecast.progress import ProgressLine

    flags = resolved(verb["flags"], on.chip)
    compiler = Compiler(flags=flags, save=verb["save"] is not None)
    if verb["quick"]:
        compiler = compiler.quick()
    with ProgressLine(sys.stderr, f"{job.name} for {on.name}") as progress:
        made = forecast_job(job, on, verb=verb["step"], compiler=compiler, say=progress.say)
    if verb["save"] is not None:
        save(made, verb["save"])
    return made


def save(made: Forecast, path: Path) -> None:
    """Copies the serialized executable out of the store, and what it was made by beside it.

    Raises:
        RunError: others could have written the store's, or the copy can't be written.
    """
    from systolic.aot import executable

    if made.fits and made.answer is not None:
        executable.save(made.answer, path)


def _remade(args: Sequence[str]) -> list[str]:
    """The arguments that say what was forecast, less those that say where it goes."""
    from systolic.cli.command import without

    return without(args, {"html", "perfetto", "xprof", "against", "json", "save", "quick"})


def show(
    made: Forecast,
    verb: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    asked: Mapping[str, Any] | None = None,
) -> int:
    """Prints and writes what was asked for; returns the exit code."""
    from systolic.report.forecast import record

    written = write(made, verb)
    now = made.to_json() if verb.get("json") or before else {}
    changes = [] if before is None else record.compare(before, now)
    if verb.get("json"):
        if before is not None:
            now["against"] = [change.to_json() for change in changes]
        print_json({**now, **(asked or {}), "written": written})
        return 0 if made.fits else 1
    from systolic.report.forecast.text import print_forecast

    print_forecast(made)
    if before is not None:
        named = [f"{one['recipe']} on {one['slice']}" for one in (before, now)]
        print("\n" + "\n".join(record.lines(changes, *named)))
    for what, path in written.items():
        print(f"{what:<9}{path}")
    for text in (made.rejected or {}).get("remedies", ()):
        print(f"{'next':<9}{text}")
    return 0 if made.fits else 1


def write(made: Forecast, verb: Mapping[str, Any]) -> dict[str, str]:
    """Writes the files that were asked for; returns what is where."""
    written: dict[str, str] = {}
    if verb.get("save") is not None and made.fits:
        written["saved"] = str(verb["save"])
    if verb.get("html") is not None:
        from systolic.report.forecast.page import write_page

        write_page(made, verb["html"])
        written["report"] = str(verb["html"])
    if made.timeline is None:
        return written
    if verb.get("perfetto") is not None:
        from systolic.report.forecast.trace import write_trace

        write_trace(made, verb["perfetto"])
        written["perfetto"] = str(verb["perfetto"])
    if verb.get("xprof") is not None:
        from systolic.report.forecast.xprof import write_xprof

        write_xprof(made, verb["xprof"])
        written["xprof"] = str(verb["xprof"])
    return written


def _before(verb: Mapping[str, Any]) -> dict[str, Any] | None:
    """The other forecast of ``--against``; like what will be written, looked at before anything takes time."""
    for name in ("html", "perfetto", "save"):
        if verb.get(name) is not None:
            check_writable(verb[name])
    path = verb.get("against")
    if path is None:
        return None
    from systolic.report.forecast import record

    return record.read(path)
