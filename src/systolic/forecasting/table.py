"""Table of forecasts: one program on several slices or under several settings, as values, JSON and CSV."""

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from systolic.chips import Slice
from systolic.chips import slice as slice_named
from systolic.core.errors import DataError, LayoutError, OptionError, RunError
from systolic.core.ranges import dashed
from systolic.forecasting.forecast import Forecast
from systolic.report.notebook import notebook_html

_LEFT_OUT = frozenset(
    (
        "unpriced",
        "notes",
        "interval",
        "power",
        "prices",
        "compiler",
        "recipe",
        "target",
        "step",
        "quick",
    )
)
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

    @property
    def fits(self) -> bool:
        """Whether there is a forecast and the step fits."""
        return self.forecast is not None and self.forecast.fits

    @property
    def is_comparable(self) -> bool:
        """Whether its time may be set against others': the step fits, and the time is no lower bound nor another chip's."""
        forecast = self.forecast
        return (
            forecast is not None
            and forecast.fits
            and not forecast.is_lower_bound
            and not forecast.doubt
        )

    @property
    def usd_per_unit(self) -> float | None:
        """Dollars for a token, an example or a call; None without a price or a step time."""
        forecast = self.forecast
        if forecast is None or forecast.bill.usd_per_hour is None or not forecast.step_seconds:
            return None
        return forecast.bill.usd_per(1.0, forecast.units, forecast.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """The forecast under its published names, without the table of its ops, with ``settings``, or the slice with the ``problem``."""
        settings = dict(self.settings)
        if self.forecast is None:
            return {"slice": self.on.name, "settings": settings, "problem": self.problem}
        return {
            **self.forecast.figures_json(),
            **self.forecast.costs_json(),
            **self.forecast.request.to_json(),
            "settings": settings,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class ForecastTable(Sequence[ForecastRow]):
    """Forecasts of one program, in the requested order.

    A sequence of :class:`ForecastRow`. Rows are compared by throughput and by cost for each token, example or call,
    since with a batch per device a step does different work on each slice.
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
        return next((i for i, other in enumerate(self.rows) if other is row), None)

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
        for name, value in row.forecast.figures_json().items():
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
    places = [slice_named(part) if isinstance(part, str) else part for part in parts]
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
    options: dict[str, list[str]] = {}
    for word in vary:
        name, _, values = word.removeprefix("--").partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not name or not listed:
            raise OptionError(
                f"--vary is {word!r}; it takes an option with its values: --vary layout.fsdp=4,8,16"
            )
        if dashed(name) in options:
            raise OptionError(f"--vary {name} is given twice; give all its values at once")
        options[dashed(name)] = list(dict.fromkeys(listed))
    return options


def varied_values(vary: Mapping[str, Any] | Sequence[str] | str | None) -> dict[str, Sequence[Any]]:
    """Options with several values each; text is that of ``--vary``.

    Raises:
        OptionError: an option without a value, or as :func:`values_of`.
    """
    if not isinstance(vary, Mapping):
        return {**values_of([vary] if isinstance(vary, str) else vary or [])}
    options: dict[str, Sequence[Any]] = {}
    for name, values in vary.items():
        if isinstance(values, str):
            options |= values_of([f"{name}={values}"])
        elif isinstance(values, Iterable) and not isinstance(values, Mapping):
            options[name] = list(values)
        else:
            options[name] = [values]
        if not options.get(name, True):
            raise OptionError(f"vary has no value for {name}; give a list of them")
    return options


def row_of(on: Slice, settings: Mapping[str, Any], make: Callable[[], Forecast]) -> ForecastRow:
    """A forecast as a row; a layout or a dump that the slice does not allow, or a compile that fails, is its problem."""
    try:
        return ForecastRow(on=on, settings=settings, forecast=make())
    except (DataError, LayoutError, RunError) as error:
        return ForecastRow(on=on, settings=settings, problem=str(error))
