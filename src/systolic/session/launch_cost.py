"""The bill after a launch: hours that its machines were there, and what they cost at the catalogue's price. An estimate."""

import datetime
from dataclasses import dataclass
from typing import Any

from systolic.session.launched import LOCAL, TIMES, Launched

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """What a launch has used."""

    hours: float
    usd_per_hour: float
    """Of a server for its fewest pods."""
    since: str
    """What the hours are counted from."""
    at_most: bool = False
    """Whether the launch may have ended long ago, which this machine does not see."""
    usd_per_hour_most: float | None = None
    """Of a server for its most pods: how many there were is not seen here either."""

    @property
    def usd(self) -> float:
        """Hours at their price."""
        return self.hours * self.usd_per_hour

    @property
    def usd_most(self) -> float | None:
        """As :attr:`usd`, for the most pods."""
        most = self.usd_per_hour_most
        return None if most is None else self.hours * most

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "used_hours": self.hours,
            "used_usd": self.usd,
            "used_usd_most": self.usd_most,
            "used_since": self.since,
            "used_at_most": self.at_most,
        }

    def text(self) -> str:
        """One line."""
        used, price = f"${self.usd:,.2f}", f"${self.usd_per_hour:,.2f}"
        if self.usd_most is not None:
            used += f" to ${self.usd_most:,.2f}"
            price += f" to ${self.usd_per_hour_most:,.2f} an hour, for the fewest pods and the most"
        return f"{used} used: {self.hours:,.2f} h {self.since} at {price}; an estimate, the invoice counts"


def cost(launched: Launched, now: float) -> LaunchCost | None:
    """What a launch has used; None where it rents nothing, at no price of the catalogue, or where its folder is gone.

    Args:
        launched: The launch.
        now: Seconds since 1970.
    """
    price = launched.bill["usd_per_hour"]
    if launched.trouble or launched.via == LOCAL or price is None or launched.submitted is None:
        return None
    begun = datetime.datetime.fromisoformat(launched.submitted).timestamp()
    times = launched.path / TIMES
    if launched.detached:
        text = times.read_text() if times.exists() else ""
        hours = _up(text, begun, now, _slices(launched.slice)) / HOUR
        return LaunchCost(hours=hours, usd_per_hour=price, since="with the machines there")
    end = now
    if launched.stopped is not None:
        end = datetime.datetime.fromisoformat(launched.stopped).timestamp()
    since = (
        "from submit to stop" if launched.stopped else "since it was submitted, if it still runs"
    )
    hours = max(0.0, end - begun) / HOUR
    return LaunchCost(
        hours=hours,
        usd_per_hour=price,
        since=since,
        at_most=launched.stopped is None,
        usd_per_hour_most=launched.bill.get("usd_per_hour_most"),
    )


def _slices(name: str) -> int:
    count, times, _ = name.partition("x")
    return int(count) if times and count.isdigit() else 1


def _up(text: str, begun: float, now: float, slices: int) -> float:
    """Seconds between each ``up`` and the ``down`` after it, of this submission; those with fewer slices in part."""
    total, up, share = 0.0, None, 1.0
    for line in text.splitlines():
        what, seconds, *there = (*line.split(" "), "")[:3]
        if not seconds.isdigit() or float(seconds) < begun - 1:
            continue
        if what == "up" and up is None:
            up = float(seconds)
            share = int(there[0]) / slices if there[0].isdigit() else 1.0
        elif what == "down" and up is not None:
            total, up = total + share * (float(seconds) - up), None
    return total if up is None else total + share * (now - up)
