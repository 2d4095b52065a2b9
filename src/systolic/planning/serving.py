"""Plan of a server: ranked slices, layouts and replicas for a demand, and what was rejected."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.chips import Slice
from systolic.core.notebook import notebook_html
from systolic.core.units import plural
from systolic.forecasting.demand import Demand, Fleet
from systolic.forecasting.serving import ServingForecast
from systolic.job import Layout, ServedCache, ServedWeights
from systolic.models.published import find_published
from systolic.planning.objective import PriceTerm

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
