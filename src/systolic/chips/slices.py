"""Slices by name: ``v5e-16``, ``v5p:4x4x8``, ``2xv5e-256``, ``8xh100``, ``8xcpu``."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, NoReturn

from systolic.chips.catalogue import chip as find_chip
from systolic.chips.catalogue import chips
from systolic.chips.record import Chip, ChipKind, Counts, Prices, Shape, SliceRule
from systolic.core.arguments import Wording, with_types
from systolic.core.errors import NotFoundError

_ODD_COUNT = re.compile(r"[-+]?[\d.]+x")
_COUNTED = re.compile(r"(\d+)x(.+)", re.DOTALL)
_NUMBERED = re.compile(r"(.+)-(\d+)", re.DOTALL)
_SHAPED = re.compile(r"([^:]+):(\d+(?:x\d+)*)")
_LONGEST_NAME = 80
PRICE = "usd_per_chip_hour."
_DCN = "dcn_bytes_per_second_per_host"
_HELP = "systolic chips NAME lists a chip's slices"
SLICE = Wording("a slice or its name, such as 'v5e-16'")
SLICES = Wording("slices or their names, such as 'v6e-8,v5e-8'")
"""Wording of parameters that take slices, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Chips that are rented and linked together. All ``num_*`` count all slices together.

    ``topology`` and ``wrap`` describe one of the ``num_slices``: chips along each axis of the
    interconnect and whether that axis has wraparound links. ``topology_name``,
    ``chip_config_name`` and ``chips_per_host_bounds`` are what libtpu takes to describe it.

    A v5e or v6e slice of eight chips is one machine of eight; larger ones are machines of four. For libtpu
    ``chips_per_host_bounds`` stays 2x2 there, as MaxText's table has it, and GKE has a node pool of two
    machines of four for it too, which ``systolic launch`` trains on.
    """

    name: str
    chip: Chip
    topology: Shape
    num_chips: int
    num_devices: int
    num_hosts: int
    num_slices: int
    wrap: tuple[bool, ...]
    platform: str
    topology_name: str | None = None
    chip_config_name: str | None = None
    chips_per_host_bounds: Shape | None = None

    @property
    def usd_per_hour(self) -> Prices:
        """Price of all chips; each kind is ``None`` where the catalogue has none."""
        prices = self.chip.usd_per_chip_hour.times(self.num_chips)
        pods = {
            kind: self.rate(kind)[0]
            for kind in prices.to_json()
            if (figure := self.chip.figures.get(f"{PRICE}{kind}")) is not None
            and figure.in_pod is not None
        }
        return replace(prices, **pods)

    def rate(self, kind: str, zone: str = "") -> tuple[float | None, str, str]:
        """Price of all chips in a zone: dollars an hour, the region that the price is of, and its date.

        Args:
            kind: ``on_demand``, ``spot`` or ``committed``.
            zone: Google Cloud's; empty for the region that the catalogue has first.
        """
        figure = self.chip.figures.get(f"{PRICE}{kind}")
        if figure is None:
            return None, "", ""
        pod = self.num_chips // self.num_slices > (self.chip.chips_per_host or 1)
        usd, region = figure.rate(zone, pod=pod)
        return usd * self.num_chips, region, figure.as_of

    @property
    def power_watts(self) -> float | None:
        """Mean power of all chips in use, hosts not counted; ``None`` if unknown."""
        return None if self.chip.power_watts is None else self.chip.power_watts * self.num_chips

    @property
    def tdp_watts(self) -> float | None:
        """Thermal design power of all chips; ``None`` if unknown."""
        return None if self.chip.tdp_watts is None else self.chip.tdp_watts * self.num_chips

    @property
    def hbm_bytes(self) -> int | None:
        """Device memory of all chips; ``None`` if unknown."""
        return None if self.chip.hbm_bytes is None else self.chip.hbm_bytes * self.num_chips

    @property
    def program_bytes(self) -> int:
        """Memory that a program may use on one JAX device: the compiler's limit, else what is built in; 0 if unknown."""
        limit = self.chip.program_bytes_per_device
        if limit is not None:
            return limit
        return (self.chip.hbm_bytes or 0) // (self.chip.devices_per_chip or 1)

    @property
    def devices_per_slice(self) -> int:
        """JAX devices in one of the slices."""
        return self.num_devices // self.num_slices

    def to_json(self) -> dict[str, Any]:
        """The slice as plain JSON values; the chip by its name."""
        bounds = self.chips_per_host_bounds
        return {
            "name": self.name,
            "chip": self.chip.name,
            "topology": list(self.topology),
            "num_chips": self.num_chips,
            "num_devices": self.num_devices,
            "num_hosts": self.num_hosts,
            "num_slices": self.num_slices,
            "wrap": list(self.wrap),
            "platform": self.platform,
            "topology_name": self.topology_name,
            "chip_config_name": self.chip_config_name,
            "chips_per_host_bounds": None if bounds is None else list(bounds),
            "hbm_bytes": self.hbm_bytes,
            "usd_per_hour": self.usd_per_hour.to_json(),
            "power_watts": self.power_watts,
            "tdp_watts": self.tdp_watts,
        }


@with_types
def slice(name: str) -> Slice:
    """The slice of that name.

    ``v5e-16`` (chips), ``v5p-128`` (TensorCores, as Google names them), ``v5p:4x4x8`` (a shape),
    ``2xv5e-256`` (two slices over the data-centre network), ``8xh100`` and ``h200`` (GPUs), ``2xa3-mega`` (two of
    Google's machines of eight, with their network),
    ``cpu`` and ``8xcpu`` (virtual devices on this machine).

    Raises:
        NotFoundError: there is no such slice; the message names the nearest one.
    """
    text = name.strip().lower()
    if not text or len(text) > _LONGEST_NAME:
        raise NotFoundError(f"{name[:_LONGEST_NAME]!r} is not the name of a slice; {_HELP}")
    counted = _COUNTED.fullmatch(text)
    count, body = (int(counted[1]), counted[2]) if counted else (1, text)
    if count < 1:
        raise NotFoundError(f"{name} has no chips; the count before the x is at least 1")
    for known in chips():
        if body in (known.name, *known.aliases):
            return _of_whole_chips(name, known, count)
        for machine, size in known.machines:
            if body == machine:
                return _of_machines(name, known, machine, size, count)
    if shaped := _SHAPED.fullmatch(body):
        shape = tuple(int(axis) for axis in shaped[2].split("x"))
        return _of_shape(name, _chip_with_rule(name, shaped[1], shaped[2]), shape, count)
    if numbered := _NUMBERED.fullmatch(body):
        number = int(numbered[2])
        known = _chip_with_rule(name, numbered[1], number)
        rule = known.slice_rule
        assert rule is not None
        sizes = {_number(known, rule, n): n for n in rule.named_chips()}
        if number not in sizes:
            _refuse_number(name, known, number, list(sizes), count)
        return _of_shape(name, known, rule.shape(sizes[number]), count)
    names = [alias for c in chips() for alias in (c.name, *c.aliases)]
    near = _most_alike(body, names)
    nearest = "" if near is None else (near if count == 1 else f"{count}x{near}")
    if near is not None and not counted and _ODD_COUNT.match(text):
        raise NotFoundError(
            f"{name} begins with a count that is no whole number of 1 and more, as in 8x{near}; {_HELP}"
        )
    hint = f"; did you mean {nearest}?" if nearest else "; a name is like v5e-16, 8xh100 or cpu;"
    raise NotFoundError(f"{name} is not the name of a slice{hint} {_HELP}")


def named_slices(known: Chip) -> list[Slice]:
    """The slices of a chip that have a name, smallest first; for a GPU one and a full host."""
    if known.slice_rule is not None:
        rule = known.slice_rule
        return [_of_shape(known.name, known, rule.shape(n), 1) for n in rule.named_chips()]
    if known.kind is ChipKind.gpu:
        return [
            _of_whole_chips(known.name, known, n) for n in sorted({1, known.chips_per_host or 1})
        ]
    return [_of_whole_chips(known.name, known, 1)] if known.kind is ChipKind.cpu else []


def _number(known: Chip, rule: SliceRule, num_chips: int) -> int:
    """The number in the name of that many chips."""
    return num_chips * (known.num_cores or 1) if rule.counts is Counts.cores else num_chips


def _of_shape(typed: str, known: Chip, shape: Shape, count: int) -> Slice:
    rule = known.slice_rule
    assert rule is not None
    text = "x".join(map(str, shape))
    num_chips = prod(shape)
    near = _nearest_number(known, _number(known, rule, max(1, num_chips)))
    if num_chips < 1 or (problem := rule.problem(shape)):
        why = problem if num_chips else "an axis has at least 1 chip"
        raise NotFoundError(f"{typed} does not exist: {why}; did you mean {near}? {_HELP}")
    named = num_chips in rule.named_chips() and shape == rule.shape(num_chips)
    single = f"{known.name}-{_number(known, rule, num_chips)}" if named else f"{known.name}:{text}"
    bounds = (1, 1, 1) if num_chips == 1 else (2, 2, 1)
    whole = num_chips <= (known.chips_per_host or 1)
    return Slice(
        name=single if count == 1 else f"{count}x{single}",
        chip=known,
        topology=shape,
        num_chips=num_chips * count,
        num_devices=num_chips * (known.devices_per_chip or 1) * count,
        num_hosts=(1 if whole else num_chips // prod(bounds)) * count,
        num_slices=count,
        wrap=rule.wrap(shape),
        platform="tpu",
        topology_name=f"{rule.topology_prefix}:{text}",
        chip_config_name=rule.chip_config_name,
        chips_per_host_bounds=bounds,
    )


def _of_whole_chips(typed: str, known: Chip, count: int) -> Slice:
    """GPUs in hosts, or virtual devices on this machine's CPU."""
    if known.kind is ChipKind.edge or (known.kind is ChipKind.tpu and known.slice_rule is None):
        raise NotFoundError(f"{known.name} has no slices: no source gives its shapes; {_HELP}")
    if known.kind is ChipKind.tpu:
        rule = known.slice_rule
        assert rule is not None
        names = [f"{known.name}-{_number(known, rule, n)}" for n in rule.named_chips()[:3]]
        raise NotFoundError(f"{typed} is a chip, not a slice; say how many: {', '.join(names)} …")
    per_host = known.chips_per_host or 1
    is_cpu = known.kind is ChipKind.cpu
    if not is_cpu and count > per_host and count % per_host:
        near = max(per_host, round(count / per_host) * per_host)
        raise NotFoundError(
            f"{typed} does not fill its hosts of {per_host}; did you mean {near}x{known.name}?"
        )
    return Slice(
        name=known.name if count == 1 else f"{count}x{known.name}",
        chip=known,
        topology=(count,),
        num_chips=1 if is_cpu else count,
        num_devices=count,
        num_hosts=1 if is_cpu else -(-count // per_host),
        num_slices=1,
        wrap=(False,),
        platform=known.kind.value,
    )


def _of_machines(typed: str, known: Chip, machine: str, size: int, count: int) -> Slice:
    """Whole machines of a cloud; their name stays the slice's where their network is not the chip's default."""
    networks = dict(known.machine_dcn_bytes_per_second)
    if machine not in networks:
        return _of_whole_chips(typed, known, count * size)
    figure = replace(
        known.figures["machine_dcn_bytes_per_second"],
        field=_DCN,
        value=networks[machine],
        text=known.figures[_DCN].text,
    )
    rented = replace(
        known,
        dcn_bytes_per_second_per_host=networks[machine],
        figures=MappingProxyType({**known.figures, _DCN: figure}),
    )
    name = machine if count == 1 else f"{count}x{machine}"
    return replace(_of_whole_chips(typed, rented, count * size), name=name)


def _chip_with_rule(typed: str, name: str, rest: int | str) -> Chip:
    """The TPU that a name like ``v5e-16`` begins with, or an error that names the nearest slice."""
    names = {alias: c for c in chips() for alias in (c.name, *c.aliases)}
    if name in names:
        if names[name].slice_rule is not None:
            return names[name]
        known = find_chip(name)
        if known.kind in (ChipKind.gpu, ChipKind.cpu) and isinstance(rest, int):
            raise NotFoundError(f"{typed} is not a slice; did you mean {rest}x{known.name}?")
        raise NotFoundError(f"{known.name} has no shapes to choose from; {_HELP}")
    sliced = {alias: c for alias, c in names.items() if c.slice_rule is not None}
    near = _most_alike(name, list(sliced))
    if near is None:
        raise NotFoundError(f"{typed} is not the name of a slice; systolic chips lists the chips")
    if isinstance(rest, str):
        raise NotFoundError(f"there is no chip {name!r}; did you mean {near}:{rest}? {_HELP}")
    nearest = _nearest_number(sliced[near], rest)
    raise NotFoundError(f"{typed} is not a slice; did you mean {nearest}? {_HELP}")


def _nearest_number(known: Chip, number: int) -> str:
    rule = known.slice_rule
    assert rule is not None
    sizes = [_number(known, rule, n) for n in rule.named_chips()]
    return f"{known.name}-{min(sizes, key=lambda n: (abs(n - number), -n))}"


def _refuse_number(
    typed: str, known: Chip, number: int, sizes: Sequence[int], count: int
) -> NoReturn:
    rule = known.slice_rule
    assert rule is not None
    near = _nearest_number(known, number)
    near = near if count == 1 else f"{count}x{near}"
    few = ", ".join(map(str, sizes[:4]))
    raise NotFoundError(
        f"{typed} is not a slice: {known.name} names count {rule.counts.value}, "
        f"{few} … {sizes[-1]}; did you mean {near}? {_HELP}"
    )


def _most_alike(name: str, names: Sequence[str]) -> str | None:
    """The most similar name; of equals the first in the catalogue's order."""
    scores = [difflib.SequenceMatcher(None, name, known).ratio() for known in names]
    best = max(scores, default=0.0)
    return names[scores.index(best)] if best >= 0.5 else None
