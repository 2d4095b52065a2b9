"""``systolic plan serve`` and :func:`systolic.plan_serving`: slices, layouts and replicas that serve a demand at the least cost."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from systolic.chips import SLICES, Slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler
from systolic.core.arguments import PYTHON, Required, Wording, command_of, explained_by
from systolic.core.errors import LayoutError, OptionError, SystolicError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from systolic.core.reporter import reporter, working
from systolic.core.units import duration, gibibytes, plural
from systolic.forecasting.command import FLAGS, forecast_server
from systolic.forecasting.serving.capacity import ServerTimes, check_context, server_times
from systolic.forecasting.serving.demand import Demand, Fleet, fleet
from systolic.forecasting.serving.forecast import (
    LatencyLimits,
    Load,
    ServingForecast,
    StepTimes,
    latency,
)
from systolic.forecasting.serving.server_steps import LeastServer, with_formats
from systolic.job import Job, Layout, Served, ServedCache, ServedWeights
from systolic.models.decoder.checks import check_served
from systolic.models.decoder.config import Decoder
from systolic.models.families import find_published
from systolic.planning.command import all_slices, plan, slices_of
from systolic.planning.goal import MAX_CHIPS, PriceTerm, hourly
from systolic.recipes.jobs import JobSource, source_of
from systolic.report.notebook import notebook_html

ROWS = 16
"""Texts at once of ``systolic serve``, where a plan has fewer."""
DIR = "DIR"
"""Folder of the weights in a command, where a plan knows the model's sizes alone."""
USAGE = """usage: systolic plan serve MODEL --on SLICES --requests-per-second N [options]

MODEL is a published model that systolic recipes lists (llama-3.1-8b), a config.json, a Hugging Face folder or a
Bundle; weights are not needed. For each slice: engines and how the devices of each are split, the requests that an
engine takes within --ttft and --tpot, replicas, dollars per hour and per million tokens, headroom. Layouts are ranked
by lower bounds of their steps, and compiled best first until no bound is below the cheapest. Compiles are kept.
SLICES is a list: v6e-8,v5e-8; v6e stands for the slices of that chip that are one machine, as systolic serve needs
them, or for larger slices if no machine holds the model; any for those of all TPUs.

Exits with 1 when no slice takes the demand."""
CANDIDATES = 6
"""Layouts that are compiled, those of the least floors."""
LAYOUTS = 3
"""Layouts of one slice that may be compiled."""
ROUNDS = 3
"""Times that a candidate's steps are compiled, each with the rows that the one before led to."""
BEYOND = 1.1
"""Rows over those of the largest step that was compiled, up to which its seconds go on along a line."""
PARTS = 4
"""Rows that are compiled first over those at the floor: longer steps hold more texts. A mixture's steps are compiled at a part of the rows too: the experts that are read grow less than the rows."""
MOST_CHIPS = 100_000
"""Chips of a plan at the floors of its steps, at most: more than one place has, and their steps need no compile to say so."""
HOSTS = "{}, and systolic serve takes the devices of one machine"


@dataclass(frozen=True, kw_only=True)
class ServingCandidate:
    """A layout of engines on a slice."""

    on: Slice
    layout: Layout
    least: Fleet
    """Replicas at the floors of the steps."""
    compiled: Fleet | None = None
    """Replicas at the steps that were compiled; None where none were."""
    room: int = 0
    """Requests that an engine holds, by its compiled steps."""
    quick: bool = True
    """Whether the compiles ended at the schedule."""
    forecast: ServingForecast | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """``v6e-8: 2 engines of tensor 4``."""
        axes = [(axis, getattr(self.layout, axis)) for axis in ("tensor", "expert")]
        split = " ".join(f"{axis} {ways}" for axis, ways in axes if ways > 1) or "one device"
        return f"{self.on.name}: {plural(self.layout.data, 'engine')} of {split}"

    @property
    def options(self) -> str:
        """Options of ``systolic serve`` that give this layout, and texts as long and as many as were planned for."""
        words = [f"--layout.data {self.layout.data}", f"--layout.tensor {self.layout.tensor}"]
        words += [f"--layout.expert {self.layout.expert}"] if self.layout.expert > 1 else []
        load = self.fleet.demand.load
        words += [
            f"--rows {min(max(self.most_texts, ROWS), max(self.room, 1))}",
            f"--context {load.tokens}",
            f"--chunk {load.chunk}",
        ]
        return " ".join(words)

    @property
    def most_texts(self) -> int:
        """Texts of an engine under way at once in 99 % of the time, one at least."""
        return max(math.ceil(self.fleet.state.most_requests), 1)

    @property
    def fleet(self) -> Fleet:
        """Fleet by the compiled steps, else by the floors."""
        return self.compiled or self.least

    @property
    def chips(self) -> int:
        """Chips of all replicas."""
        return self.fleet.replicas * self.on.num_chips

    @property
    def cost(self) -> tuple[float, float]:
        """Dollars an hour and chips; without a price last."""
        usd = self.fleet.usd_per_hour
        # Replicas of a small slice and one large slice cost the same up to rounding.
        return (float("inf") if usd is None else round(usd, 6)), float(self.chips)

    @property
    def order(self) -> tuple[float, float, float]:
        """Cheapest first, of equal dollars and chips the one with the most headroom. At the floors it is a bound: no compiled step comes earlier."""
        return *self.cost, -self.fleet.headroom

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        forecast = self.forecast
        return {
            "slice": self.on.name,
            "layout": {axis: getattr(self.layout, axis) for axis in ("data", "tensor", "expert")},
            "chips": self.chips,
            "room_per_engine": self.room,
            **self.fleet.to_json(),
            "compiled": self.compiled is not None,
            "quick": self.quick,
            "floor": self.least.to_json(),
            "memory": None if forecast is None else forecast.memory.to_json(),
            "steps": [] if forecast is None else [step.to_json() for step in forecast.steps],
            "notes": [] if forecast is None else list(forecast.notes),
        }


@dataclass(frozen=True, kw_only=True)
class ServingRejection:
    """A slice, or a layout of it, that does not take the demand, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """The ranked ways to serve a demand."""

    name: str
    demand: Demand
    price: PriceTerm
    ranked: Sequence[ServingCandidate]
    """Compiled ones, cheapest first, of equals the one with the most headroom."""
    rejected: Sequence[ServingRejection]
    uncompiled: Sequence[ServingCandidate] = ()
    """Known by their floors alone, cheapest first."""
    weights: str = ServedWeights.plain.value
    cache: str = ServedCache.plain.value
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        """The best candidate on one line; a candidate itself has every step."""
        best = self.best
        answer = (
            "nothing takes the demand" if best is None else f"{best.fleet.replicas:,} x {best.name}"
        )
        return f"<ServingPlan of {self.name}: {answer}; {len(self.ranked)} ranked, {len(self.rejected)} rejected>"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def commands(self) -> list[str]:
        """Commands that fetch the model where it is a published one, quantize it as planned, and serve it; none without a best candidate."""
        if self.best is None:
            return []
        path, commands = Path(self.name), []
        folder = path.parent if path.suffix == ".json" else path
        if not path.exists():
            known = find_published(self.name)
            folder = Path(DIR if known is None else known.name)
            if known is not None:
                commands.append(f"hf download {known.hub} --local-dir {known.name}")
        words = shlex.quote(str(folder))
        if self.weights != ServedWeights.plain.value:
            stem = folder if folder.name else folder.resolve().name
            quantized = shlex.quote(f"{stem}-{self.weights}")
            scales = " --calibrate TEXT" if self.weights == ServedWeights.w8a8.value else ""
            commands.append(
                f"systolic quantize {words} --to {self.weights} --out {quantized}{scales}"
            )
            words = quantized
        cache = "" if self.cache == ServedCache.plain.value else f" --kv-dtype {self.cache}"
        return [*commands, f"systolic serve {words} {self.best.options}{cache}"]

    @property
    def best(self) -> ServingCandidate | None:
        """The cheapest, None where nothing takes the demand."""
        return self.ranked[0] if self.ranked else None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        demand = self.demand
        return {
            "model": self.name,
            "requests_per_second": demand.requests_per_second,
            "prompt_tokens": demand.load.prompt_tokens,
            "output_tokens": demand.load.output_tokens,
            "time_to_first_token_seconds": demand.limits.first_token_seconds,
            "time_per_output_token_seconds": demand.limits.token_seconds,
            "price": self.price.value,
            "weights": self.weights,
            "kv_dtype": self.cache,
            "ranked": [candidate.to_json() for candidate in self.ranked],
            "uncompiled": [candidate.to_json() for candidate in self.uncompiled],
            "rejected": [
                {"name": rejection.name, "reason": rejection.reason} for rejection in self.rejected
            ],
            "commands": self.commands,
            "notes": list(self.notes),
            "target": self.name,
        }


@command_of
@explained_by(forecast_server, plan)
def plan_serving(  # noqa: PLR0913  the options of systolic plan serve
    job: Annotated[Job | JobSource | str, Wording("a Job or the name of a model or a recipe")],
    *,
    on: Annotated[
        str | Slice | Sequence[str | Slice],
        SLICES,
        Required("slices; add --on v6e-8,v5e-8, --on v6e, or --on any"),
    ],
    requests_per_second: Annotated[
        float, POSITIVE, Required("the demand; add --requests-per-second 100")
    ],
    prompt_tokens: Annotated[int, COUNT] = 1024,
    output_tokens: Annotated[int, COUNT] = 256,
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    price: PriceTerm = PriceTerm.on_demand,
    weights: ServedWeights = ServedWeights.plain,
    kv_dtype: ServedCache = ServedCache.plain,
    chunk: Annotated[int, COUNT] = 256,
    host_ms: Annotated[float | None, NOT_NEGATIVE] = None,
    max_chips: Annotated[int, COUNT] = MAX_CHIPS,
    candidates: Annotated[int, COUNT] = CANDIDATES,
    finalists: Annotated[int, NOT_NEGATIVE] = 1,
    flags: Annotated[str | Sequence[str], FLAGS] = "",
    compiler: Annotated[Compiler | None, PYTHON] = None,
    target: Annotated[str, PYTHON] = "",
    **options: Any,
) -> ServingPlan:
    """Plans slices, layouts and replicas that serve a demand, cheapest first, without the hardware.

    Args:
        on: Slices, chips (their slices of one machine) or any, with commas: v6e-8,v5e.
        requests_per_second: Mean rate of requests, which arrive at random.
        ttft: Limit of the time to the first token for 99 % of the requests, including the wait for other prompts: 500ms, 1s.
        tpot: Limit of the mean time of each further token: 50ms.
        price: Which price of the catalogue: on-demand, spot or committed.
        host_ms: Milliseconds of the host's work for each step; by default as measured, 1.2 beside TPUs and 0.2 beside GPUs.
        candidates: Layouts to compile up to the schedule, those with the lowest bounds.
        finalists: Number of the best that get a full compile.
        compiler: Where compiles are kept; its flags are those of each slice.
        target: What a Job was made of: a quantized Bundle has formats of its own.
        options: Options of the recipe that ``job`` names.

    Raises:
        OptionError: an option does not parse or is out of its range, or the model is no language model.
        NotFoundError: a name that is neither a slice nor a chip.
    """
    source = source_of(job, options)
    model_job = source.job
    name = target or (model_job.name if source.recipe.of_job else source.recipe.target)
    if not isinstance(model_job.model, Decoder):
        raise OptionError(
            f"{name} is no language model; plan serve takes a decoder such as llama-3.1-8b"
        )
    resolved(flags, None)  # its words, before anything takes time
    load = Load(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunk=chunk,
        host_seconds=None if host_ms is None else host_ms / 1e3,
    )
    check_context(model_job, load, name)
    limits = LatencyLimits(
        first_token_seconds=latency(ttft, "--ttft"), token_seconds=latency(tpot, "--tpot")
    )
    search = _ServingSearch(
        name=name,
        job=with_formats(model_job, name, weights),
        demand=Demand(requests_per_second=requests_per_second, load=load, limits=limits),
        price=price,
        cache=kv_dtype,
        flags=flags,
        compiler=compiler or Compiler(),
    )
    with working(model_job.name):
        plan = search.run(*_slices(on, max_chips, price), candidates, finalists)
    return replace(plan, weights=weights.value, cache=kv_dtype.value)


def _slices(
    on: str | Slice | Sequence[str | Slice], max_chips: int, price: PriceTerm
) -> tuple[list[Slice], list[Slice]]:
    """The slices that were named, with those of one machine of a chip or ``any``; and these chips' slices of several machines.

    Raises:
        OptionError: none of them is one of TPUs.
    """
    named: dict[str, Slice] = {}
    larger: dict[str, Slice] = {}
    parts = [on] if isinstance(on, str | Slice) else on
    for part in parts:
        words = part.split(",") if isinstance(part, str) else [part]
        for word in (w for w in words if not isinstance(w, str) or w.strip()):
            meant = all_slices(word, max_chips, price)
            small = [place for place in meant if one_machine(place) or len(meant) == 1]
            named |= {place.name: place for place in small}
            larger |= {place.name: place for place in meant if place not in small}
    if not named and not larger:
        return slices_of("", max_chips, price), []
    every = [*named.values(), *larger.values()]
    if all(place.platform != "tpu" for place in every):
        names = ", ".join(place.name for place in every)
        raise OptionError(
            f"--on is {names}, and plan serve is for slices of TPUs: give v6e-8,v5e-8, a chip such as v6e, or any; systolic forecast --serve takes {names}"
        )
    return list(named.values()), list(larger.values())


def one_machine(on: Slice) -> bool:
    """Whether its chips can be rented in one machine, as ``systolic serve`` needs them."""
    return on.num_slices == 1 and on.num_chips <= (on.chip.chips_per_host or 1)


@dataclass
class _ServingSearch:
    name: str
    job: Job
    demand: Demand
    price: PriceTerm
    cache: ServedCache
    flags: str | Sequence[str]
    compiler: Compiler
    rejected: list[ServingRejection] = field(default_factory=list)

    def run(
        self, slices: Sequence[Slice], larger: Sequence[Slice], candidates: int, finalists: int
    ) -> ServingPlan:
        """The plan; ``larger`` are analysed where no slice of one machine of their chip takes the demand."""
        every = [candidate for on in slices for candidate in self.analysed(on)]
        taking = {candidate.on.chip.name for candidate in every}
        every += [
            candidate
            for on in larger
            if on.chip.name not in taking
            for candidate in self.analysed(on)
        ]
        every.sort(key=lambda candidate: candidate.order)
        kept = self.promising(every)
        done: list[ServingCandidate] = []
        tried: list[ServingCandidate] = []
        for candidate in kept:
            best = min((other.order for other in done), default=None)
            # A floor is a bound: what is dearer at its floor than another compiled is dearer, and at equal dollars has no more headroom.
            if len(tried) >= candidates or (best is not None and candidate.order >= best):
                break
            tried.append(candidate)
            reporter().stage(f"{len(tried)}/{min(candidates, len(kept))} {candidate.name}")
            if (compiled := self.compiled(candidate, quick=True)) is not None:
                done.append(compiled)
        done.sort(key=lambda candidate: candidate.order)
        done = self.settled(done, finalists)
        left = [
            candidate for candidate in every if not any(_same(candidate, other) for other in tried)
        ]
        return ServingPlan(
            name=self.name,
            demand=self.demand,
            price=self.price,
            ranked=done,
            rejected=self.rejected,
            uncompiled=left,
            notes=self.notes(done),
        )

    def settled(self, done: list[ServingCandidate], finalists: int) -> list[ServingCandidate]:
        """The candidates with a full compile of the best, until the best has one."""
        for _ in range(finalists):
            first = next((candidate for candidate in done[:finalists] if candidate.quick), None)
            if first is None:
                break
            reporter().stage(f"full compile of {first.name}")
            full = self.compiled(first, quick=False)
            done = [candidate for candidate in done if candidate is not first] + (
                [full] if full else []
            )
            done.sort(key=lambda candidate: candidate.order)
        return done

    def promising(self, every: Sequence[ServingCandidate]) -> list[ServingCandidate]:
        """Candidates by their floors' cost, few of each slice."""
        taken: dict[str, int] = {}
        kept = []
        for candidate in every:
            taken[candidate.on.name] = taken.get(candidate.on.name, 0) + 1
            if taken[candidate.on.name] <= LAYOUTS:
                kept.append(candidate)
        return kept

    def reject(self, name: str, reason: str) -> None:
        """Keeps a reason."""
        self.rejected.append(ServingRejection(name=name, reason=reason))

    def analysed(self, on: Slice) -> list[ServingCandidate]:
        """The layouts of a slice whose floors keep the demand's limits."""
        if on.platform != "tpu":
            self.reject(
                on.name, "plan serve is for TPU slices; systolic forecast --serve has others"
            )
            return []
        candidates: list[ServingCandidate] = []
        reasons: dict[str, str] = {}
        fewest = 0
        for layout in self.layouts(on):
            least = LeastServer(
                job=self.job, on=on, load=self.demand.load, layout=layout, cache=self.cache
            )
            each = layout.tensor * layout.expert
            if not least.room:
                need, have = gibibytes(least.weight_bytes()), gibibytes(least.capacity_bytes)
                over = "one device" if each == 1 else f"each of {plural(each, 'device')}"
                reasons["room"] = (
                    f"{need} of weights on {over} leave no room for a request of {self.demand.load.tokens:,} tokens in {have}"
                )
                continue
            replicas = self.fleet(on, layout, least.times(), least.room, floor=True)
            if replicas is None:
                reasons["latency"] = self.too_slow(least)
                continue
            candidate = ServingCandidate(on=on, layout=layout, least=replicas, room=least.room)
            if candidate.chips > MOST_CHIPS:
                fewest = min(fewest or candidate.chips, candidate.chips)
                reasons["chips"] = self.too_many(fewest)
                continue
            candidates.append(candidate)
        if not candidates:
            fallback = "no tensor or expert axis of its devices divides the model"
            why = next(
                (reasons[what] for what in ("chips", "latency", "room") if what in reasons), ""
            )
            self.reject(on.name, why or fallback)
        return candidates

    def too_many(self, chips: int) -> str:
        """Why a demand is beyond what is planned for, at the floors of the steps."""
        rate = self.demand.requests_per_second
        verb = " a second takes" if rate == 1 else "s a second take"
        return f"{rate:,g} request{verb} {plural(chips, 'chip')} at the least, and a plan has up to {MOST_CHIPS:,}; check --requests-per-second, or plan a part of it"

    def too_slow(self, least: LeastServer) -> str:
        """Why not even one request keeps the limits, at the floors of the steps."""
        times, load = least.times(), self.demand.load
        first = load.chunks * times.chunk
        return f"above the limits of {self.demand.limits} even at the floor: {duration(first)} for the prompt alone, {duration(times.decode_seconds(1))} per token"

    def layouts(self, on: Slice) -> list[Layout]:
        """Engines of equal size on all devices, split over a tensor axis and, of a mixture, an expert axis."""
        layouts = []
        model, devices = self.job.model, on.num_devices
        assert isinstance(model, Decoder)
        for each in (n for n in range(1, devices + 1) if devices % n == 0):
            experts = [n for n in range(1, each + 1) if each % n == 0] if model.experts > 1 else [1]
            for expert in experts:
                layout = Layout(data=devices // each, fsdp=1, tensor=each // expert, expert=expert)
                try:
                    check_served(model, layout)
                except LayoutError:
                    continue
                layouts.append(layout)
        return layouts

    def fleet(
        self, on: Slice, layout: Layout, times: StepTimes, room: int, *, floor: bool = False
    ) -> Fleet | None:
        """The replicas that take the demand with these steps, simulated unless a ``floor`` is enough."""
        return fleet(
            self.demand,
            times,
            room=room,
            engines=layout.data,
            usd_per_hour=hourly(on, self.price),
            floor=floor,
        )

    def compiled(self, candidate: ServingCandidate, *, quick: bool) -> ServingCandidate | None:
        """The candidate by its compiled steps; None where they do not take the demand."""
        rows = self.rows(candidate)
        for _ in range(ROUNDS):
            server = self.timed(candidate, rows, quick=quick)
            if server is None:
                return None
            replicas = self.fleet(candidate.on, candidate.layout, server.times, server.room)
            if replicas is None:
                alone = server.times.decode_seconds(1)
                prompt = self.demand.load.chunks * (alone + server.times.chunk)
                self.reject(
                    candidate.name,
                    f"above the limits of {self.demand.limits}: {duration(prompt)} for a prompt alone, {duration(alone)} per token",
                )
                return None
            most = max(round(replicas.at_most.decode_rows), 1)
            if most <= BEYOND * max(server.times.decode) or most <= max(rows):
                break
            # Beyond the steps that were compiled their seconds would be a guess.
            rows = [*rows, most]
        return replace(
            candidate, compiled=replicas, room=server.room, quick=quick, forecast=server.forecast
        )

    def timed(
        self, candidate: ServingCandidate, rows: Sequence[int], *, quick: bool
    ) -> ServerTimes | None:
        """Steps of a candidate; None where they do not compile or do not fit."""
        compiler = replace(self.compiler, flags=resolved(self.flags, candidate.on.chip))
        plain = self.cache is ServedCache.plain
        try:
            server = server_times(
                replace(self.job, layout=candidate.layout),
                candidate.on,
                self.demand.load,
                rows,
                served=None if plain else Served(cache=self.cache),
                compiler=compiler.quick() if quick else compiler,
                watch=lambda stage: reporter().stage(f"{candidate.name}, {stage}"),
            )
        except SystolicError as error:
            self.reject(candidate.name, str(error))
            return None
        if isinstance(server, ServerTimes):
            return server
        memory = server.memory
        need = gibibytes(memory.weights_bytes + memory.temporary_bytes)
        self.reject(
            candidate.name,
            f"weights and temporaries of {need} leave no room in {gibibytes(memory.capacity_bytes)}",
        )
        return None

    def rows(self, candidate: ServingCandidate) -> list[int]:
        """Rows of the steps to compile first: some times those of the floor at its most, and of a mixture some between."""
        state = candidate.least.state
        least = state.decode_rows * candidate.least.most_rate / state.requests_per_second
        most = max(min(round(PARTS * least), candidate.room), 1)
        model = self.job.model
        assert isinstance(model, Decoder)
        between = [most // PARTS] if model.experts > 1 and most // PARTS > 1 else []
        return [*between, most]

    def notes(self, done: Sequence[ServingCandidate]) -> list[str]:
        """Notes on the plan as a whole."""
        notes = [
            f"{candidate.on.name} has {HOSTS.format(plural(candidate.on.num_hosts, 'host'))}"
            for candidate in done
            if not one_machine(candidate.on)
        ]
        unpriced = {candidate.on.name for candidate in done if candidate.fleet.usd_per_hour is None}
        notes += [f"{name} has no price {self.price.value}; it is ranked last" for name in unpriced]
        return list(dict.fromkeys(notes))


def _same(candidate: ServingCandidate, other: ServingCandidate) -> bool:
    return candidate.on == other.on and candidate.layout == other.layout
