"""From a Job, or anyone's function, to a forecast: what ``systolic forecast`` and :func:`systolic.forecast` call."""

import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, overload

from systolic.chips import SLICE, SLICES, Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, StepKind, executable
from systolic.compiling.restored import made_here
from systolic.compiling.traced import name_of
from systolic.core.arguments import Wording, with_types
from systolic.core.errors import DataError, LayoutError, OptionError, RunError, nearest
from systolic.core.ranges import dashed
from systolic.forecasting import Forecast, forecast_function, forecast_job
from systolic.forecasting.calibrations import calibration_for, given_with
from systolic.forecasting.table import ForecastRow, ForecastTable
from systolic.job import Job
from systolic.recipes.jobs.source import source_of
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import Costs, Trips

STEP_OPTIONS = ("step", "flags", "quick", "save", "watch", "trips", "costs", "calibration")
"""Options of a forecast; others are those of the recipe."""
VARY = Wording("options with their values, such as {'layout.fsdp': [4, 8]} or 'layout.fsdp=4,8'")


@overload
def forecast(
    what: Job,
    /,
    *,
    on: str | Slice,
    step: StepKind | str = StepKind.train,
    flags: str = "",
    quick: bool = False,
    save: Path | str | None = None,
    watch: Callable[[str], None] | None = ...,
    trips: Trips = (),
    costs: Costs = (),
    calibration: Calibration | Path | str | None = None,
) -> Forecast: ...


@overload
def forecast(
    what: str,
    /,
    *,
    on: str | Slice,
    step: StepKind | str = StepKind.train,
    flags: str = "",
    quick: bool = False,
    save: Path | str | None = None,
    watch: Callable[[str], None] | None = ...,
    trips: Trips = (),
    costs: Costs = (),
    calibration: Calibration | Path | str | None = None,
    **options: Any,
) -> Forecast: ...


@overload
def forecast(
    what: Callable[..., Any], /, *args: Any, on: str | Slice, **options: Any
) -> Forecast: ...


@overload
def forecast(
    what: Job | str | Callable[..., Any],
    /,
    *args: Any,
    on: Sequence[str | Slice],
    vary: Mapping[str, Any] | Sequence[str] | str | None = None,
    **options: Any,
) -> ForecastTable: ...


@with_types
def forecast(
    what: Any,
    /,
    *args: Any,
    on: Annotated[str | Slice | Sequence[str | Slice], SLICES],
    vary: Annotated[Mapping[str, Any] | Sequence[str] | str | None, VARY] = None,
    **options: Any,
) -> Forecast | ForecastTable:
    """Memory, time and cost of a Job's step, or of a function, on a slice that need not be there.

    A Job takes the options of :func:`forecast_step`, and ``steps`` and ``layout``. A name is that of a recipe or of a published model
    (``llama-3.1-70b``), or the path of a config.json, a Hugging Face folder or a Bundle, and takes the options
    of that recipe as well. Fields of an option are options, too: ``**{"model.layers": 12, "layout.fsdp": 8}``. Anything else is a function, jitted or plain, whose arguments and options are those
    of :func:`~systolic.forecasting.forecast_function`.

    Several slices (a list, or names with commas) and ``vary``, options of the recipe with several values each,
    make a table: a forecast of each combination. ``vary`` is ``{"layout.fsdp": [4, 8]}``, or the text of ``--vary``.
    """
    if not isinstance(on, (str, Slice)) or (isinstance(on, str) and "," in on) or vary:
        return forecast_table(what, *args, on=on, vary=_varied(vary), **options)
    if isinstance(what, Job | str):
        if args:
            raise OptionError(
                f"forecast takes a Job or a name without further arguments, and was given {args[0]!r}; give options by name"
            )
        own = {name: options.pop(name) for name in STEP_OPTIONS if name in options}
        job = what if isinstance(what, Job) and not options else source_of(what, options).job
        return forecast_step(job, on=on, **own)
    if type(what).__module__ == "jax._src.stages" and type(what).__name__ == "Lowered":
        raise made_here(what)
    if not callable(what):
        raise OptionError(
            f"forecast takes a Job, the name of a recipe or a model, or a function, and was given {what!r}; give one"
        )
    target = slice(on) if isinstance(on, str) else on
    watch = options.pop("watch", None)
    with patient(watch, f"{name_of(what)} for {target.name}") as say:
        return forecast_function(what, *args, on=target, watch=say, **options)


@contextmanager
def patient(watch: Callable[[str], None] | None, title: str) -> Generator[Callable[[str], None]]:
    """What a call's stages are given to: ``watch``, else lines on stderr once it takes long."""
    if watch is not None:
        yield watch
        return
    from systolic.report.progress import PATIENCE_SECONDS, ProgressLine

    with ProgressLine(sys.stderr, title, quiet_seconds=PATIENCE_SECONDS) as progress:
        yield progress.say


@with_types
def forecast_step(  # noqa: PLR0913
    job: Job,
    *,
    on: Annotated[str | Slice, SLICE],
    step: StepKind | str = StepKind.train,
    flags: str = "",
    quick: bool = False,
    save: Path | str | None = None,
    watch: Callable[[str], None] | None = None,
    trips: Trips = (),
    costs: Costs = (),
    calibration: Calibration | Path | str | None = None,
) -> Forecast:
    """One of a job's steps on a slice.

    Args:
        job: Under the layout of which the step is compiled.
        on: The slice, or its name.
        step: ``train``, ``eval``, ``prefill`` or ``decode``.
        flags: Compiler flags on top of the set that all jobs on the chip share; ``none`` leaves that set out.
        quick: Stop at the compiler's schedule: memory is exact, the time of ops estimated.
        save: A file for the compiled executable; nothing is written when the step does not fit.
        watch: Called with each stage of the compile, a few words; by default the stage and the time so far are
            written to stderr once it takes more than ten seconds.
        trips: Trips of loops that the program leaves open: ``{"while.5": 100}``, by the loop's name or ``file.py:line``.
        costs: Time of one call of a kernel, a custom call or a callback: ``{"my_kernel": 1.2e-3}`` in seconds, or ``"1.2ms"``.
        calibration: Corrections of the simulator from profiles of this chip: a name that ``systolic calibrations`` lists, or
            the path of a calibration's file.

    Raises:
        OptionError: an option has no such value, ``quick`` is asked for with ``save``, or the program has nothing of a
            name in ``trips`` or ``costs``; or the calibration is of another chip.
        NotFoundError: there is no such calibration.
        LayoutError: the layout does not divide the slice, the model or the batch.
        RunError: the compiler failed, or ``save`` can't be written.
    """
    if quick and save is not None:
        raise OptionError(
            "--save keeps what runs on the slice and --quick stops before there is such a thing; leave one of them out"
        )
    target = slice(on) if isinstance(on, str) else on
    known = given_with(trips, costs, calibration, target)
    compiler = Compiler(flags=resolved(flags, target.chip), save=save is not None)
    verb = step if isinstance(step, StepKind) else _kind(step)
    with patient(watch, f"{job.name} for {target.name}") as say:
        made = forecast_job(
            job,
            target,
            verb=verb,
            compiler=compiler.quick() if quick else compiler,
            say=say,
            given=known,
        )
    if save is not None:
        save_executable(made, Path(save))
    return made


def forecast_table(
    what: Any,
    /,
    *args: Any,
    on: str | Slice | Sequence[str | Slice],
    vary: Mapping[str, Sequence[Any]],
    **options: Any,
) -> ForecastTable:
    """Forecasts of each combination of slices and of values of the options in ``vary``."""
    if vary and not isinstance(what, str):
        raise OptionError(
            f"vary takes options of a recipe and was given {', '.join(vary)} for {_name(what)}; give the recipe's name, or forecast one by one"
        )
    if "save" in options:
        raise OptionError("save keeps one executable; forecast that slice alone to save it")
    if not vary and isinstance(what, str):
        source_of(what, {name: v for name, v in options.items() if name not in STEP_OPTIONS})

    def case(place: Slice, settings: Mapping[str, Any]) -> ForecastRow:
        def one() -> Forecast:
            return forecast(what, *args, on=place, **options, **settings)

        return row_of(place, settings, one)

    places = slices_of(on)
    calibration_for(options.get("calibration"), places)  # refused before the first compile
    combined = list(itertools.product(places, combinations(vary)))
    rows = [case(place, settings) for place, settings in combined]
    return ForecastTable(name=_name(what), rows=rows)


def slices_of(on: str | Slice | Sequence[str | Slice]) -> list[Slice]:
    """Slices of a list, or of names with commas, each once.

    Raises:
        NotFoundError: there is no slice of a name.
        OptionError: there is none at all.
    """
    parts: Iterable[str | Slice]
    if isinstance(on, str):
        parts = [part for part in on.split(",") if part.strip()]
    else:
        parts = [on] if isinstance(on, Slice) else on
    places = [slice(part) if isinstance(part, str) else part for part in parts]
    if not places:
        raise OptionError(f"on is {on!r}; it takes slices, such as v5e-16,v6e-8")
    return list({place.name: place for place in places}.values())


def combinations(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Settings for each combination of the values, the last option fastest."""
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


def values_of(vary: Sequence[str]) -> dict[str, list[str]]:
    """Options with their values, from ``NAME=VALUE,VALUE``.

    Raises:
        OptionError: one is not written as NAME=VALUE,VALUE, or is given twice.
    """
    found: dict[str, list[str]] = {}
    for word in vary:
        name, _, values = word.removeprefix("--").partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not name or not listed:
            raise OptionError(
                f"--vary is {word!r}; it takes an option with its values: --vary layout.fsdp=4,8,16"
            )
        if dashed(name) in found:
            raise OptionError(f"--vary {name} is given twice; give all its values at once")
        found[dashed(name)] = list(dict.fromkeys(listed))
    return found


def _varied(vary: Mapping[str, Any] | Sequence[str] | str | None) -> dict[str, Sequence[Any]]:
    """Options with several values each; text is that of ``--vary``.

    Raises:
        OptionError: an option without a value, or as :func:`values_of`.
    """
    if not isinstance(vary, Mapping):
        return {**values_of([vary] if isinstance(vary, str) else vary or [])}
    found: dict[str, Sequence[Any]] = {}
    for name, values in vary.items():
        if isinstance(values, str):
            found |= values_of([f"{name}={values}"])
        elif isinstance(values, Iterable) and not isinstance(values, Mapping):
            found[name] = list(values)
        else:
            found[name] = [values]
        if not found.get(name, True):
            raise OptionError(f"vary has no value for {name}; give a list of them")
    return found


def row_of(on: Slice, settings: Mapping[str, Any], make: Callable[[], Forecast]) -> ForecastRow:
    """A forecast as a row; a layout or a dump that the slice does not allow, or a compile that fails, is its problem."""
    try:
        return ForecastRow(on=on, settings=settings, forecast=make())
    except (DataError, LayoutError, RunError) as error:
        return ForecastRow(on=on, settings=settings, problem=str(error))


def _name(what: Any) -> str:
    if isinstance(what, Job):
        return what.name
    return what if isinstance(what, str) else name_of(what)


def save_executable(made: Forecast, path: Path) -> None:
    """Copies the serialized executable of a step that fits out of the store, with what it was made by beside it.

    Raises:
        RunError: others could have written the store's, or the copy can't be written.
    """
    if made.fits and made.answer is not None:
        executable.save(made.answer, path)


def _kind(name: str) -> StepKind:
    names = [one.value for one in StepKind]
    if name not in names:
        raise OptionError(f"--step is {name!r}{nearest(name, names)}; it takes {', '.join(names)}")
    return StepKind(name)
