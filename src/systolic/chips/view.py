"""Output of ``systolic chips``."""

import json as jsonlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from systolic.chips.command import Catalogue, ChipEntry
    from systolic.chips.slices import Slice


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
