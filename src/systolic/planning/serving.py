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
from systolic.core.arguments import PYTHON, Required, Wording, command_of
from systolic.core.errors import LayoutError, OptionError, SystolicError
from systolic.core.notebook import notebook_html
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE
from systolic.core.reporter import reporter, working
from systolic.core.units import duration, gibibytes, plural
from systolic.forecasting.serving.capacity import ServerTimes, check_context, server_times
from systolic.forecasting.serving.demand import Demand, Fleet, fleet
from systolic.forecasting.serving.forecast import (
    LatencyLimits,
    Load,
    ServingForecast,
    StepTimes,
    latency,
)
from systolic.forecasting.serving.steps import LeastServer, with_formats
from systolic.job import Job, Layout, Served, ServedCache, ServedWeights
from systolic.models.decoder.checks import check_served
from systolic.models.decoder.config import Decoder
from systolic.models.published import find_published
from systolic.planning.goal import MAX_CHIPS, PriceTerm, hourly
from systolic.planning.slices import all_slices, slices_of
from systolic.recipes.jobs.source import JobSource, source_of

ROWS = 16
"""Texts at once of ``systolic serve``, where a plan has fewer."""


@dataclass(frozen=True, kw_only=True)
class ServingCandidate:
    """A layout of engines on a slice."""

    on: Slice
    layout: Layout
    least: Fleet
    """Replicas at the floors of the steps."""
    made: Fleet | None = None
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
        return self.made or self.least

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
        made = self.forecast
        return {
            "slice": self.on.name,
            "layout": {axis: getattr(self.layout, axis) for axis in ("data", "tensor", "expert")},
            "chips": self.chips,
            "room_per_engine": self.room,
            **self.fleet.to_json(),
            "compiled": self.made is not None,
            "quick": self.quick,
            "floor": self.least.to_json(),
            "memory": None if made is None else made.memory.to_json(),
            "steps": [] if made is None else [one.to_json() for one in made.steps],
            "notes": [] if made is None else list(made.notes),
        }


@dataclass(frozen=True, kw_only=True)
class ServingRejection:
    """A slice, or a layout of it, that does not take the demand, and why."""

    name: str
    reason: str


DIR = "DIR"
"""Folder of the weights in a command, where a plan knows the model's sizes alone."""


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
        found = (
            "nothing takes the demand" if best is None else f"{best.fleet.replicas:,} x {best.name}"
        )
        return f"<ServingPlan of {self.name}: {found}; {len(self.ranked)} ranked, {len(self.rejected)} rejected>"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def commands(self) -> list[str]:
        """Commands that fetch the model where it is a published one, quantize it as planned, and serve it; none without a best candidate."""
        if self.best is None:
            return []
        path, found = Path(self.name), []
        folder = path.parent if path.suffix == ".json" else path
        if not path.exists():
            known = find_published(self.name)
            folder = Path(DIR if known is None else known.name)
            if known is not None:
                found.append(f"hf download {known.hub} --local-dir {known.name}")
        words = shlex.quote(str(folder))
        if self.weights != ServedWeights.plain.value:
            stem = folder if folder.name else folder.resolve().name
            made = shlex.quote(f"{stem}-{self.weights}")
            scales = " --calibrate TEXT" if self.weights == ServedWeights.w8a8.value else ""
            found.append(f"systolic quantize {words} --to {self.weights} --out {made}{scales}")
            words = made
        cache = "" if self.cache == ServedCache.plain.value else f" --kv-dtype {self.cache}"
        return [*found, f"systolic serve {words} {self.best.options}{cache}"]

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
            "ranked": [one.to_json() for one in self.ranked],
            "uncompiled": [one.to_json() for one in self.uncompiled],
            "rejected": [{"name": one.name, "reason": one.reason} for one in self.rejected],
            "commands": self.commands,
            "notes": list(self.notes),
            "target": self.name,
        }


USAGE = """usage: systolic plan serve MODEL --on SLICES --requests-per-second N [options]

MODEL is a published model that systolic recipes lists (llama-3.1-8b), a config.json, a Hugging Face folder or a
Bundle; weights are not needed. For each slice: engines and how the devices of each are split, the requests that an
engine takes within --ttft and --tpot, replicas, dollars an hour and per million tokens, headroom. Layouts are ranked
by the floors of their steps, and compiled best first until no floor is below the cheapest. Compiles are kept.
SLICES is a list: v6e-8,v5e-8; v6e stands for the slices of that chip that are one machine, as systolic serve needs
them, or for larger ones where no machine holds the model; any for those of all TPUs.

Exits with 1 when nothing takes the demand."""

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


@command_of
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
    host_ms: Annotated[float, NOT_NEGATIVE] = 0.0,
    max_chips: Annotated[int, COUNT] = MAX_CHIPS,
    candidates: Annotated[int, COUNT] = CANDIDATES,
    finalists: Annotated[int, NOT_NEGATIVE] = 1,
    flags: str = "",
    compiler: Annotated[Compiler | None, PYTHON] = None,
    target: Annotated[str, PYTHON] = "",
    **options: Any,
) -> ServingPlan:
    """Plans slices, layouts and replicas that serve a demand, cheapest first; nothing of the slices need be there.

    Args:
        job: A language model: a Job, the name of a published model, or the path of a config.json, a Hugging Face folder or a Bundle.
        on: Slices, chips (their slices of one machine) or any, with commas: v6e-8,v5e.
        requests_per_second: Requests that come, by chance.
        prompt_tokens: Tokens of each prompt.
        output_tokens: New tokens of each request.
        ttft: Time to the first token that 99 % of the requests keep, the wait for other prompts included: 500ms, 1s.
        tpot: Mean time of each further token: 50ms.
        price: Which price of the catalogue: on-demand, spot or committed.
        weights: Format of a decoder's matrices: plain, or quantized as systolic quantize does; a quantized Bundle has its own.
        kv_dtype: Format of keys and values: plain, int8 with a scale for each position and head, or fp8 (e4m3) without scales.
        chunk: Prompt tokens that a step reads.
        host_ms: Milliseconds of the host's work for each step, an assumption.
        max_chips: Chips at most of a slice that any or the name of a chip stands for.
        candidates: Layouts that are compiled up to the schedule, those of the least floors.
        finalists: How many of the best get a full compile.
        flags: Compiler flags on top of the set that all jobs on a chip share; none leaves that set out.
        compiler: Where compiles are kept; its flags are those of each slice.
        target: What a Job was made of: a quantized Bundle has formats of its own.
        options: Of the recipe that ``job`` names.

    Raises:
        OptionError: an option that does not parse or is out of its range, or the model is no language model.
        NotFoundError: a name that is neither a slice nor a chip.
    """
    source = source_of(job, options)
    made = source.job
    name = target or (made.name if source.recipe.of_job else source.recipe.target)
    if not isinstance(made.model, Decoder):
        raise OptionError(
            f"{name} is no language model; plan serve takes a decoder such as llama-3.1-8b"
        )
    resolved(flags, None)  # its words, before anything takes time
    load = Load(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunk=chunk,
        host_seconds=host_ms / 1e3,
    )
    check_context(made, load, name)
    limits = LatencyLimits(
        first_token_seconds=latency(ttft, "--ttft"), token_seconds=latency(tpot, "--tpot")
    )
    search = _ServingSearch(
        name=name,
        job=with_formats(made, name, weights),
        demand=Demand(requests_per_second=requests_per_second, load=load, limits=limits),
        price=price,
        cache=kv_dtype,
        flags=flags,
        compiler=compiler or Compiler(),
    )
    with working(made.name):
        found = search.run(*_slices(on, max_chips, price), candidates, finalists)
    return replace(found, weights=weights.value, cache=kv_dtype.value)


def _slices(
    on: str | Slice | Sequence[str | Slice], max_chips: int, price: PriceTerm
) -> tuple[list[Slice], list[Slice]]:
    """The slices that were named, with those of one machine of a chip or ``any``; and these chips' slices of several machines.

    Raises:
        OptionError: none of them is one of TPUs.
    """
    found: dict[str, Slice] = {}
    larger: dict[str, Slice] = {}
    given = [on] if isinstance(on, str | Slice) else on
    for part in given:
        words = part.split(",") if isinstance(part, str) else [part]
        for word in (one for one in words if not isinstance(one, str) or one.strip()):
            meant = all_slices(word, max_chips, price)
            small = [one for one in meant if one_machine(one) or len(meant) == 1]
            found |= {one.name: one for one in small}
            larger |= {one.name: one for one in meant if one not in small}
    if not found and not larger:
        return slices_of("", max_chips, price), []
    every = [*found.values(), *larger.values()]
    if all(one.platform != "tpu" for one in every):
        names = ", ".join(one.name for one in every)
        raise OptionError(
            f"--on is {names}, and plan serve is for slices of TPUs: give v6e-8,v5e-8, a chip such as v6e, or any; systolic forecast --serve takes {names}"
        )
    return list(found.values()), list(larger.values())


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
    flags: str
    compiler: Compiler
    rejected: list[ServingRejection] = field(default_factory=list)

    def run(
        self, slices: Sequence[Slice], larger: Sequence[Slice], candidates: int, finalists: int
    ) -> ServingPlan:
        """The plan; ``larger`` are analysed where no slice of one machine of their chip takes the demand."""
        every = [one for on in slices for one in self.analysed(on)]
        taking = {one.on.chip.name for one in every}
        every += [one for on in larger if on.chip.name not in taking for one in self.analysed(on)]
        every.sort(key=lambda one: one.order)
        kept = self.promising(every)
        done: list[ServingCandidate] = []
        tried: list[ServingCandidate] = []
        for one in kept:
            best = min((found.order for found in done), default=None)
            # A floor is a bound: what is dearer at its floor than another compiled is dearer, and at equal dollars has no more headroom.
            if len(tried) >= candidates or (best is not None and one.order >= best):
                break
            tried.append(one)
            reporter().stage(f"{len(tried)}/{min(candidates, len(kept))} {one.name}")
            if (made := self.compiled(one, quick=True)) is not None:
                done.append(made)
        done.sort(key=lambda one: one.order)
        done = self.settled(done, finalists)
        left = [one for one in every if not any(_same(one, other) for other in tried)]
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
            first = next((one for one in done[:finalists] if one.quick), None)
            if first is None:
                break
            reporter().stage(f"full compile of {first.name}")
            full = self.compiled(first, quick=False)
            done = [one for one in done if one is not first] + ([full] if full else [])
            done.sort(key=lambda one: one.order)
        return done

    def promising(self, every: Sequence[ServingCandidate]) -> list[ServingCandidate]:
        """Candidates by their floors' cost, few of each slice."""
        taken: dict[str, int] = {}
        found = []
        for one in every:
            taken[one.on.name] = taken.get(one.on.name, 0) + 1
            if taken[one.on.name] <= LAYOUTS:
                found.append(one)
        return found

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
        found: list[ServingCandidate] = []
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
            made = self.fleet(on, layout, least.times(), least.room, floor=True)
            if made is None:
                reasons["latency"] = self.too_slow(least)
                continue
            one = ServingCandidate(on=on, layout=layout, least=made, room=least.room)
            if one.chips > MOST_CHIPS:
                fewest = min(fewest or one.chips, one.chips)
                reasons["chips"] = self.too_many(fewest)
                continue
            found.append(one)
        if not found:
            fallback = "no tensor or expert axis of its devices divides the model"
            why = next(
                (reasons[what] for what in ("chips", "latency", "room") if what in reasons), ""
            )
            self.reject(on.name, why or fallback)
        return found

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
        found = []
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
                found.append(layout)
        return found

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

    def compiled(self, one: ServingCandidate, *, quick: bool) -> ServingCandidate | None:
        """The candidate by its compiled steps; None where they do not take the demand."""
        rows = self.rows(one)
        for _ in range(ROUNDS):
            made = self.timed(one, rows, quick=quick)
            if made is None:
                return None
            found = self.fleet(one.on, one.layout, made.times, made.room)
            if found is None:
                alone = made.times.decode_seconds(1)
                prompt = self.demand.load.chunks * (alone + made.times.chunk)
                self.reject(
                    one.name,
                    f"above the limits of {self.demand.limits}: {duration(prompt)} for a prompt alone, {duration(alone)} per token",
                )
                return None
            most = max(round(found.at_most.decode_rows), 1)
            if most <= BEYOND * max(made.times.decode) or most <= max(rows):
                break
            # Beyond the steps that were compiled their seconds would be a guess.
            rows = [*rows, most]
        return replace(one, made=found, room=made.room, quick=quick, forecast=made.forecast)

    def timed(
        self, one: ServingCandidate, rows: Sequence[int], *, quick: bool
    ) -> ServerTimes | None:
        """Steps of a candidate; None where they do not compile or do not fit."""
        compiler = replace(self.compiler, flags=resolved(self.flags, one.on.chip))
        plain = self.cache is ServedCache.plain
        try:
            made = server_times(
                replace(self.job, layout=one.layout),
                one.on,
                self.demand.load,
                rows,
                served=None if plain else Served(cache=self.cache),
                compiler=compiler.quick() if quick else compiler,
                watch=lambda stage: reporter().stage(f"{one.name}, {stage}"),
            )
        except SystolicError as error:
            self.reject(one.name, str(error))
            return None
        if isinstance(made, ServerTimes):
            return made
        memory = made.memory
        need = gibibytes(memory.weights_bytes + memory.temporary_bytes)
        self.reject(
            one.name,
            f"weights and temporaries of {need} leave no room in {gibibytes(memory.capacity_bytes)}",
        )
        return None

    def rows(self, one: ServingCandidate) -> list[int]:
        """Rows of the steps to compile first: some times those of the floor at its most, and of a mixture some between."""
        state = one.least.state
        least = state.decode_rows * one.least.most_rate / state.requests_per_second
        most = max(min(round(PARTS * least), one.room), 1)
        model = self.job.model
        assert isinstance(model, Decoder)
        between = [most // PARTS] if model.experts > 1 and most // PARTS > 1 else []
        return [*between, most]

    def notes(self, done: Sequence[ServingCandidate]) -> list[str]:
        """Notes on the plan as a whole."""
        found = [
            f"{one.on.name} has {HOSTS.format(plural(one.on.num_hosts, 'host'))}"
            for one in done
            if not one_machine(one.on)
        ]
        unpriced = {one.on.name for one in done if one.fleet.usd_per_hour is None}
        found += [f"{name} has no price {self.price.value}; it is ranked last" for name in unpriced]
        return list(dict.fromkeys(found))


def _same(one: ServingCandidate, other: ServingCandidate) -> bool:
    return one.on == other.on and one.layout == other.layout
