"""Table of forecasts: one program on several slices or under several settings, as values, JSON and CSV."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from systolic.chips import Slice
from systolic.core.notebook import notebook_html
from systolic.forecasting.forecast import Forecast

_LEFT_OUT = frozenset(("unpriced", "notes", "interval", "power", "prices", "compiler", "recipe"))
"""Names of a forecast's JSON that are no column of the CSV: lists, texts, and what its other columns say."""


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One of the forecasts, or why there is none."""

    on: Slice
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ between rows, by name."""
    forecast: Forecast | None = None
    problem: str = ""
    """Why the program can't run there as it is; empty where there is a forecast."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """The command that forecasts this row alone: target, arguments, options."""

    @property
    def fits(self) -> bool:
        """Whether there is a forecast and the step fits."""
        return self.forecast is not None and self.forecast.fits

    @property
    def is_comparable(self) -> bool:
        """Whether its time may be set against others': the step fits, and the time is no lower bound nor another chip's."""
        made = self.forecast
        return made is not None and made.fits and not made.is_lower_bound and not made.doubt

    @property
    def usd_per_unit(self) -> float | None:
        """Dollars for a token, an example or a call; None without a price or a step time."""
        made = self.forecast
        if made is None or made.bill.usd_per_hour is None or not made.step_seconds:
            return None
        return made.bill.usd_per(1.0, made.units, made.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """The forecast under its published names with ``settings``, or the slice with the ``problem``."""
        settings = dict(self.settings)
        if self.forecast is None:
            return {"slice": self.on.name, "settings": settings, "problem": self.problem}
        return {**self.forecast.to_json(), **self.request, "settings": settings}


@dataclass(frozen=True, kw_only=True, repr=False)
class ForecastTable(Sequence[ForecastRow]):
    """Forecasts of one program, in the order in which they were asked for.

    A sequence of :class:`ForecastRow`. Rows are compared by throughput and by cost for each token, example or call,
    since a batch per device makes another amount of work of a step on each slice.
    """

    name: str
    """Name of the program."""
    rows: Sequence[ForecastRow]
    of_same_work: bool = True
    """Whether a unit is the same work in each row; where that is not known, none is the fastest or the cheapest."""

    @overload
    def __getitem__(self, index: int) -> ForecastRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ForecastRow]: ...

    def __getitem__(self, index: int | slice) -> ForecastRow | Sequence[ForecastRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ForecastRow]:
        return iter(self.rows)

    def __repr__(self) -> str:
        """The fastest and the cheapest on one line."""
        parts = [f"{sum(row.fits for row in self.rows)} of {len(self.rows)} fit"]
        for word, row in (("fastest", self.fastest), ("cheapest", self.cheapest)):
            if row is not None:
                parts.append(f"{word} {' '.join([row.on.name, *settings_text(row)])}")
        return f"<ForecastTable of {self.name}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def fastest(self) -> ForecastRow | None:
        """The row that fits with the most tokens, examples or calls a second."""
        return self._least(
            lambda row: None if row.forecast is None else _reciprocal(row.forecast.units_per_second)
        )

    @property
    def cheapest(self) -> ForecastRow | None:
        """The row that fits with the lowest price for a token, an example or a call."""
        return self._least(lambda row: row.usd_per_unit)

    def _least(self, of: Callable[[ForecastRow], float | None]) -> ForecastRow | None:
        if not self.of_same_work:
            return None
        scored = [(of(row), row) for row in self.rows if row.is_comparable]
        known = [(score, row) for score, row in scored if score is not None]
        return min(known, key=lambda pair: pair[0], default=(None, None))[1]

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``recipe``, ``forecasts``, and the index of the ``fastest`` and the ``cheapest`` among them."""
        return {
            "recipe": self.name,
            "forecasts": [row.to_json() for row in self.rows],
            "fastest": self._index(self.fastest),
            "cheapest": self._index(self.cheapest),
        }

    def _index(self, row: ForecastRow | None) -> int | None:
        return next((i for i, one in enumerate(self.rows) if one is row), None)

    def to_csv(self) -> str:
        """CSV with a header: settings, then the published names of a forecast's JSON, those of groups joined by a dot."""
        records = [_flat(row) for row in self.rows]
        names = dict.fromkeys(name for record in records for name in record)
        names["problem"] = names.pop("problem", None)  # the last column
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()


def settings_text(row: ForecastRow) -> list[str]:
    """Settings as ``layout.fsdp 8``."""
    return [f"{name} {value}" for name, value in row.settings.items()]


def _reciprocal(rate: float | None) -> float | None:
    return 1 / rate if rate else None


def _flat(row: ForecastRow) -> dict[str, Any]:
    """Scalars of a row by column."""
    record: dict[str, Any] = {"slice": row.on.name, "chips": row.on.num_chips, **row.settings}
    if row.forecast is not None:
        for name, value in row.forecast.to_json().items():
            if name in _LEFT_OUT or name in record:
                continue
            if isinstance(value, Mapping):
                record |= {
                    f"{name}.{key}": inner
                    for key, inner in value.items()
                    if name in ("hbm", "time_by_resource") and _is_scalar(inner)
                }
            elif _is_scalar(value):
                record[name] = value
    return {**record, "problem": row.problem}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))
