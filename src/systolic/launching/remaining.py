"""Slices that a launch still uses, and when one of them is dropped."""

import enum
from dataclasses import dataclass, field


class Next(enum.Enum):
    """Action after the death of a process."""

    restart = "restart"
    """Restart all processes; counts as a restart."""
    wait = "wait"
    """Restart all processes, in case the slice is back."""
    without = "without"
    """Continue with the other slices."""


@dataclass(kw_only=True)
class Remaining:
    """Slices that have not been dropped.

    Args:
        slices: Number of slices at the start.
        min_slices: Number of slices to continue with at least; None never drops one.
        rejoin_seconds: Time from the loss of a slice until it is dropped, unless it has run for that long again.
    """

    slices: int = 1
    min_slices: int | None = None
    rejoin_seconds: float = 0.0
    left_out: list[int] = field(default_factory=list, init=False)
    _since: dict[int, float] = field(default_factory=dict, init=False)
    """Time at which each lost slice was lost; it stays lost over starts in which another one fails first."""

    @property
    def present(self) -> list[int]:
        """Indices of the slices that are left."""
        return [number for number in range(self.slices) if number not in self.left_out]

    def killed(self, place: int, now: float, lived_seconds: float) -> Next:
        """Decides what to do after a process of a slice was killed first.

        Args:
            place: Position of the slice among those present.
            now: Time of any clock in seconds.
            lived_seconds: Time for which the process ran.
        """
        number = self.present[place]
        if self.min_slices is None or len(self.present) <= self.min_slices:
            return Next.restart
        if lived_seconds > self.rejoin_seconds:
            # All others ran for as long, so they are back, too.
            self._since.clear()
        again = number in self._since
        since = self._since.setdefault(number, now)
        if now - since < self.rejoin_seconds:
            return Next.wait if again else Next.restart
        del self._since[number]
        self.left_out.append(number)
        return Next.without
