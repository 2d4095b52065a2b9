"""Cost of a launch so far: hours of its machines times the catalogue's price. An estimate."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.launching.record import ENDED, LOCAL, TIMES, Launched
from systolic.report.figures import plural

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """Cost of a launch so far."""

    hours: float
    usd_per_hour: float
    """Price per hour; of a server for the minimum number of pods."""
    since: str
    """How the hours are counted."""
    at_most: bool = False
    """Whether the cost is an upper bound: the launch, or its machines, may have ended, which this machine does not see."""
    usd_per_hour_most: float | None = None
    """Price per hour of a server for the maximum number of pods; this machine does not see how many run."""

    earlier: Sequence["LaunchCost"] = ()
    """Costs of earlier submissions."""

    @property
    def usd(self) -> float:
        """Cost of all submissions in US dollars."""
        return self.hours * self.usd_per_hour + sum(one.usd for one in self.earlier)

    @property
    def usd_most(self) -> float | None:
        """Like :attr:`usd`, for the maximum number of pods."""
        most = self.usd_per_hour_most
        if most is None:
            return None
        return self.hours * most + sum(one.usd_most or one.usd for one in self.earlier)

    @property
    def hours_in_all(self) -> float:
        """Hours of all submissions."""
        return self.hours + sum(one.hours for one in self.earlier)

    def to_json(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "used_hours": self.hours_in_all,
            "used_usd": self.usd,
            "used_usd_most": self.usd_most,
            "used_since": self.since,
            "used_at_most": self.at_most or any(one.at_most for one in self.earlier),
            "used_submissions": 1 + len(self.earlier),
        }

    def text(self) -> str:
        """One line."""
        used, price = f"${self.usd:,.2f}", f"${self.usd_per_hour:,.2f}"
        if self.usd_most is not None:
            used += f" to ${self.usd_most:,.2f}"
            price += f" to ${self.usd_per_hour_most:,.2f} an hour, by the number of pods"
        before = ""
        if self.earlier:
            hours = self.hours_in_all - self.hours
            before = f", and {hours:,.2f} h in {plural(len(self.earlier), 'earlier submission')}"
        return f"{used} used: {self.hours:,.2f} h {self.since} at {price}{before}; an estimate, the invoice decides"


def cost(launched: Launched, now: float) -> LaunchCost | None:
    """Cost of all submissions of a launch so far.

    None if it rents nothing, the catalogue has no price, or the folder is missing.

    Args:
        launched: The launch.
        now: Seconds since 1970.
    """
    if launched.trouble or launched.via == LOCAL or launched.submitted is None:
        return None
    watched = launched.detached and (launched.alive() or (launched.path / ENDED).exists())
    found = _of_one(launched, now, watched=watched)
    if found is None:
        return None
    names = {"slice": str, "bill": dict, "submitted": str}
    before = []
    for each in launched.earlier:
        if not all(isinstance(each.get(name), kind) for name, kind in names.items()):
            continue  # of another version
        given = {name: each.get(name) for name in (*names, "stopped")}
        given["untouched"] = bool(each.get("untouched"))
        one = _of_one(replace(launched, **given), _seconds(each["until"]), watched=False)
        before += [] if one is None else [one]
    return replace(found, earlier=before)


def _of_one(launched: Launched, now: float, *, watched: bool) -> LaunchCost | None:
    """Cost of one submission until ``now``.

    Args:
        launched: The launch, with the fields of the submission.
        now: Seconds since 1970.
        watched: Whether its script is running or has recorded its end; otherwise it may have missed the end of machines.
    """
    price = launched.bill["usd_per_hour"]
    if price is None or launched.submitted is None:
        return None
    if launched.untouched:
        since = "since submitting failed before anything was created,"
        return LaunchCost(hours=0.0, usd_per_hour=price, since=since)
    begun = _seconds(launched.submitted)
    times = launched.path / TIMES
    if launched.detached:
        text = times.read_text() if times.exists() else ""
        seconds, up = _up(text, begun, now, _slices(launched.slice))
        unseen = up and not watched
        since = "of machine time" + (", if the machines still exist," if unseen else "")
        return LaunchCost(hours=seconds / HOUR, usd_per_hour=price, since=since, at_most=unseen)
    end = now if launched.stopped is None else _seconds(launched.stopped)
    since = "from submit to stop" if launched.stopped else "since submission, if still running"
    hours = max(0.0, end - begun) / HOUR
    return LaunchCost(
        hours=hours,
        usd_per_hour=price,
        since=since,
        at_most=launched.stopped is None,
        usd_per_hour_most=launched.bill.get("usd_per_hour_most"),
    )


def _seconds(time: str) -> float:
    """Converts a time in UTC to seconds since 1970."""
    return datetime.datetime.fromisoformat(time).timestamp()


def _slices(name: str) -> int:
    count, times, _ = name.partition("x")
    return int(count) if times and count.isdigit() else 1


def _up(text: str, begun: float, now: float, slices: int) -> tuple[float, bool]:
    """Seconds from each ``up`` to the next ``down`` between ``begun`` and ``now``, weighted by the share of slices.

    Also returns whether no ``down`` followed the last ``up``.
    """
    total, up, share = 0.0, None, 1.0
    for line in text.splitlines():
        what, seconds, *there = (*line.split(" "), "")[:3]
        if not seconds.isdigit() or not begun - 1 <= float(seconds) <= now:
            continue
        if what == "up" and up is None:
            up = float(seconds)
            share = int(there[0]) / slices if there[0].isdigit() else 1.0
        elif what == "down" and up is not None:
            total, up = total + share * (float(seconds) - up), None
    return (total, False) if up is None else (total + share * (now - up), up < now)
