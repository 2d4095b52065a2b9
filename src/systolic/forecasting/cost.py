"""Facts of a forecast besides its step: the bill, the compile behind it, and the command that makes it again; imports no numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from systolic.chips import Slice, usual

if TYPE_CHECKING:
    from systolic.compiling.outcome import Compiled, Rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Price and power of a slice; None where the catalogue has no price or no power."""

    usd_per_hour: float | None
    spot_usd_per_hour: float | None
    committed_usd_per_hour: float | None
    price_as_of: str
    price_region: str
    watts: float | None
    """All chips, hosts and cooling not counted."""
    watts_source: str
    pue: float
    """Power usage effectiveness: energy at the meter over energy of the chips."""

    def usd_per(self, units: float, step_units: float, step_seconds: float) -> float | None:
        """Dollars on demand for so many units of work."""
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour * (units / step_units * step_seconds) / 3600

    def kwh_per(self, units: float, step_units: float, step_seconds: float) -> float | None:
        """Kilowatt-hours at the meter for so many units of work."""
        if self.watts is None:
            return None
        return self.watts * self.pue * (units / step_units * step_seconds) / 3.6e6


def bill_of(on: Slice) -> Bill:
    """Prices and power from the catalogue, or the user's own file."""
    prices, figures = on.usd_per_hour, on.chip.figures
    priced = figures.get("usd_per_chip_hour.on_demand")
    watts, of = on.power_watts, figures.get("power_watts")
    kind = "mean in use"
    if watts is None and on.tdp_watts is not None:
        watts, of, kind = on.tdp_watts, figures.get("tdp_watts"), "thermal design power"
    return Bill(
        usd_per_hour=prices.on_demand,
        spot_usd_per_hour=prices.spot,
        committed_usd_per_hour=prices.committed,
        price_as_of=priced.as_of if priced else "",
        price_region=priced.region if priced else "",
        watts=watts,
        pue=usual("data_centre")["pue"].value,
        watts_source=f"{kind}, {of.sources[0].text}" if of and of.sources else "",
    )


@dataclass(frozen=True, kw_only=True)
class ForecastCompile:
    """Compile behind a forecast; what is not known is None."""

    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Versions of ``jax``, ``libtpu`` and others, by name."""
    seconds: float | None = None
    """Time until the answer, from the store too."""
    stages: Mapping[str, float] | None = None
    """Seconds of the compile by stage."""
    cached: bool | None = None
    """Whether the store had the answer."""
    flags: Sequence[str] | None = None
    """Compiler flags."""
    program: str | None = None
    """Digest of the program in the store."""
    built_for: str | None = None
    """Chip that it was compiled for: a CPU for a GPU that is not there."""

    @classmethod
    def of(
        cls, outcome: "Compiled | Rejected", seconds: float, built_for: str | None = None
    ) -> "ForecastCompile":
        """The compile of an outcome that came after ``seconds``."""
        report = outcome.report
        return cls(
            versions={} if report is None else report.versions,
            seconds=round(seconds, 3),
            stages=None if report is None else report.seconds,
            cached=outcome.cached,
            flags=[] if report is None else report.flags,
            program=outcome.digest or None,
            built_for=built_for,
        )

    def to_json(self) -> dict[str, Any]:
        """The versions and what is known."""
        known = {name: getattr(self, name) for name in self.__dataclass_fields__}
        versions = known.pop("versions")
        return {**versions, **{name: value for name, value in known.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class ForecastCommand:
    """Command that makes a forecast again; None for what it does not have."""

    target: str | None = None
    """Recipe or model."""
    arguments: Sequence[str] | None = None
    """Words after the target."""
    options: Mapping[str, Any] | None = None
    """Options of the recipe."""
    step: str | None = None
    quick: bool | None = None
    """Whether the compile stops at the schedule."""
    command: Sequence[str] | None = None
    """Words that start a program."""

    def to_json(self) -> dict[str, Any]:
        """Values that are known, by name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if value is not None}
