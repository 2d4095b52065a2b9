"""``systolic chips``: the catalogue, one chip or one slice, and how it is printed."""

import json as jsonlib
from dataclasses import asdict, dataclass
from typing import Any

from systolic.chips.catalogue import chip, chips, user_file
from systolic.chips.flags import Flag, shared_flags
from systolic.chips.record import Chip
from systolic.chips.slices import Slice, named_slices, slice
from systolic.core.arguments import command_of
from systolic.core.errors import NotFoundError, nearest


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All chips."""

    chips: tuple[Chip, ...]
    user_file: str | None
    """Path of the file with the user's prices and power; None without one."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "chips": [known.to_json() for known in self.chips],
            "user_catalogue": self.user_file,
        }


@dataclass(frozen=True, kw_only=True)
class ChipEntry:
    """One chip of the catalogue."""

    chip: Chip
    slices: tuple[Slice, ...]
    """Slices that have a name."""
    flags: tuple[Flag, ...]
    """Compiler flags of every job on it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        slices = [each.to_json() for each in self.slices]
        return self.chip.to_json() | {"slices": slices, "flags": [asdict(f) for f in self.flags]}


@command_of
def look_up(name: str | None = None) -> Catalogue | ChipEntry | Slice:
    """The catalogue of chips and slices, each number with its source.

    Prices and power can be replaced in ~/.config/systolic/catalogue.toml, or in the file that
    $SYSTOLIC_CATALOGUE names: [chips.v5e] usd_per_chip_hour.on_demand = 0.95

    Args:
        name: A chip (v5e, tpu7x, h200, cpu) or a slice (v5e-16, v5p:4x4x8, 2xv5e-256, 8xh100).

    Raises:
        NotFoundError: there is no such chip or slice; names the nearest.
    """
    if name is None:
        path = user_file()
        return Catalogue(chips=tuple(chips()), user_file=None if path is None else str(path))
    folded = name.strip().lower()
    names = [alias for known in chips() for alias in (known.name, *known.aliases)]
    if folded in names:
        known = chip(folded)
        return ChipEntry(
            chip=known, slices=tuple(named_slices(known)), flags=tuple(shared_flags(known))
        )
    try:
        return slice(name)
    except NotFoundError as error:
        if "-" in folded or ":" in folded or "x" in folded:
            raise
        raise NotFoundError(
            f"there is no chip or slice {name!r}{nearest(folded, names)}; systolic chips lists them"
        ) from error


def show(entry: "Catalogue | ChipEntry | Slice", *, json: bool = False) -> int:
    """Prints the catalogue, a chip or a slice; returns the exit code.

    Args:
        entry: What the catalogue has.
        json: Print one JSON object.
    """
    if json:
        print(jsonlib.dumps(entry.to_json(), indent=2, ensure_ascii=False))
        return 0
    from systolic.chips.tables import print_entry

    print_entry(entry)
    return 0
