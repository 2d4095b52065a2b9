"""Trips and branches where a program asks which device it is: the slowest device decides the step.

``lax.fori_loop(0, lax.axis_index("x"), ...)`` makes another number of trips on each device. Each is known, and so is the largest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from systolic.hlo.loops import LoopCounts, LoopTrips, Shares, counted
from systolic.hlo.module import Module
from systolic.hlo.scalars import MOST_VALUES

MOST_DEVICES = 512
"""Devices up to which each is looked at."""


def counts_of(module: Module) -> LoopCounts:
    """Trips and branches of a program: of a loop those on the device that makes the most, and of a branch each device's."""
    counts, values = counted(module)
    number = module.num_partitions
    if (
        not _is_open(counts)
        or not 1 < number <= MOST_DEVICES
        or values * number > MOST_VALUES
        or not any(one.opcode == "partition-id" for c in module.computations.values() for one in c)
    ):
        return counts
    found = [counted(module, device)[0] for device in range(number)]
    apart = {
        name
        for name in counts.loops
        if len({one.loops[name] for one in found if name in one.loops}) > 1
    }
    return replace(
        counts,
        loops={
            name: _slowest(trips, [one.loops[name] for one in found if name in one.loops])
            for name, trips in counts.loops.items()
        },
        branches={
            name: _any_of(one.branches[name] for one in found if name in one.branches) or shares
            for name, shares in counts.branches.items()
        },
        by_device={
            name: held
            for name in counts.branches
            if len(held := _unlike([o.branches[name] for o in found if name in o.branches])) > 1
        },
        apart=frozenset(apart),
    )


def _is_open(counts: LoopCounts) -> bool:
    return any(not one.known for one in counts.loops.values()) or any(
        len(some) > 1 for shares in counts.branches.values() for some in shares
    )


def _slowest(whole: LoopTrips, each: Sequence[LoopTrips]) -> LoopTrips:
    """Trips of the device that makes the most; ``whole`` is what holds for any device."""
    if whole.known or not each:
        return whole
    ends = [math.inf if one.most is None else one.most for one in (whole, *each)]
    most = min(ends[0], max(ends[1:]))
    means = [one.mean for one in each if one.mean is not None]
    return LoopTrips(
        least=max(one.least for one in each),
        most=None if most == math.inf else int(most),
        mean=max(means) if len(means) == len(each) else None,
    )


def _unlike(shares: Sequence[Shares]) -> list[Shares]:
    """Each only once."""
    found: list[Shares] = []
    for one in shares:
        if one not in found:
            found.append(one)
    return found


def _any_of(shares: Iterable[Shares]) -> Mapping[tuple[int, ...], float]:
    """Branches that some device may take; with their shares where these are the same on all."""
    found = _unlike(list(shares))
    if len(found) == 1:
        return found[0]
    every = {branch for one in found for some in one for branch in some}
    return {tuple(sorted(every)): 1.0} if every else {}
