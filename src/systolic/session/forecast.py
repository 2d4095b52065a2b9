"""From a Job, or anyone's function, to a forecast: what ``systolic forecast`` and :func:`systolic.forecast` call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from systolic.aot import Compiler, StepKind, executable
from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.core.errors import OptionError, nearest
from systolic.forecasting import Forecast, forecast_function, forecast_job
from systolic.job import Job
from systolic.session.job_source import source_of
from systolic.sim.incomplete import Costs, Trips, given

STEP_OPTIONS = ("step", "flags", "quick", "save", "watch", "trips", "costs")
"""Options of a forecast; others are those of the recipe."""


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
    watch: Callable[[str], None] = ...,
    trips: Trips = (),
    costs: Costs = (),
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
    watch: Callable[[str], None] = ...,
    trips: Trips = (),
    costs: Costs = (),
    **options: Any,
) -> Forecast: ...


@overload
def forecast(
    what: Callable[..., Any], /, *args: Any, on: str | Slice, **options: Any
) -> Forecast: ...


def forecast(what: Any, /, *args: Any, on: str | Slice, **options: Any) -> Forecast:
    """Memory, time and cost of a Job's step, or of a function, on a slice that need not be there.

    A Job takes the options of :func:`forecast_step`. A name is that of a recipe or of a published model
    (``llama-3.1-70b``), or the path of a config.json, a Hugging Face folder or a Bundle, and takes the options
    of that recipe as well. Anything else is a function, jitted or plain, whose arguments and options are those
    of :func:`~systolic.forecasting.forecast_function`.
    """
    if isinstance(what, Job):
        return forecast_step(what, *args, on=on, **options)
    if isinstance(what, str):
        own = {name: options.pop(name) for name in STEP_OPTIONS if name in options}
        return forecast_step(source_of(what, options).job, *args, on=on, **own)
    if not callable(what):
        raise OptionError(
            f"forecast takes a Job, the name of a recipe or a model, or a function, and was given {what!r}; give one"
        )
    return forecast_function(what, *args, on=on, **options)


def forecast_step(  # noqa: PLR0913
    job: Job,
    *,
    on: str | Slice,
    step: StepKind | str = StepKind.train,
    flags: str = "",
    quick: bool = False,
    save: Path | str | None = None,
    watch: Callable[[str], None] = lambda _: None,
    trips: Trips = (),
    costs: Costs = (),
) -> Forecast:
    """One of a job's steps on a slice.

    Args:
        job: Under the layout of which the step is compiled.
        on: The slice, or its name.
        step: ``train``, ``eval``, ``prefill`` or ``decode``.
        flags: Compiler flags on top of the set that all jobs on the chip share; ``none`` leaves that set out.
        quick: Stop at the compiler's schedule: memory is exact, the time of ops estimated.
        save: A file for the compiled executable; nothing is written when the step does not fit.
        watch: Called with each stage of the compile, a few words.
        trips: Trips of loops that the program leaves open: ``{"while.5": 100}``, by the loop's name or ``file.py:line``.
        costs: Time of one call of a kernel, a custom call or a callback: ``{"my_kernel": 1.2e-3}`` in seconds, or ``"1.2ms"``.

    Raises:
        OptionError: an option has no such value, ``quick`` is asked for with ``save``, or the program has nothing of a
            name in ``trips`` or ``costs``.
        LayoutError: the layout does not divide the slice, the model or the batch.
        RunError: the compiler failed, or ``save`` can't be written.
    """
    if quick and save is not None:
        raise OptionError(
            "--save keeps what runs on the slice and --quick stops before there is such a thing; leave one of them out"
        )
    target = slice(on) if isinstance(on, str) else on
    compiler = Compiler(flags=resolved(flags, target.chip), save=save is not None)
    made = forecast_job(
        job,
        target,
        verb=step if isinstance(step, StepKind) else _kind(step),
        compiler=compiler.quick() if quick else compiler,
        say=watch,
        given=given(trips, costs),
    )
    if save is not None:
        save_executable(made, Path(save))
    return made


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
