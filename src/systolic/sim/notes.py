"""Notes of a timeline: one of a kind, with the number of those like it."""

import re
from collections.abc import Iterable

_PARTICULAR = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*\.\d+(?:\.[A-Za-z]\w*)*|\d[\d.,e+]*\d|\d")
"""Parts in which two notes of a kind differ: numbered names of instructions, and numbers."""


def merged(notes: Iterable[str]) -> tuple[str, ...]:
    """The first note of each kind, in their order; notes that differ in names and numbers only are of one kind."""
    kinds: dict[str, list[str]] = {}
    for note in notes:
        kinds.setdefault(_PARTICULAR.sub("#", note), []).append(note)
    return tuple(
        first if not rest else f"{first} (and {len(rest)} more like it)"
        for first, *rest in kinds.values()
    )
