"""Reads ``catalogue.toml`` and the user's own prices and power over it.

A user file has the catalogue's shape and replaces only what it names; a bare number will do::

    [chips.v5e]
    power_watts = 90
    usd_per_chip_hour.on_demand = { value = 0.95, region = "our contract" }
"""

import functools
import math
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from systolic.chips.host import cpu
from systolic.chips.record import (
    YOURS,
    Chip,
    ChipKind,
    Citation,
    Counts,
    Figure,
    Prices,
    Sizes,
    SliceRule,
)
from systolic.core.arguments import with_types
from systolic.core.errors import NotFoundError, OptionError, nearest

USER_FILE_VARIABLE = "SYSTOLIC_CATALOGUE"
OVERRIDABLE = ("power_watts", "power_watts_min", "power_watts_max", "tdp_watts")
"""Fields that a user file may replace, besides the prices: the rest is physics."""

_PRICE = "usd_per_chip_hour"
_PLAIN = ("title", "device_kind", "megacore", "machine_type", "gke_accelerator")
_NAMES = ("aliases", "native", "device_kind_aliases")


@with_types
def chip(name: str) -> Chip:
    """The chip of that name or alias: ``v5e``, ``ironwood``, ``h200``, ``cpu`` (this machine's).

    Raises:
        NotFoundError: no such chip; the message names the nearest one.
        OptionError: the user's catalogue has a mistake.
    """
    folded = name.strip().lower()
    for known in chips():
        if folded == known.name or folded in known.aliases:
            return known
    names = [alias for known in chips() for alias in (known.name, *known.aliases)]
    raise NotFoundError(
        f"there is no chip {name!r}{nearest(folded, names)}; systolic chips lists them"
    )


def chips() -> tuple[Chip, ...]:
    """All chips, the catalogue's in its order and last this machine's CPU.

    Raises:
        OptionError: the user's catalogue has a mistake.
        NotFoundError: ``$SYSTOLIC_CATALOGUE`` names a file that is not there.
    """
    path = user_file()
    return _catalogue(path, path.stat().st_mtime_ns if path else 0)


def by_device_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls ``device_kind``, or ``None`` when the catalogue has no such chip."""
    folded = device_kind.strip().lower()
    for known in chips():
        kinds = (known.device_kind or "", *known.device_kind_aliases)
        if folded and folded in (kind.lower() for kind in kinds):
            return known
    return None


def usual(of: str) -> Mapping[str, Figure]:
    """Figures that hold for all chips of a kind or stand in where a chip has none: ``tpu``, ``cpu`` or ``data_centre``."""
    return _usual()[of]


def known(chip: Chip, name: str) -> Any:
    """Number of a chip by its field's name, or the one that stands in for it.

    Raises:
        NotFoundError: no source gives the number for this chip, and nothing stands in.
    """
    value = getattr(chip, name)
    if value is not None:
        return value
    standing_in = _usual().get(chip.kind.value, {})
    return standing_in[name].value if name in standing_in else chip.source(name).value


def user_file() -> Path | None:
    """The user's catalogue: ``$SYSTOLIC_CATALOGUE``, else ``~/.config/systolic/catalogue.toml``."""
    named = os.environ.get(USER_FILE_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise NotFoundError(
                f"${USER_FILE_VARIABLE} names {named}, which is not a file; correct or unset it"
            )
        return path
    usual = Path("~/.config/systolic/catalogue.toml").expanduser()
    return usual if usual.is_file() else None


@functools.cache
def _tables() -> dict[str, Any]:
    text = resources.files("systolic.chips").joinpath("catalogue.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def _usual() -> dict[str, dict[str, Figure]]:
    return _figures(_tables()["usual"])


def _figures(named: dict[str, dict[str, Any]]) -> dict[str, dict[str, Figure]]:
    """Figures of each of the tables, by name and field."""
    units = _tables()["fields"]
    sources = {key: Citation(key=key, **entry) for key, entry in _tables()["sources"].items()}
    return {
        name: {
            field: _figure(field, entry, units, sources)
            for field, entry in _entries(table)
            if field in units
        }
        for name, table in named.items()
    }


@functools.lru_cache(maxsize=4)
def _catalogue(path: Path | None, _modified_ns: int) -> tuple[Chip, ...]:
    tables = _tables()
    figures = _figures(tables["chips"])
    if path is not None:
        for name, field, entry in _user_entries(path, figures, tables):
            figures[name][field] = _user_figure(path, field, entry, tables["fields"])
    listed = [_chip(name, tables["chips"][name], figures[name]) for name in figures]
    return (*listed, cpu(tables["fields"]))


def _entries(table: dict[str, Any]) -> list[tuple[str, Any]]:
    """The table's entries with the prices spelled ``usd_per_chip_hour.spot``."""
    rows = [(key, entry) for key, entry in table.items() if key != _PRICE]
    prices = table.get(_PRICE, {})
    if not isinstance(prices, dict):
        return [*rows, (_PRICE, prices)]
    return [*rows, *((f"{_PRICE}.{key}", entry) for key, entry in prices.items())]


def _figure(
    field: str, entry: dict[str, Any], units: dict[str, Any], sources: dict[str, Citation]
) -> Figure:
    cited = tuple(sources[key] for key in entry["source"])
    return Figure(
        field=field,
        value=_value(entry["value"], units[field]["unit"]),
        unit=units[field]["unit"],
        text=units[field]["text"],
        sources=cited,
        as_of=entry.get("as_of", cited[0].as_of),
        note=entry.get("note", ""),
        region=entry.get("region", ""),
        by_region=tuple(entry.get("by_region", {}).items()),
        in_pod=entry.get("in_pod"),
    )


def _value(value: Any, unit: str) -> Any:
    """Lists as tuples, tables as pairs (states are numbers), bytes as whole numbers."""
    if isinstance(value, dict):
        return tuple((int(k) if k.isdigit() else k, item) for k, item in value.items())
    if isinstance(value, list):
        return tuple(value)
    return int(value) if unit == "B" else value


def _chip(name: str, table: dict[str, Any], figures: dict[str, Figure]) -> Chip:
    numbers = {k: f.value for k, f in figures.items() if not k.startswith(_PRICE)}
    prices = {
        k.removeprefix(f"{_PRICE}."): f.value for k, f in figures.items() if k.startswith(_PRICE)
    }
    return Chip(
        name=name,
        kind=ChipKind(table["kind"]),
        slice_rule=_rule(table["slices"]) if "slices" in table else None,
        machines=tuple(table.get("machines", {}).items()),
        usd_per_chip_hour=Prices(**prices),
        figures=MappingProxyType(dict(figures)),
        **{key: table[key] for key in _PLAIN if key in table},
        **{key: tuple(table[key]) for key in _NAMES if key in table},
        **numbers,
    )


def _rule(table: dict[str, Any]) -> SliceRule:
    wrap = table["wrap"]
    renamed = {"unit", "sizes", "wrap", "source"}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k not in renamed
    }
    return SliceRule(
        counts=Counts(table["unit"]),
        sizes=Sizes(table["sizes"]),
        wrap_full_axis=wrap.get("full_axis"),
        wrap_cube=wrap.get("cube"),
        sources=tuple(table["source"]),
        **values,
    )


def _user_entries(
    path: Path, figures: dict[str, Any], tables: dict[str, Any]
) -> list[tuple[str, str, Any]]:
    """Entries that the user's file replaces, checked: (chip, field, entry)."""
    try:
        user = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise OptionError(f"{path} is not readable as TOML ({error}); correct it") from error
    if odd := [key for key in user if key not in ("chips", "sources", "fields")]:
        raise OptionError(f"{path} has a table [{odd[0]}]; prices and power go under [chips.NAME]")
    user_chips = user.get("chips", {})
    for key, table in [("chips", user_chips), *_tables_under(user_chips)]:
        if not isinstance(table, dict):
            raise OptionError(f"{path}: {key} is not a table; write [chips.NAME] and fields below")
    prices = [field for field in tables["fields"] if field.startswith(_PRICE)]
    allowed = [*OVERRIDABLE, *prices]
    entries = []
    for name, table in user_chips.items():
        if name not in figures:
            raise OptionError(
                f"{path} has [chips.{name}], which is no chip{nearest(name, figures)}; "
                "systolic chips lists them"
            )
        for field, entry in _entries(table):
            if field not in allowed:
                what = "cannot be replaced" if field in tables["fields"] else "does not exist"
                raise OptionError(
                    f"{path}: the field {field} of {name} {what}{nearest(field, allowed)}; "
                    f"these can be replaced: {', '.join(allowed)}"
                )
            entries.append((name, field, entry))
    return entries


def _tables_under(user_chips: Any) -> list[tuple[str, Any]]:
    if not isinstance(user_chips, dict):
        return []
    return [(f"chips.{name}", table) for name, table in user_chips.items()]


def _user_figure(path: Path, field: str, entry: Any, units: dict[str, Any]) -> Figure:
    table = entry if isinstance(entry, dict) else {"value": entry}
    value = table.get("value")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise OptionError(
            f"{path}: {field} is {value!r}; give a number of at least 0, in {units[field]['unit']}"
        )
    as_of = str(table.get("as_of", ""))
    return Figure(
        field=field,
        value=value,
        unit=units[field]["unit"],
        text=units[field]["text"],
        sources=(Citation(key=YOURS, text=f"your catalogue {path}", url="", as_of=as_of),),
        as_of=as_of,
        note=str(table.get("note", "")),
        region=str(table.get("region", "")),
    )
