"""The answer, as a value and as JSON with names that other tools read."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.chips import Slice
from systolic.compiling import Compiled
from systolic.core.units import Origin, duration
from systolic.forecasting.cost import Bill, ForecastCommand, ForecastCompile
from systolic.forecasting.costs import by_op, seconds_by_place
from systolic.forecasting.memory import LARGEST, MemoryMap, MemoryShortage
from systolic.forecasting.op_changes import OpGroup, Schedule, groups_of, table_of
from systolic.report.notebook import notebook_html
from systolic.sim.calibration import Calibration, factors_json
from systolic.sim.cost_kinds import corrected_seconds
from systolic.sim.gpu import format_peak
from systolic.sim.incomplete import Incomplete
from systolic.sim.rates import peaks_of
from systolic.sim.timeline import PricedBy, Resource, Timeline

if TYPE_CHECKING:
    from systolic.forecasting.comparison import ForecastChanges


BILLION, MILLION = 1e9, 1e6
TOP_OPS = 20
"""Ops in the JSON, the most expensive first."""
PLACES = 200
"""Places in the JSON, the most expensive first; the rest is one sum."""
REST = "the rest"


class TimeBound(enum.Enum):
    """Meaning of the time of a step."""

    complete = "complete"
    """All of it is priced."""
    lower = "lower"
    """A part may take longer than what is counted for it, and none less: the time bounds the step from below."""
    open = "open"
    """A part may also take less, such as a loop that is counted once and may make no trip, or a branch on data that is
    counted as its longest: only the low end of the range bounds the step from below."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Time, memory and cost of a program on a slice.

    Times in seconds, memory in bytes of one device. MFU is model FLOPs (no rematerialisation)
    over the bf16 peak of all chips. HFU is the FLOPs of executed matmuls, each over the peak of
    its operands' format.
    """

    recipe: str
    on: Slice
    origin: Origin
    fits: bool
    capacity_bytes: int
    memory: MemoryMap | None = None
    memory_origin: Origin = Origin.compiled
    """Origin of the memory peak: the compiler, the schedule, or assumed of what stood in for the device."""
    timeline: Timeline | None = None
    step_seconds: float | None = None
    low: float | None = None
    high: float | None = None
    interval: str = ""
    """Results that low and high rest on."""
    model_flops: float | None = None
    unit: str = "calls"
    units: float = 1
    """Tokens, examples or calls of a step, all devices."""
    hardware_flops: float = 0.0
    """FLOPs that one device executes."""
    flops_by_format: Mapping[str, float] = field(default_factory=dict)
    """``hardware_flops`` by the format of the operands: ``bf16``, ``fp8``, ``int8``, ``int4``."""
    bill: Bill
    compiler: ForecastCompile = field(default_factory=ForecastCompile)
    layout: Mapping[str, Any] = field(default_factory=dict)
    rejected: MemoryShortage | None = None
    doubt: str = ""
    """Why the time is not the slice's, in the words of a verdict; empty without a reason."""
    compiled_for: str | None = None
    """Generation that a dump was scheduled for; None where nothing says it, and of what was compiled for the slice."""
    cautions: Sequence[str] = ()
    """Notes on what makes the figures wrong or one-sided; shown before all others, and never left out."""
    warnings: Sequence[str] = ()
    """Notes on settings that slow the program down; shown before all other notes."""
    notes: Sequence[str] = ()
    periodic: Sequence[Mapping[str, Any]] = ()
    """Calls that come with some steps alone and are not in the step: ``name``, ``every_steps``, ``calls``, their ``seconds`` and ``peak_bytes``."""
    answer: Compiled | None = field(default=None, repr=False)
    """The compiler's answer in the store: its text, its message, its executable; None of a dump."""
    schedules: Sequence[Schedule] = field(default=(), repr=False)
    """Programs of the step with their schedules; empty where they were dropped, since they are large."""
    request: ForecastCommand = field(default_factory=ForecastCommand, repr=False)
    against: "ForecastChanges | None" = field(default=None, repr=False)
    """Changes since an earlier forecast, where there is one."""
    saved: Path | None = None
    """Copy of the executable."""

    def __repr__(self) -> str:
        """The answer on one line; the timeline alone has thousands of spans."""
        fits = "fits" if self.fits else "does not fit"
        step = f", {duration(self.step_seconds)} a step" if self.step_seconds else ""
        if step and self.is_lower_bound:
            step += ", time open" if self.is_assumed else " or more"
        share = f", MFU {self.mfu:.1%}" if self.mfu else ""
        return f"<Forecast of {self.recipe} on {self.on.name}: {fits}{step}{share}>"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def need_bytes(self) -> int:
        """Memory of a device at the peak, whether it fits or not; 0 where it is not known."""
        if self.memory is not None:
            return self.memory.peak_bytes
        return 0 if self.rejected is None else self.rejected.need_bytes

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the bf16 peak; above 1 is possible for matmuls in a format with a higher peak."""
        return self._share(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """Executed FLOPs, each over the peak of its operands' format: the share of the step that the matrix units need at least."""
        bf16 = self.on.chip.peak_bf16_flops_per_second
        if not self.flops_by_format or not bf16:
            return self._share(self.hardware_flops * self.on.num_devices)
        at_bf16 = sum(
            flops * bf16 / self._peak(name, bf16) for name, flops in self.flops_by_format.items()
        )
        return self._share(at_bf16 * self.on.num_devices)

    @property
    def has_several_peaks(self) -> bool:
        """Whether matmuls run in a format whose peak is not that of bf16."""
        bf16 = self.on.chip.peak_bf16_flops_per_second
        return bool(bf16) and any(self._peak(name, bf16) != bf16 for name in self.flops_by_format)

    def _peak(self, form: str, bf16: float) -> float:
        """FLOP/s of a chip's matrix units, or of a GPU's lanes, in a number format. f32 runs as passes of bf16 on a TPU."""
        if self.on.platform == "gpu":
            return format_peak(self.on.chip, form)
        return max(peaks_of(self.on.chip).get(form, bf16), bf16)

    def _share(self, flops: float | None) -> float | None:
        peak = self.on.chip.peak_bf16_flops_per_second
        if flops is None or not peak or not self.step_seconds:
            return None
        return flops / (self.step_seconds * peak * self.on.num_chips)

    @property
    def time_by_resource(self) -> dict[str, float]:
        """Seconds of the step by what the core was doing or waiting for; sums to the step."""
        seconds = dict.fromkeys((r.value for r in Resource), 0.0)
        if self.timeline is None:
            return seconds
        for span, times in self.timeline.leaves():
            if span.lane == "core":
                seconds[span.resource.value] += span.seconds * times
        seconds["idle"] += max(0.0, self.timeline.seconds - sum(seconds.values()))
        return seconds

    @property
    def exposed_collective_seconds(self) -> float:
        """Time in which the core does nothing but wait for chips."""
        by = self.time_by_resource
        return by["ici"] + by["dcn"]

    @property
    def bound_by(self) -> str | None:
        """The resource that takes the largest share of the step."""
        if self.timeline is None:
            return None
        by = self.time_by_resource
        return max(by, key=lambda name: by[name])

    @property
    def priced_fraction(self) -> float:
        """Share of the step that a rule prices; the rest is taken from bytes alone."""
        if self.timeline is None or not self.timeline.seconds:
            return 0.0
        return 1.0 - sum(s for _, s in self.unpriced) / self.timeline.seconds

    @property
    def unpriced(self) -> list[tuple[str, float]]:
        """Ops that no rule prices, with the seconds that their bytes need."""
        if self.timeline is None:
            return []
        return [
            (f"{span.opcode} {span.name}", span.seconds * times)
            for span, times in self.timeline.leaves()
            if span.priced_by is PricedBy.nothing
        ]

    @cached_property
    def ops(self) -> Sequence[OpGroup]:
        """Ops and waits of the core on a TPU, those that are alike together."""
        return groups_of(self.schedules) if self.timeline is not None else ()

    @property
    def incomplete(self) -> Sequence[Incomplete]:
        """Loops, branches, kernels, custom calls and callbacks whose time is not certain."""
        return () if self.timeline is None else self.timeline.incomplete

    @property
    def is_lower_bound(self) -> bool:
        """Whether a part of the program is open: the time alone is not the step's; :attr:`bound` says whether it bounds it from below."""
        return bool(self.incomplete)

    @property
    def is_assumed(self) -> bool:
        """Whether more is counted for an open part than the program promises: a trip, or the longest branch. Only :attr:`low` bounds the step from below then."""
        return any(part.is_assumed for part in self.incomplete)

    @property
    def bound(self) -> TimeBound:
        """Meaning of :attr:`step_seconds`."""
        if not self.is_lower_bound:
            return TimeBound.complete
        return TimeBound.open if self.is_assumed else TimeBound.lower

    @property
    def given(self) -> Sequence[str]:
        """Trips and costs that the user gave, a line each."""
        return () if self.timeline is None else self.timeline.given

    @property
    def calibration(self) -> Calibration | None:
        """Corrections of the simulator's prices that the time has, from profiles."""
        return None if self.timeline is None else self.timeline.calibration

    @property
    def units_per_second(self) -> float | None:
        """Tokens, examples or calls a second, all chips together."""
        return self.units / self.step_seconds if self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The published names: figures, places, the most expensive ops, and the table of ops that a later forecast is compared with."""
        return {
            **self.figures_json(),
            **self.costs_json(),
            "ops": table_of(self.ops),
            **self.request.to_json(),
        }

    def figures_json(self) -> dict[str, Any]:
        """The published names without places, ops and the command."""
        seconds = self.step_seconds
        tokens = self.unit == "tokens"
        per, scale = ("billion_tokens", BILLION) if tokens else (f"million_{self.unit}", MILLION)
        record: dict[str, Any] = {
            "recipe": self.recipe,
            "slice": self.on.name,
            "chips": self.on.num_chips,
            "origin": self.origin.value,
            "fits": self.fits,
            "hbm": self._hbm(),
            "step_seconds": seconds,
            "step_seconds_low": self.low,
            "step_seconds_high": self.high,
            "interval": self.interval,
            "lower_bound": self.is_lower_bound,
            "bound": self.bound.value,
            "compiled_for": self.compiled_for,
            "model_flops_per_step": self.model_flops,
            "tflops_per_chip": self.model_flops / seconds / self.on.num_chips / 1e12
            if seconds and self.model_flops
            else None,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "executed_flops_by_format": dict(self.flops_by_format),
            f"{self.unit}_per_second": self.units_per_second,
            "time_by_resource": self.time_by_resource,
            "exposed_collective_seconds": self.exposed_collective_seconds,
            "bound_by": self.bound_by,
            "priced_fraction": self.priced_fraction,
            "unpriced": self._unpriced(),
            "given": list(self.given),
            "calibration": self._calibration(),
            "usd_per_hour": self.bill.usd_per_hour,
            f"usd_per_{per}": self.bill.usd_per(scale, self.units, seconds) if seconds else None,
            f"kwh_per_{per}": self.bill.kwh_per(scale, self.units, seconds) if seconds else None,
            **self._bill(),
            "compiler": self.compiler.to_json(),
            "layout": dict(self.layout),
            "notes": [*self.cautions, *self.warnings, *self.notes],
        }
        if self.periodic:
            record["periodic"] = [dict(program) for program in self.periodic]
        if self.rejected is not None:
            record["rejected"] = self.rejected.to_json()
        if self.against is not None:
            record |= self.against.to_json()
        return record

    def _unpriced(self) -> list[dict[str, Any]]:
        """Parts that are priced incompletely, and ops of which only the bytes are known."""
        parts = [part.to_json() for part in self.incomplete]
        named = {part["op"] for part in parts}
        return [*parts, *({"op": op, "seconds": s} for op, s in self.unpriced if op not in named)]

    def _calibration(self) -> dict[str, Any] | None:
        """The corrections, and the seconds of the step in each kind of op that they change."""
        of = self.calibration
        if of is None or self.timeline is None:
            return None
        seconds = corrected_seconds(self.timeline)
        return {
            "name": of.name,
            "chip": of.chip,
            "made": of.made,
            "profiles": of.num_profiles,
            "kinds": factors_json(of),
            "corrected_seconds": {kind.value: spent for kind, spent in seconds.items()},
        }

    def _hbm(self) -> dict[str, Any]:
        memory = self.memory
        if memory is None:
            return {
                "capacity_bytes": self.capacity_bytes,
                "origin": self.memory_origin.value,
                "peak_bytes": None if self.rejected is None else self.rejected.need_bytes,
                "by_kind": {},
            }
        return {
            "capacity_bytes": self.capacity_bytes,
            "origin": self.memory_origin.value,
            "peak_bytes": memory.peak_bytes,
            "by_kind": dict(memory.by_kind),
            "buffers": [
                {
                    "bytes": b.bytes,
                    "kind": b.kind,
                    "shape": b.shape,
                    "layer": b.layer,
                    "op": b.op,
                    "source": b.source,
                }
                for b in memory.buffers[:LARGEST]
            ],
        }

    def costs_json(self) -> dict[str, Any]:
        """Seconds of the core by place in the model, and the most expensive ops."""
        if self.timeline is None:
            return {"time_by_layer": {}, "top_ops": []}
        places = list(seconds_by_place(self.timeline).items())
        shown = dict(places[:PLACES])
        if len(places) > PLACES:
            shown[REST] = sum(seconds for _, seconds in places[PLACES:])
        ops = [cost.to_json() for cost in by_op(self.timeline)[:TOP_OPS]]
        return {"time_by_layer": shown, "top_ops": ops}

    def _bill(self) -> dict[str, Any]:
        bill = self.bill
        return {
            "prices": {
                "on_demand": bill.usd_per_hour,
                "spot": bill.spot_usd_per_hour,
                "committed": bill.committed_usd_per_hour,
                "as_of": bill.price_as_of,
                "region": bill.price_region,
            },
            "power": {"watts": bill.watts, "source": bill.watts_source, "pue": bill.pue},
        }
