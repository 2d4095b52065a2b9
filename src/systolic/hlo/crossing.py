"""Content of a ``send`` or ``recv`` between slices: libtpu's ``_xla_megascale_*`` attributes.

A collective between slices is one pair of them for the runtime. libtpu 0.0.42.1 writes its target as
``"{1,2,3,4}x{0:15}"`` (slices times devices: each device with its namesakes), as groups of devices
``{{100000,200000},{100001,200001}}`` or as pairs ``{{100000->200000},{200000->100000}}``, where
100000 is device 0 of slice 1.
"""

import re
from dataclasses import dataclass

from systolic.hlo.module import Instruction

SLICE = 100_000
"""A device's number in a target is its slice, from 1, times this, plus its number in the slice."""

_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})')
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_NUMBERS = r"\{(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)\}"
_PRODUCT = re.compile(rf'"{_NUMBERS}x{_NUMBERS}"')
_GROUPS = re.compile(r"\{(\{\d+(,\d+)*\}(,\{\d+(,\d+)*\})*)\}")
_PAIRS = re.compile(r"\{(\{\d+->\d+\}(,\{\d+->\d+\})*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A collective between slices."""

    kind: str
    """``ALL_REDUCE``, ``ALL_GATHER``, ``REDUCE_SCATTER``, ``ALL_TO_ALL`` or ``ONE_TO_ONE``."""
    groups: tuple[tuple[int, ...], ...]
    """The slice of each member, group by group; (source, target) of ``ONE_TO_ONE``."""


def crosses(transfer: Instruction) -> bool:
    """Whether the multi-slice runtime handles a ``send`` or ``recv``."""
    return "_xla_megascale_" in transfer.rest


def crossing_of(transfer: Instruction) -> Crossing | None:
    """The collective that a ``send`` or ``recv`` belongs to; None where its attributes are not understood."""
    kind, target = _TYPE.search(transfer.rest), _TARGET.search(transfer.rest)
    if kind is None or target is None:
        return None
    groups = _groups(target[1].replace(" ", ""))
    return None if groups is None else Crossing(kind=kind[1], groups=groups)


def _groups(text: str) -> tuple[tuple[int, ...], ...] | None:
    if product := _PRODUCT.fullmatch(text):
        return (tuple(_numbers(product[1])),)
    if _GROUPS.fullmatch(text):
        found = re.findall(r"\{([\d,]+)\}", text[1:-1])
        return tuple(tuple(int(n) // SLICE for n in group.split(",")) for group in found)
    if _PAIRS.fullmatch(text):
        found = re.findall(r"(\d+)->(\d+)", text)
        return tuple((int(a) // SLICE, int(b) // SLICE) for a, b in found)
    return None


def _numbers(text: str) -> list[int]:
    """``1,2,5:7`` in full."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found
