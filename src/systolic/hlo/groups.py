"""Collectives: their opcodes, the devices that each joins, and the transfers between slices that libtpu's ``_xla_megascale_*`` attributes describe."""

import itertools
import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from systolic.core.errors import DataError
from systolic.hlo.module import Instruction

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\]")
_AXIS = re.compile(r"'([^']+)'\s*=\s*(\d+)")
_TURNED = re.compile(r"device_ids=\(?\[([\d,]+)\]T\(([\d,]+)\)")
"""All devices in order, as an array of that shape, transposed."""
_NAMES = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
"""Opcodes without the suffixes ``-start`` and ``-done`` of their asynchronous halves."""
SLICE = 100_000
"""A device's number in a target is its slice, from 1, times this, plus its number in the slice."""
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})')
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_NUMBERS = r"\{(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)\}"
_PRODUCT = re.compile(rf'"{_NUMBERS}x{_NUMBERS}"')
_GROUPS = re.compile(r"\{(\{\d+(,\d+)*\}(,\{\d+(,\d+)*\})*)\}")
_PAIRS = re.compile(r"\{(\{\d+->\d+\}(,\{\d+->\d+\})*)\}")


@dataclass(frozen=True, slots=True)
class Groups:
    """Device numbers (partition ids), a tuple each group."""

    groups: tuple[tuple[int, ...], ...]
    pairs: bool = False
    """Whether each is a (source, target) pair of a permute."""

    @property
    def size(self) -> int:
        """Devices of the largest group."""
        return max((len(group) for group in self.groups), default=1)


def groups_of(instruction: Instruction, num_devices: int) -> Groups:
    """The groups of a collective; all devices in one group when it names none."""
    pairs = instruction.attribute("source_target_pairs")
    if pairs is not None:
        return Groups(_lists(pairs), pairs=True)
    text = _groups_text(instruction.rest)
    if text is None:
        return Groups((tuple(range(num_devices)),))
    return parse_groups(text, num_devices)


def _groups_text(rest: str) -> str | None:
    start = rest.find("replica_groups=")
    if start < 0:
        return None
    text = rest[start + len("replica_groups=") :]
    # The mesh form has a space inside: mesh['a'=2,'b'=8] {'b'}
    if text.startswith("mesh"):
        end = text.find("}", text.find("]"))
        return text[: end + 1]
    if text.startswith("["):
        match = _IOTA.match(text)
        return match[0] if match else None
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[: index + 1]
    return None


def parse_groups(text: str, num_devices: int) -> Groups:
    """``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)`` or ``mesh['a'=2,'b'=4] {'b'}``.

    Raises:
        DataError: it is none of these.
    """
    text = text.strip()
    try:
        return _parsed(text, num_devices)
    except ValueError as error:
        raise DataError(
            f"the device groups {text[:60]!r} contradict themselves ({error}); the text may be damaged"
        ) from error


def _parsed(text: str, num_devices: int) -> Groups:
    if text.startswith("mesh"):
        return Groups(_of_mesh(text))
    if match := _IOTA.match(text):
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in match.groups()
        )
        assert shape is not None
        assert dims is not None
        ids = np.arange(math.prod(dims)).reshape(dims)
        if order is not None:
            ids = ids.transpose(order)
        return Groups(tuple(map(tuple, ids.reshape(shape).tolist())))
    if text in ("{}", ""):
        return Groups((tuple(range(num_devices)),))
    if text.startswith("{"):
        return Groups(_lists(text))
    raise DataError(f"{text[:60]!r} is not a list of device groups; the text may be damaged")


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(n) for n in part.split(",") if n.strip())
        for part in re.findall(r"\{([\d,\s]*)\}", text[1:-1] if text.startswith("{{") else text)
    )


def _of_mesh(text: str) -> tuple[tuple[int, ...], ...]:
    head = _MESH.match(text)
    if head is None:
        raise DataError(f"{text[:60]!r} is not a mesh of device groups; the text may be damaged")
    axes = [(name, int(size)) for name, size in _AXIS.findall(head[1])]
    names = [name for name, _ in axes]
    sizes = [size for _, size in axes]
    tail = text[head.end() :]
    ids = np.arange(math.prod(sizes))
    device_ids = re.search(r"device_ids=\(?\[?([\d,\s]+)\]?\)?", tail)
    if turned := _TURNED.search(tail):
        shape, order = ([int(n) for n in part.split(",")] for part in turned.groups())
        ids = ids.reshape(shape).transpose(order).reshape(-1)
    elif device_ids:
        listed = [int(n) for n in device_ids[1].split(",") if n.strip()]
        if len(listed) == len(ids):
            ids = np.array(listed)
    braces = re.search(r"\{([^}]*)\}", tail)
    picked = [
        (names.index(name), int(before or 1), int(size or sizes[names.index(name)]))
        for name, before, size in _NAMES.findall(braces[1] if braces else "")
    ]
    # A part of an axis is written 'x':(before)size; cut each axis wherever a part begins or ends.
    cuts = [
        sorted({1, size, *(c for at, b, s in picked if at == axis for c in (b, b * s))})
        for axis, size in enumerate(sizes)
    ]
    pieces = [(axis, cut) for axis, row in enumerate(cuts) for cut in row[:-1]]
    lengths = [after // cut for row in cuts for cut, after in itertools.pairwise(row)]
    used = [
        pieces.index((at, cut))
        for at, before, size in picked
        for cut in cuts[at]
        if before <= cut < before * size
    ]
    others = [n for n in range(len(pieces)) if n not in used]
    moved = ids.reshape(lengths).transpose(others + used)
    return tuple(map(tuple, moved.reshape(-1, math.prod(lengths[n] for n in used)).tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A collective between slices."""

    kind: str
    """``ALL_REDUCE``, ``ALL_GATHER``, ``REDUCE_SCATTER``, ``ALL_TO_ALL`` or ``ONE_TO_ONE``."""
    devices: tuple[tuple[int, ...], ...]
    """The members of each group, numbered as in a target; (source, target) of ``ONE_TO_ONE``."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The slices of the members, each distinct group once."""
        return tuple(
            dict.fromkeys(tuple(number // SLICE for number in group) for group in self.devices)
        )

    @property
    def slices(self) -> frozenset[int]:
        """Slices that have a member, from 1."""
        return frozenset(number // SLICE for group in self.devices for number in group)


def crosses(transfer: Instruction) -> bool:
    """Whether the multi-slice runtime handles a ``send`` or ``recv``."""
    return "_xla_megascale_" in transfer.rest


def crossing_of(transfer: Instruction) -> Crossing | None:
    """The collective that a ``send`` or ``recv`` belongs to; None where its attributes are not understood.

    libtpu 0.0.42.1 writes the target as ``"{1,2,3,4}x{0:15}"`` (slices times devices: each device with its namesakes), as
    groups of devices ``{{100000,200000},{100001,200001}}`` or as pairs ``{{100000->200000},{200000->100000}}``, where 100000
    is device 0 of slice 1.
    """
    kind, target = _TYPE.search(transfer.rest), _TARGET.search(transfer.rest)
    if kind is None or target is None:
        return None
    return _crossing(kind[1], target[1].replace(" ", ""))


@lru_cache(maxsize=64)
def _crossing(kind: str, text: str) -> Crossing | None:
    """The same value for the same target, which can list thousands of devices, of each layer's transfer."""
    devices = _devices(text)
    return None if devices is None else Crossing(kind=kind, devices=devices)


def _devices(text: str) -> tuple[tuple[int, ...], ...] | None:
    if product := _PRODUCT.fullmatch(text):
        slices, numbers = _numbers(product[1]), _numbers(product[2])
        return tuple(tuple(n * SLICE + number for n in slices) for number in numbers)
    if _GROUPS.fullmatch(text):
        texts = re.findall(r"\{([\d,]+)\}", text[1:-1])
        return tuple(tuple(map(int, group.split(","))) for group in texts)
    if _PAIRS.fullmatch(text):
        return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+)->(\d+)", text))
    return None


def _numbers(text: str) -> list[int]:
    """``1,2,5:7`` in full."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
