"""``systolic forecast`` and :func:`systolic.forecast`: memory, time and cost of a step, or of a server, on a slice that need not be there."""

import inspect
import itertools
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

from systolic import recipes
from systolic.chips import SLICE, SLICES, Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler, StepKind
from systolic.core.arguments import (
    WRITTEN,
    OptionWords,
    Required,
    Wording,
    command_of,
    explained_by,
    with_types,
)
from systolic.core.errors import OptionError, TakenError
from systolic.core.files import write_atomically
from systolic.core.option_words import option_words, path_text
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, dashed
from systolic.core.reporter import reporter, working
from systolic.forecasting.cost import ForecastCommand
from systolic.job import ExpertAxis, Job, Layout, Served, ServedCache, ServedWeights
from systolic.recipes.jobs import JobSource, source_of, with_options
from systolic.sim.calibration import Calibration

if TYPE_CHECKING:
    from systolic.forecasting.forecast import Forecast
    from systolic.forecasting.serving.forecast import ServingForecast
    from systolic.forecasting.table import ForecastRow, ForecastTable
    from systolic.sim.incomplete import Given

USAGE = """usage: systolic forecast RECIPE --on SLICE [options]
       systolic forecast MODEL --on SLICE [options]
       systolic forecast --serve MODEL --on SLICE [options]
       systolic forecast dump.txt --on SLICE [options]
       systolic forecast FORECAST.json --against EARLIER.json
       systolic forecast --on SLICE [options] -- python train.py [its options]

RECIPE is a name that systolic recipes lists, or path/to/file.py:function. Its step is compiled for
the slice by the slice's own compiler, and the schedule is simulated. The hardware is not needed.
On cpu the program is compiled too, and its time is a roofline at measured rates. A GPU (h100, 8xh100,
16xh200 …) takes the extra gpu-forecast, XLA's GPU compiler; without it, it gets a roofline of the
partitioned program, marked as assumed.
MODEL is a published model that systolic recipes lists (llama-3.1-70b), a config.json, a Hugging Face folder
or a Bundle; weights are not needed. It takes the options of the recipe lm, with the model's sizes as defaults.
--serve forecasts a server of the model with continuous batching: tokens per second, time to the first
and to each further token, the requests that fit and dollars per million tokens, at several concurrencies.
dump.txt is scheduled HLO of another program: compiled.as_text(), or XLA's dump after optimizations. It
takes --on, --html, --perfetto, --xprof, --against, --csv, --trips, --cost, --calibration and --json; a GPU's
dump needs no --on beside XLA's own gpu_target_config.pbtxt, which names the GPU.
--against lists the ops that changed since an earlier dump of the program (before an upgrade of JAX or libtpu, or
a flag) or a saved forecast. systolic forecast … --json > EARLIER.json saves one; FORECAST.json is another.
-- runs a JAX program of your own, unchanged and in its own environment, as if on the slice, until its step
is known. That environment's libtpu compiles the step, which is simulated. The program ends before it trains.
SLICE is one of systolic chips: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu. Several slices with commas, and
--vary layout.fsdp=4,8,16, make a table with a row for each combination.
The times in parentheses after a step's time are a range within which 80 % of past forecasts erred; with
--json, "interval" says of how many measured steps or operations it was made.

Exits with 1 when the step does not fit, or no row of a table does.
systolic forecast RECIPE --help shows the recipe's options."""

ON = Required("a slice; add --on v5e-16, systolic chips lists them")
VARY = Wording("options with their values, such as {'layout.fsdp': [4, 8]} or 'layout.fsdp=4,8'")
FLAGS = Wording("--name=value, a list of them or one text with spaces between")
EARLIER = Wording("the path of a forecast's JSON, or what its to_json() returns")
Named = Annotated[
    Mapping[str, float | str] | Sequence[str], OptionWords(tuple[str, ...], repeated=True)
]
"""Trips by the name of a loop."""
Costs = Annotated[
    Mapping[str, float | str] | Sequence[str],
    OptionWords(tuple[str, ...], repeated=True, name="cost"),
]
"""Times by the name of a kernel."""
Corrections = Annotated[Calibration | Path | str | None, OptionWords(str, default="")]
Earlier = Annotated[Path | str | Mapping[str, Any] | None, OptionWords(Path | None), EARLIER]
OF_A_STEP = ("step", "flags", "quick", "save", "vary")
"""Options that a dump, which is compiled already, does not take."""


def _functions_apart(forecast: Callable[..., Any]) -> Callable[..., Any]:
    """A forecast of a function takes the function's own arguments, which may have the names of options."""

    @wraps(forecast)
    def called(what: Any, /, *args: Any, **options: Any) -> Any:
        if callable(what) and not isinstance(what, Job):
            return _forecast_of_function(what, *args, **options)
        return forecast(what, *args, **options)

    return called


@overload
def forecast(
    what: Any, /, *args: Any, on: str | Slice, csv: None = None, **options: Any
) -> "Forecast": ...


@overload
def forecast(
    what: Any,
    /,
    *args: Any,
    on: str | Slice | Sequence[str | Slice],
    csv: Path | str | None = None,
    **options: Any,
) -> "ForecastTable": ...


@_functions_apart
@command_of
def forecast(  # noqa: PLR0913  the options of systolic forecast
    what: Any,
    /,
    *args: Any,
    on: Annotated[str | Slice | Sequence[str | Slice], SLICES, ON],
    vary: Annotated[
        Mapping[str, Any] | Sequence[str] | str | None,
        VARY,
        OptionWords(tuple[str, ...], default=(), repeated=True),
    ] = None,
    step: StepKind = StepKind.train,
    flags: Annotated[str | Sequence[str], FLAGS] = "",
    quick: bool = False,
    save: Annotated[Path | str | None, WRITTEN] = None,
    against: Earlier = None,
    csv: Annotated[Path | str | None, WRITTEN] = None,
    trips: Named = (),
    costs: Costs = (),
    calibration: Corrections = None,
    **options: Any,
) -> "Forecast | ForecastTable":
    """Forecasts a step of a recipe or a model on a slice.

    A name is that of a recipe or of a published model (``llama-3.1-70b``), or the path of a config.json, a Hugging Face
    folder or a Bundle, and takes the options of that recipe as well; of a Job these are ``steps`` and ``layout``. Fields of
    an option are options, too: ``**{"model.layers": 12, "layout.fsdp": 8}``. The path of a file of scheduled HLO takes the
    options of :func:`~systolic.forecasting.command.forecast_dump`. Anything else is a function, jitted or plain, whose arguments and options are those
    of :func:`~systolic.forecasting.function.forecast_function`, among them ``spread``, its mesh and partitions.

    Several slices (a list, or names with commas), ``vary`` and ``csv`` make a table: a forecast of each combination.
    Stages of the compile go to the :class:`~systolic.core.reporter.Reporter` in place, which is silent by default.

    Args:
        what: A Job, a name, the path of a dump, or a function.
        args: Arguments of a function.
        on: The slice: v5e-16, v5p-128, tpu7x-8, 2xv5e-256, 8xh100, cpu. Several with commas make a table.
        vary: An option of the recipe with several values, for a table: --vary layout.fsdp=4,8,16. Repeat it for all combinations.
        step: Which of the job's steps: train, eval, prefill or decode.
        flags: Compiler flags on top of the set that all jobs on the chip share (systolic chips v5e lists it): --flags="--xla_tpu_scoped_vmem_limit_kib=65536"; none leaves that set out.
        quick: Stop at the compiler's schedule, after seconds: memory is exact, the time of ops estimated.
        save: Save the compiled executable to this file.
        against: Print what changed since the forecast in this JSON file, or since a dump of the program, and which ops changed.
        csv: Write the table to this file as CSV.
        trips: Number of iterations of a loop whose length the program does not fix, NAME=NUMBER, such as while.5=100 or train.py:42=100; may be repeated.
        costs: Time of one call of a kernel, custom call or callback, NAME=TIME, such as my_kernel=1.2ms or EighTpu=350us; may be repeated.
        calibration: Correct the simulator with profiles of this chip: a name that systolic calibrations lists, or a calibration's file.
        options: Options of the recipe that ``what`` names.

    Raises:
        OptionError: an option has no such value, ``quick`` is combined with ``save`` or a table with ``save`` or
            ``against``, ``trips`` or ``costs`` name nothing in the program, or the calibration is of another chip.
        NotFoundError: there is no such recipe, slice or calibration.
        LayoutError: the layout does not divide the slice, the model or the batch.
        RunError: the compiler failed, or a file can't be written.
    """
    if not isinstance(what, Job | JobSource | str | Path):
        raise _not_forecast(what)
    if args:
        raise OptionError(
            f"forecast takes a Job or a name without further arguments, and was given {args[0]!r}; give options by name"
        )
    settings = StepSettings(
        step=step, flags=flags, quick=quick, trips=trips, costs=costs, calibration=calibration
    )
    if isinstance(what, str | Path) and is_dump(path_text(what)):
        values = {"step": step, "flags": flags, "quick": quick, "save": save, "vary": vary}
        _refuse_options_of_a_step(path_text(what), {**values, **options})
        return forecast_dump(
            what,
            on=on,
            against=against,
            csv=csv,
            trips=trips,
            costs=costs,
            calibration=calibration,
        )
    job = path_text(what) if isinstance(what, Path) else what
    if is_table(on, vary, csv):
        check_no_table(save=save, against=against)
        return _written(_table_of(job, on, vary, settings, options), csv)
    place = slice(on) if isinstance(on, str) else on
    assert isinstance(place, Slice)
    before = _before(against, place)
    source = source_of(job, options)
    with working(f"{source.job.name} for {place.name}"):
        result = settings.forecast(source, place, None if save is None else Path(save))
    return _compared(result, before)


@command_of
@explained_by(forecast)
def forecast_dump(
    path: Annotated[Path | str, Wording("the path of a file of scheduled HLO")],
    *,
    on: Annotated[str | Slice | Sequence[str | Slice] | None, SLICES] = None,
    against: Earlier = None,
    csv: Annotated[Path | str | None, WRITTEN] = None,
    trips: Named = (),
    costs: Costs = (),
    calibration: Corrections = None,
) -> "Forecast | ForecastTable":
    """Forecasts scheduled HLO that another program dumped.

    Args:
        path: The text: ``compiled.as_text()``, or XLA's dump after optimizations.
        on: The slice that it was compiled for; of a GPU's dump by default that of the file beside it. Several with commas make a table.
        against: Print what changed since the forecast in this JSON file, or since another dump of the program, and which ops changed.

    Raises:
        OptionError: the slice is a CPU, there is none, or the program has nothing of a name in ``trips`` or ``costs``.
        DataError: the file is no scheduled HLO of the slice's kind, is damaged, or is for another chip or number of devices.
    """
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.table import ForecastTable, row_of, slices_of
    from systolic.forecasting.text import forecast_text, gpus_of
    from systolic.sim.incomplete import given

    text = Path(path)
    on = gpus_of(text) if on is None else on
    several = is_table(on, None, csv)
    if several:
        check_no_table(against=against)
    places = slices_of(on)
    known = replace(given(trips, costs), calibration=calibration_for(calibration, places))
    if several:
        rows = [
            row_of(each, {}, lambda each=each: forecast_text(text, each, known)) for each in places
        ]
        return _written(ForecastTable(name=text.name, rows=rows), csv)
    (place,) = places
    return _compared(forecast_text(text, place, known), _before(against, place, known))


@command_of
@explained_by(forecast)
def forecast_command(  # noqa: PLR0913  the options of systolic forecast -- COMMAND
    command: Annotated[
        Sequence[str], Wording("the words of a command, such as ['python', 'train.py']")
    ],
    *,
    on: Annotated[
        str | Slice,
        SLICE,
        Required("a slice; add --on v5e-8 before the --, systolic chips lists them"),
    ],
    step: str = "",
    quick: bool = False,
    minutes: Annotated[float, POSITIVE] = 20.0,
    keep: Path | str | None = None,
    against: Earlier = None,
    trips: Named = (),
    costs: Costs = (),
    calibration: Corrections = None,
) -> "Forecast":
    """Forecasts the step of a program of your own (-- python train.py).

    Args:
        command: The program with its options; it runs in its own environment, unchanged.
        on: The slice of TPUs or GPUs that the program sees.
        step: Name of the jitted function that is the step; by default the sequence of calls that repeats.
        minutes: Limit in minutes for the program to reach its step.
        keep: Save the compiled text, the compiler's memory report and the order of devices to this new folder.

    Raises:
        OptionError: an option that does not parse, or several slices.
        NotFoundError: there is no such command, slice or calibration.
        TakenError: there is something in the folder of ``keep``.
        RunError: the program ended or the time was over before its step was known.
    """
    from systolic.capture import capture, short_name
    from systolic.forecasting.calibrations import given_with
    from systolic.forecasting.captured import forecast_captured

    if isinstance(on, str) and "," in on:
        raise OptionError(
            f"--on {on} names several slices, and a program is forecast for one at a time; systolic plan --on {on} -- … compares them"
        )
    place = slice(on) if isinstance(on, str) else on
    known = given_with(trips, costs, calibration, place)
    before = _before(against, place, known)
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="systolic-")))
        else:
            folder = stack.enter_context(_kept(Path(keep)))
        with working(f"{short_name(command)} for {place.name}") as progress:
            captured = capture(
                command,
                place,
                folder,
                step=step,
                quick=quick,
                limit_seconds=60 * minutes,
                watch=progress.stage,
            )
            progress.stage("simulating")
            result = forecast_captured(captured, place, known)
    request = ForecastCommand(command=list(command), quick=quick)
    return _compared(replace(result, request=request), before)


@command_of
@explained_by(forecast)
def forecast_server(  # noqa: PLR0913  the options of systolic forecast --serve
    job: Annotated[Job | JobSource | str, Wording("a Job or the name of a model or a recipe")],
    *,
    on: Annotated[
        str | Slice, SLICE, Required("a slice; add --on v6e-8, systolic chips lists them")
    ],
    prompt_tokens: Annotated[int, COUNT] = 1024,
    output_tokens: Annotated[int, COUNT] = 256,
    concurrency: Annotated[tuple[int, ...], COUNT] = (),
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    page_size: Annotated[int, COUNT] = 64,
    chunk: Annotated[int, COUNT] = 256,
    host_ms: Annotated[float | None, NOT_NEGATIVE] = None,
    weights: ServedWeights = ServedWeights.plain,
    kv_dtype: ServedCache = ServedCache.plain,
    adapters: Annotated[int, NOT_NEGATIVE] = 0,
    rank: Annotated[int, NOT_NEGATIVE] = 0,
    expert_axis: ExpertAxis | None = None,
    flags: Annotated[str | Sequence[str], FLAGS] = "",
    quick: bool = False,
    calibration: Corrections = None,
    **options: Any,
) -> "ServingForecast":
    """Forecasts a server of a language model with continuous batching (--serve).

    Args:
        job: A language model: a Job, the name of a published model, or the path of a config.json, a Hugging Face folder or a Bundle.
        on: The slice: v5e-8, v6e-8, tpu7x-8, cpu.
        prompt_tokens: Tokens of each prompt.
        output_tokens: New tokens of each request.
        concurrency: Numbers of concurrent requests, one line each; by default 1, 4, 16 and so on, as many as fit.
        ttft: Limit of the mean time to the first token for the best load: 500ms, 2s.
        tpot: Limit of the mean time of each further token for the best load: 30ms.
        page_size: Positions of a page of the cache.
        chunk: Prompt tokens that a step reads.
        host_ms: Milliseconds of the host's work for each step, shown both overlapped with it and after it; by default as measured, 1.2 beside TPUs and 0.2 beside GPUs.
        weights: Format of a decoder's matrices: plain, or quantized as systolic quantize does; a quantized Bundle has its own.
        kv_dtype: Format of keys and values: plain, int8 with a scale for each position and head, or fp8 (e4m3) without scales.
        adapters: Low-rank adapters that the server has room for, beside every matrix.
        rank: Rank of each of them; 0 takes 16.
        expert_axis: What the expert axis splits besides experts: rows (texts), or heads (as the tensor axis does); by default neither, as in systolic serve.
        options: Options of the recipe that ``job`` names; without a layout among them the server has the one that holds the most requests.

    Raises:
        OptionError: an option that does not parse or is out of its range, or the model has no cache.
        NotFoundError: there is no such model, slice or calibration.
        LayoutError: the layout does not divide the slice or the model.
        RunError: the model does not generate text, or the compiler failed.
    """
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.serving.capacity import Load, check_context, forecast_serving
    from systolic.forecasting.serving.forecast import LatencyLimits, latency
    from systolic.forecasting.serving.layout import ROWS, given_layout, layout_of_requests
    from systolic.forecasting.serving.server_steps import with_adapters, with_formats

    source = source_of(job, options)
    target = "" if source.recipe.of_job else source.recipe.target
    place = slice(on) if isinstance(on, str) else on
    load = Load(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunk=chunk,
        host_seconds=None if host_ms is None else host_ms / 1e3,
    )
    limits = LatencyLimits(
        first_token_seconds=latency(ttft, "--ttft"), token_seconds=latency(tpot, "--tpot")
    )
    check_context(source.job, load, target)
    calibration_for(calibration, [place])  # refused before anything is read or compiled
    model = with_adapters(with_formats(source.job, target, weights), adapters, rank)
    if _has_layout(source):
        chosen = given_layout(model, place)
    else:
        chosen = layout_of_requests(model, place, load, max(concurrency, default=ROWS), kv_dtype)
    compiler = Compiler(flags=resolved(flags, place.chip))
    with working(f"{model.name} for {place.name}"):
        result = forecast_serving(
            replace(model, layout=chosen.layout),
            place,
            load,
            concurrency=concurrency,
            page_size=page_size,
            served=_served(kv_dtype, expert_axis, adapters),
            limits=limits,
            compiler=compiler.quick() if quick else compiler,
            calibration=calibration,
            watch=reporter().stage,
        )
    notes = [chosen.idle, *result.notes] if chosen.idle else result.notes
    request = ForecastCommand(target=target, quick=quick) if target else ForecastCommand()
    return replace(result, notes=notes, request=request)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is compiled and priced: options of :func:`forecast` that all rows of a table share."""

    step: StepKind
    flags: str | Sequence[str]
    quick: bool
    trips: Mapping[str, float | str] | Sequence[str]
    costs: Mapping[str, float | str] | Sequence[str]
    calibration: Calibration | Path | str | None

    def forecast(self, source: JobSource, on: Slice, save: Path | None = None) -> "Forecast":
        """Forecasts the step, with the command that makes this forecast where the job has a name."""
        result = self._step(source.job, on, save)
        if source.recipe.of_job:
            return result
        words = [*option_words(source.recipe.function, source.options), *self.words(on)]
        if result.rejected is not None and self.step is StepKind.train and on.platform == "tpu":
            remedy = shlex.join(["systolic", "explain", source.recipe.target, *words])
            result = replace(result, rejected=replace(result.rejected, remedies=[remedy]))
        request = ForecastCommand(
            target=source.recipe.target,
            arguments=words,
            options=recipes.plain(source.options),
            step=self.step.value,
            quick=self.quick,
        )
        return replace(result, request=request)

    def _step(self, job: Job, on: Slice, save: Path | None) -> "Forecast":
        """Forecasts a job's step; stages of the compile go to :func:`~systolic.core.reporter.reporter`."""
        from systolic.forecasting.calibrations import given_with
        from systolic.forecasting.run import forecast_job, save_executable

        if self.quick and save is not None:
            raise OptionError(
                "--save keeps what runs on the slice and --quick stops before there is such a thing; leave one of them out"
            )
        known = given_with(self.trips, self.costs, self.calibration, on)
        compiler = Compiler(flags=resolved(self._flags, on.chip), save=save is not None)
        result = forecast_job(
            job,
            on,
            verb=self.step,
            compiler=compiler.quick() if self.quick else compiler,
            say=reporter().stage,
            given=known,
        )
        if save is None or not result.fits:
            return result
        save_executable(result, save)
        return replace(result, saved=save)

    @property
    def _flags(self) -> str:
        return self.flags if isinstance(self.flags, str) else shlex.join(self.flags)

    def words(self, on: Slice) -> list[str]:
        """Options of the command that makes a forecast, without ``--quick`` and ``--calibration``."""
        return [
            *("--on", on.name),
            *option_words(forecast, {"step": self.step, "flags": self._flags}),
            *(word for text in _assigned(self.trips) for word in ("--trips", text)),
            *(word for text in _assigned(self.costs, "s") for word in ("--cost", text)),
        ]


def is_dump(word: str) -> bool:
    """Whether the first word of a command is a file of HLO rather than a recipe."""
    return ".py:" not in word and not word.endswith((".py", ".json")) and Path(word).is_file()


def is_saved(word: str) -> bool:
    """Whether the first word of a command is a forecast's JSON rather than a model's config.json."""
    path = Path(word)
    if path.suffix != ".json" or not path.is_file():
        return False
    from systolic.forecasting.comparison import is_forecast

    try:
        return is_forecast(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return False


def is_table(on: Any, vary: Any, csv: Path | str | None) -> bool:
    """Whether options ask for a table: several slices, several values or a file of CSV."""
    several = not isinstance(on, str | Slice) or (isinstance(on, str) and "," in on)
    return several or bool(vary) or csv is not None


def check_no_table(**values: Any) -> None:
    """Refuses options of one forecast where a table is asked for.

    Raises:
        OptionError: one of ``values`` is given.
    """
    for name, value in values.items():
        if value is not None:
            raise OptionError(
                f"--{name} is of one forecast, and --on and --vary ask for a table; leave it out, or name one slice"
            )


@with_types
def _forecast_of_function(
    function: Any,
    /,
    *args: Any,
    on: Annotated[str | Slice | Sequence[str | Slice], SLICES],
    vary: Annotated[Mapping[str, Any] | Sequence[str] | str | None, VARY] = None,
    csv: Path | str | None = None,
    **options: Any,
) -> "Forecast | ForecastTable":
    """A function on one slice, or on several."""
    from systolic.compiling.traced import name_of
    from systolic.forecasting.function import forecast_function
    from systolic.forecasting.table import ForecastTable, row_of, slices_of

    name = name_of(function)
    if vary:
        raise _no_recipe(vary, name)

    def on_slice(place: Slice) -> "Forecast":
        with working(f"{name} for {place.name}"):
            return forecast_function(function, *args, on=place, **options)

    if not is_table(on, None, csv):
        return on_slice(slices_of(on)[0])
    rows = [row_of(place, {}, lambda place=place: on_slice(place)) for place in slices_of(on)]
    return _written(ForecastTable(name=name, rows=rows), csv)


def _table_of(
    what: Job | JobSource | str,
    on: Any,
    vary: Any,
    settings: StepSettings,
    options: Mapping[str, Any],
) -> "ForecastTable":
    """Forecasts of each combination of slices and of values of the options in ``vary``; all are read before the first compile."""
    from systolic.forecasting.calibrations import calibration_for
    from systolic.forecasting.table import (
        ForecastTable,
        combinations,
        row_of,
        slices_of,
        varied_values,
    )

    varied = varied_values(vary)
    source = source_of(what, options)
    if varied and source.recipe.of_job:
        raise _no_recipe(varied, source.job.name)
    for name in varied:
        if not isinstance(vary, Mapping):
            recipes.option_parts(source.recipe, f"--{name}")
        if dashed(name) in source.given:
            raise OptionError(f"--{name} and --vary {name}=… are both given; leave one of them out")
    places = slices_of(on)
    calibration_for(settings.calibration, places)
    cases = [
        (place, values, with_options(source, values) if values else source)
        for place, values in itertools.product(places, combinations(varied))
    ]

    def row(
        number: int, place: Slice, values: Mapping[str, Any], source: JobSource
    ) -> "ForecastRow":
        words = [f"{name} {value}" for name, value in values.items()]
        title = " ".join([f"[{number}/{len(cases)}] {source.job.name} for {place.name}", *words])
        with working(title):
            return row_of(place, values, lambda: settings.forecast(source, place))

    rows = [row(number, *case) for number, case in enumerate(cases, 1)]
    return ForecastTable(name=source.job.name, rows=rows)


def _no_recipe(vary: Any, name: str) -> OptionError:
    options = ", ".join([vary] if isinstance(vary, str) else vary)
    return OptionError(
        f"vary takes options of a recipe and was given {options} for {name}; give the recipe's name, or forecast one by one"
    )


def _not_forecast(what: Any) -> OptionError:
    from systolic.compiling.restored import made_here

    if type(what).__module__ == "jax._src.stages" and type(what).__name__ == "Lowered":
        return made_here(what)
    return OptionError(
        f"forecast takes a Job, the name of a recipe or a model, or a function, and was given {what!r}; give one"
    )


def _refuse_options_of_a_step(path: str, values: Mapping[str, Any]) -> None:
    parameters = inspect.signature(forecast).parameters
    for name, value in values.items():
        if name not in OF_A_STEP or (value or None) != (parameters[name].default or None):
            raise OptionError(
                f"{path} is a dump, compiled already, and takes no {name}; leave it out"
            )


def _written(table: "ForecastTable", csv: Path | str | None) -> "ForecastTable":
    if csv is not None:
        write_atomically(Path(csv), table.to_csv())
    return table


def _before(
    against: Path | str | Mapping[str, Any] | None, on: Slice, known: "Given | None" = None
) -> Mapping[str, Any] | None:
    """JSON of the forecast that another on a slice is compared with; raises as :func:`~systolic.forecasting.comparison.earlier`."""
    if against is None:
        return None
    from systolic.forecasting.comparison import earlier

    return earlier(against, on, known)


def _compared(result: "Forecast", before: Mapping[str, Any] | None) -> "Forecast":
    """The forecast with what changed since an earlier one."""
    if before is None:
        return result
    from systolic.forecasting.comparison import ForecastChanges

    return replace(result, against=ForecastChanges.of(before, result.to_json()))


@contextmanager
def _kept(folder: Path) -> Generator[Path]:
    """The folder of ``--keep``; without an answer in it, it is left as it was, for the next run."""
    from systolic.capture.program import ANSWER

    was_there = folder.exists()
    _new_folder(folder)
    try:
        yield folder
    finally:
        if not (folder / ANSWER).exists():
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not was_there:
                folder.rmdir()


def _new_folder(folder: Path) -> Path:
    """Makes the folder of ``--keep``."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TakenError(f"{folder} exists; give --keep a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise OptionError(
            f"--keep {folder} can't be written ({error.strerror}); give a folder that can be made"
        ) from error
    return folder


def _assigned(values: Mapping[str, float | str] | Sequence[str], unit: str = "") -> list[str]:
    """``NAME=VALUE`` for each name; numbers have a unit."""
    if not isinstance(values, Mapping):
        return list(values)
    return [
        f"{name}={value}{'' if isinstance(value, str) else unit}" for name, value in values.items()
    ]


def _has_layout(source: JobSource) -> bool:
    """Whether the layout was given rather than left to the server."""
    if source.recipe.of_job and source.job.layout != Layout():
        return True
    return any(name.partition(".")[0] == "layout" for name in source.given)


def _served(cache: ServedCache, axis: ExpertAxis | None, adapters: int) -> Served | None:
    """Format of the cache, split and adapters that were asked for; None where they are those of ``systolic serve``."""
    if cache is ServedCache.plain and axis is None and not adapters:
        return None
    return Served(cache=cache, expert_axis=axis or ExpertAxis.rows, adapters=adapters)
