"""Capacity of a server of a language model on a slice, which ``systolic forecast --serve`` prints."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from systolic.chips import Slice, slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT
from systolic.core.units import Origin, gibibytes, plural
from systolic.forecasting import Forecast, forecast_program
from systolic.forecasting.calibrations import calibration_for, told_of_step, told_of_steps
from systolic.forecasting.cost import ForecastCompile, bill_of
from systolic.forecasting.serving.forecast import (
    LatencyLimits,
    Load,
    ServingForecast,
    ServingPoint,
    StepForecast,
    StepTimes,
    steady,
)
from systolic.forecasting.serving.layout import placed, with_heads_for
from systolic.forecasting.serving.server_steps import (
    BatchSteps,
    Key,
    ServerSteps,
    facts,
    server_steps,
)
from systolic.formats.outline import outlined
from systolic.job import Job, Served
from systolic.job.serving_memory import PADDING_PAGES, ServingMemory
from systolic.models.decoder.config import Decoder
from systolic.recipes.models import is_model
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import NOTHING, Given
from systolic.steps.lengths import check_length, longest_by_files, longest_text

PAGE_SIZE = 64
"""Positions of a page, as ``systolic serve`` has them by default."""
NEAR = 4
"""Ratio of steps that do not fit and that do, between which no other is compiled."""
TRIES = 4
"""Steps that are compiled to find the most texts that fit."""
SPARE = 1.1
"""Texts that would fit by the temporaries of a text, over those of a step that fits, from which one of more is compiled."""
FACTOR = 4
"""Ratio of each concurrency to the one before, where none are given."""


def forecast_serving(  # noqa: PLR0913  the options of systolic forecast --serve
    job: Job,
    on: Slice | str,
    load: Load,
    *,
    concurrency: Sequence[int] = (),
    page_size: int = PAGE_SIZE,
    served: Served | None = None,
    limits: LatencyLimits = LatencyLimits(),  # noqa: B008
    compiler: Compiler | None = None,
    calibration: Calibration | Path | str | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> ServingForecast:
    """Throughput, latency, memory and cost of a server.

    Args:
        job: A language model under the layout that serves it.
        on: The slice, or its name.
        load: Prompt and answer of each request, and the chunks that prompts are read in.
        concurrency: Requests under way, one point each; by default 1, 4, 16 … as many as fit, and these. In place of counts
            without room stands the most that have.
        page_size: Positions of a page of the cache.
        served: Formats of weights and cache, and the use of the expert axis; None as ``systolic serve`` has them.
        limits: Latency that the best point keeps; the most requests that keep it are a point of their own.
        compiler: Flags and effort; by default the flags that jobs on the chip share.
        calibration: Name or file of corrections of the steps' times from profiles of the slice's chip.
        watch: Called with each stage, a few words.

    Raises:
        OptionError: a count below 1, a request longer than the model's positions, the model has no cache, or the calibration
            is of another chip.
        NotFoundError: there is no such calibration.
        LayoutError: the layout does not divide the slice or the model.
        RunError: the model does not generate text, or the compiler failed.
    """
    for name, counts in (("--concurrency", concurrency), ("--page-size", (page_size,))):
        for count in counts:
            if count not in COUNT:
                raise OptionError(f"{name} is {count}; it takes {COUNT}")
    on = slice(on) if isinstance(on, str) else on
    corrections = calibration_for(calibration, [on])
    server = _server(
        job,
        on,
        load,
        page_size=page_size,
        served=served,
        compiler=compiler,
        watch=watch,
    )
    server.limits, server.given = limits, Given(calibration=corrections)
    return server.forecast(concurrency)


@dataclass(frozen=True, kw_only=True)
class ServerTimes:
    """Steps of a server, compiled and priced."""

    forecast: ServingForecast
    """Memory, programs and notes, without points."""
    times: StepTimes
    """Steps of an engine, with the host's work."""
    floor: StepTimes | None
    """The least that its bytes and FLOPs take."""
    room: int
    """Requests at their full length that an engine holds."""


def server_times(
    job: Job,
    on: Slice,
    load: Load,
    rows: Sequence[int],
    *,
    served: Served | None = None,
    compiler: Compiler | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> ServerTimes | ServingForecast:
    """Seconds of a server's steps at numbers of texts of an engine, or the forecast of one that does not fit.

    Args:
        job: A language model under the layout that serves it.
        on: The slice.
        load: The requests.
        rows: Texts of an engine's decode steps, beside one; those without room are cut to the most that have.
        served: As :func:`forecast_serving` takes it.
        compiler: As :func:`forecast_serving` takes it.
        watch: As :func:`forecast_serving` takes it.

    Raises: as :func:`forecast_serving`.
    """
    server = _server(
        job, on, load, page_size=PAGE_SIZE, served=served, compiler=compiler, watch=watch
    )
    return server.measured(rows)


def check_context(job: Job, load: Load, target: str = "") -> None:
    """Refuses texts that ``systolic serve`` would refuse as longer than the model takes.

    Args:
        job: A language model.
        load: The requests.
        target: What the job was made of; of one from files these say which texts it was made for.

    Raises:
        OptionError: the requests are longer, or a field of the files is no number of tokens.
    """
    model = job.model
    if not isinstance(model, Decoder):
        return
    longest = longest_text(job)
    if longest is None and is_model(target):
        longest = longest_by_files(model, outlined(Path(target)).positions)
    options = f"--prompt-tokens {load.prompt_tokens} and --output-tokens {load.output_tokens} are a context of"
    check_length(model, longest, load.tokens, options, "two that make")


def _server(
    job: Job,
    target: Slice,
    load: Load,
    *,
    page_size: int,
    served: Served | None,
    compiler: Compiler | None,
    watch: Callable[[str], None],
) -> "_Server":
    check_context(job, load)
    layout, load = placed(job.layout, target), load.on(target)
    steps = server_steps(replace(job, layout=layout), target, load, page_size, served)
    if isinstance(steps, BatchSteps):
        steps = replace(steps, job=with_heads_for(job, layout, steps.served))
    return _Server(
        job=job,
        axes=", ".join(f"{axis} {n}" for axis, n in layout.mesh_shape.items() if n > 1)
        or "one device",
        on=target,
        load=load,
        page_size=page_size,
        steps=steps,
        compiler=compiler or Compiler(flags=resolved("", target.chip)),
        watch=watch,
    )


@dataclass
class _Server:
    job: Job
    axes: str
    """Mesh axes larger than 1."""
    on: Slice
    load: Load
    page_size: int
    steps: ServerSteps
    compiler: Compiler
    watch: Callable[[str], None]
    limits: LatencyLimits = field(default_factory=LatencyLimits)
    given: Given = NOTHING
    """Corrections of the steps' times."""
    forecasts: dict[Key, Forecast] = field(default_factory=dict)
    refusal: Forecast | None = None
    excess_bytes: int = 0
    """Bytes that the last step which did not fit needs more than a device has."""
    beyond: int | None = None
    """Fewest texts of a replica whose step does not fit, of those that were compiled."""

    def begin(self) -> bool:
        """Compiles what one text needs; returns whether it fits."""
        self.step(1, 1)
        for tokens in self.steps.prompts:
            self.step(1, tokens)
        return self.refusal is None and self.memory().num_pages > 0

    def measured(self, rows: Sequence[int]) -> ServerTimes | ServingForecast:
        """See :func:`server_times`."""
        if not self.begin():
            return self.rejected()
        room = self.memory().concurrency(self.load.tokens) // self.steps.replicas
        if not room:
            return self.answer(self.memory(), (), ())
        wanted = min(max(rows), room)
        most = self.find_room(room) if wanted > self.room_beside(room) else wanted
        for count in held(rows, most):
            self.step(count, 1)
        self.narrow()
        memory, device = self.memory(), self.times(lambda forecast: forecast.step_seconds)
        assert device is not None
        # Steps of more texts than were compiled take more temporaries.
        held_most = memory.concurrency(self.load.tokens) // self.steps.replicas
        return ServerTimes(
            forecast=self.answer(memory, (), ()),
            times=replace(device, host=self.load.host_seconds or 0.0),
            floor=self.times(floor_seconds),
            room=min(held_most, max(self.room_beside(held_most), self.fitting())),
        )

    def forecast(self, wanted: Sequence[int]) -> ServingForecast:
        ways = self.steps.replicas
        if not self.begin():
            return self.rejected()
        most = self.memory().concurrency(self.load.tokens)
        if not wanted or max(wanted) > (rough := self.room_beside(most // ways) * ways):
            most = self.find_room(most // ways) * ways
        else:
            most = rough
        counts = sorted(set(wanted)) if wanted else ladder(most)
        for count in held(counts, most):
            self.step(-(-count // ways), 1)
        self.narrow()
        # The steps of many texts have temporaries of their own, which take room from pages.
        memory = self.memory()
        most = memory.concurrency(self.load.tokens)
        refused = [count for count in counts if count > most] if wanted else []
        points = [self.point(count) for count in held(counts, most)]
        if self.limits.given and (within := self.most_within(most, points)) is not None:
            each = {point.concurrency: point for point in (*points, within)}
            points = [each[count] for count in sorted(each)]
        return self.answer(memory, points, refused)

    def room_beside(self, most: int) -> int:
        """Most texts of a replica, up to ``most``, whose pages fit beside weights and the temporaries of a step of so many."""
        memory = self.memory()
        pages = memory.pages_of(self.load.tokens)

        def fits(rows: int) -> bool:
            needs = max(memory.temporary_bytes, self.steps.least_temporary_bytes(rows))
            held = memory.weights_bytes + needs + (rows * pages + PADDING_PAGES) * memory.page_bytes
            return held <= memory.capacity_bytes

        return bisect_left(range(1, most + 1), True, key=lambda rows: not fits(rows))

    def find_room(self, most: int) -> int:
        """Compiles the step of as many texts of a replica as fit, in a few tries; returns their number."""
        rows = self.room_beside(most)
        for _ in range(TRIES):
            if rows < 2:
                return max(rows, 1)
            self.step(rows, 1)
            if (rows, 1) in self.forecasts:
                return self.grown(rows)
            each = self.memory().pages_of(self.load.tokens) * self.memory().page_bytes
            rows -= 1 + -(-self.excess_bytes // (each + self.steps.least_temporary_bytes(1)))
        return max(rows, 1)

    def grown(self, rows: int) -> int:
        """Compiles a step of more texts where one that fits leaves room, by its temporaries of a text; returns what fits."""
        memory, key = self.memory(), (rows, 1)
        each = memory.pages_of(self.load.tokens) * memory.page_bytes
        each += self.steps.temporary_bytes(key, self.forecasts[key]) / rows
        free = memory.capacity_bytes - memory.weights_bytes - PADDING_PAGES * memory.page_bytes
        more = int(free / each)
        if more < SPARE * rows or (self.beyond is not None and more >= self.beyond):
            return rows
        self.step(more, 1)
        return more if (more, 1) in self.forecasts else rows

    def most_within(self, most: int, points: Sequence[ServingPoint]) -> ServingPoint | None:
        """The most requests at once whose latency keeps the limits; None where none do, or where more are limited by room alone."""
        if not points or not self.limits.kept(first := self.point(1)):
            return None
        low, high, best = 1, most + 1, first
        while high - low > 1:
            middle = (low + high) // 2
            point = self.point(middle)
            if self.limits.kept(point):
                low, best = middle, point
            else:
                high = middle
        return best

    def step(self, rows: int, tokens: int) -> None:
        """Forecasts a step of so many texts a replica."""
        if (rows, tokens) in self.forecasts or self.refusal is not None:
            return
        many = rows * self.steps.replicas
        what = plural(many, "row") if tokens == 1 else f"{tokens} tokens of a prompt"
        forecast = forecast_program(
            self.steps.program((rows, tokens)),
            self.job.name,
            self.on,
            compiler=self.compiler,
            say=lambda stage: self.watch(f"{what}: {stage}"),
            given=self.given,
        )
        if (
            forecast.fits
            and forecast.step_seconds is not None
            and self.chooses((rows, tokens), forecast)
        ):
            self.forecasts[rows, tokens] = forecast
        elif rows == 1:
            self.refusal = forecast
        else:
            self.beyond = min(rows, self.beyond or rows)
            if not forecast.fits:
                self.excess_bytes = max(forecast.need_bytes - forecast.capacity_bytes, 0)

    def chooses(self, key: Key, forecast: Forecast) -> bool:
        """Whether what a step leaves on the device has room beside the weights, the choice of its tokens included."""
        if key[0] == 1:
            return True
        beside = self.steps.temporary_bytes(key, forecast) + self.steps.page_bytes(forecast)
        self.excess_bytes = self.steps.weights_bytes(forecast) + beside - forecast.capacity_bytes
        return self.excess_bytes <= 0

    def fitting(self) -> int:
        """Most texts of a replica whose step was compiled and fits."""
        return max(rows for rows, tokens in self.forecasts if tokens == 1)

    def narrow(self) -> None:
        """Compiles steps between the largest that fits and the least that does not, until these are near."""
        while self.beyond is not None and self.beyond > NEAR * self.fitting():
            self.step(math.isqrt(self.beyond * self.fitting()), 1)

    def memory(self) -> ServingMemory:
        """The table, of the programs that were compiled."""
        decode = self.forecasts[1, 1]
        page = self.steps.page_bytes(decode)
        if not page:
            raise OptionError(
                f"{self.job.name} keeps no keys and values between tokens; forecast its eval step instead"
            )
        needs = (
            self.steps.temporary_bytes(key, forecast) for key, forecast in self.forecasts.items()
        )
        return ServingMemory(
            capacity_bytes=decode.capacity_bytes,
            weights_bytes=self.steps.weights_bytes(decode),
            temporary_bytes=max(needs),
            page_bytes=page,
            page_size=self.page_size,
            adapters_bytes=int(facts(decode).adapters_bytes),
            replicas=self.steps.replicas,
            most_rows=None if self.beyond is None else self.fitting(),
            origin=decode.memory_origin,
        )

    def point(self, count: int) -> ServingPoint:
        busy = min(count, self.steps.replicas)
        device, least = (
            self.times(lambda forecast: forecast.step_seconds),
            self.times(floor_seconds),
        )
        assert device is not None
        real = replace(device, host=self.load.host_seconds or 0.0)
        requests = count / busy
        return ServingPoint(
            concurrency=count,
            state=steady(self.load, real, requests),
            replicas=busy,
            floor=None if least is None else steady(self.load, least, requests),
            host_after=steady(self.load, replace(real, host_after=True), requests)
            if self.load.host_seconds
            else None,
            load=self.load,
            usd_per_hour=bill_of(self.on).usd_per_hour,
        )

    def times(self, seconds: Callable[[Forecast], float | None]) -> StepTimes | None:
        """Seconds of a replica's steps by a rule; None where it knows none."""
        by_key = {
            key: known for key, forecast in self.forecasts.items() if (known := seconds(forecast))
        }
        if len(by_key) < len(self.forecasts):
            return None
        return StepTimes(
            decode={rows: by_key[rows, tokens] for rows, tokens in self.forecasts if tokens == 1},
            chunk=self.steps.chunk_seconds(by_key),
        )

    def answer(
        self, memory: ServingMemory, points: Sequence[ServingPoint], refused: Sequence[int]
    ) -> ServingForecast:
        steps = [
            self.described(key) for key in sorted(self.forecasts, key=lambda key: (key[1], key[0]))
        ]
        first = next(iter(self.forecasts.values()))
        notes = self.steps.notes()
        if self.beyond is not None:
            many, most = self.beyond * self.steps.replicas, self.fitting() * self.steps.replicas
            notes.append(
                f"a step of {many:,} texts needs more memory than a device has, with their logits and activations alone; {most:,} fit"
            )
        timelines = [forecast.timeline for forecast in self.forecasts.values() if forecast.timeline]
        notes += [f"{text}; the floors are not" for text in told_of_steps(timelines)]
        for forecast in self.forecasts.values():
            known = forecast.timeline is not None and forecast.low is not None
            own = told_of_step(forecast.timeline, forecast.low, forecast.high) if known else []
            said = (*forecast.cautions, *forecast.warnings, *forecast.notes)
            notes += [note for note in said if note not in notes and note not in own]
        return ServingForecast(
            name=self.job.name,
            on=self.on,
            load=self.load,
            layout=self.axes,
            program=self.steps.name,
            attention=facts(first).attention,
            origin=first.origin,
            memory=memory,
            steps=steps,
            points=points,
            refused=refused,
            limits=self.limits,
            bill=bill_of(self.on),
            calibration=first.calibration,
            compiler=ForecastCompile(
                versions={
                    name: first.compiler.versions[name]
                    for name in ("jax", "libtpu")
                    if name in first.compiler.versions
                },
                flags=first.compiler.flags,
            ),
            notes=notes,
        )

    def described(self, key: tuple[int, int]) -> StepForecast:
        rows, tokens = key
        forecast = self.forecasts[key]
        return StepForecast(
            rows=rows * self.steps.replicas,
            tokens=tokens,
            context=self.steps.context(tokens),
            seconds=forecast.step_seconds or 0.0,
            floor_seconds=floor_seconds(forecast),
        )

    def rejected(self) -> ServingForecast:
        """Without a point: what one text needs does not fit."""
        if self.refusal is None:
            return self.answer(self.memory(), (), ())
        forecast = self.refusal
        if forecast.fits:
            raise OptionError(
                f"{self.on.name} has no rates in the catalogue, so that no step has a time; forecast for another slice"
            )
        kinds: Mapping[str, int] = forecast.memory.by_kind if forecast.memory else {}
        need = forecast.need_bytes
        weights = min(kinds.get("parameters", 0), need)
        memory = ServingMemory(
            capacity_bytes=forecast.capacity_bytes,
            weights_bytes=weights,
            temporary_bytes=need - weights,
            page_bytes=1,
            page_size=self.page_size,
            pages=0,
            replicas=self.steps.replicas,
            origin=Origin.compiled,
        )
        return ServingForecast(
            name=self.job.name,
            on=self.on,
            load=self.load,
            layout=self.axes,
            program=self.steps.name,
            origin=Origin.compiled,
            memory=memory,
            bill=bill_of(self.on),
            notes=[
                f"a step needs {gibibytes(need)} of {gibibytes(forecast.capacity_bytes)}; split the weights further with --layout.tensor, or take a larger slice",
            ],
        )


def held(counts: Sequence[int], most: int) -> list[int]:
    """Counts that have room, and the room itself in the place of those that are above it."""
    return sorted({min(count, most) for count in counts if most})


def ladder(most: int) -> list[int]:
    """Concurrencies to forecast where so many requests fit: 1, 4, 16 …, and ``most``."""
    counts = [FACTOR**power for power in range(max(most, 1).bit_length()) if FACTOR**power < most]
    return [*counts, most] if most else []


def floor_seconds(forecast: Forecast) -> float | None:
    """Seconds that a serving step's bytes and FLOPs take at the chip's peak rates: the bandwidth floor; None without rates.

    Bytes of a decode step are those of the weights it reads and of the keys and values of its rows; a prompt
    has no keys and values to read.
    """
    known, chip = facts(forecast), forecast.on.chip
    if chip.hbm_bytes_per_second is None:
        return None
    rate = chip.hbm_bytes_per_second / (chip.devices_per_chip or 1)
    cache = known.cache_bytes if known.verb == "decode" else 0.0
    moving = (known.weight_bytes + cache) / rate
    peak = chip.peak_bf16_flops_per_second or math.inf
    if known.int8_products:
        peak = max(peak, chip.peak_int8_ops_per_second or peak)
    computing = (forecast.model_flops or 0.0) / (peak * forecast.on.num_chips)
    return max(moving, computing)
