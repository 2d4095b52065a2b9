"""Slices that a launch still has, and when one of them is given up."""

import enum
from dataclasses import dataclass, field


class Next(enum.Enum):
    """What follows the death of a process."""

    restart = "restart"
    """All start again, which counts."""
    wait = "wait"
    """All start again, in case the slice is back."""
    without = "without"
    """The others go on."""


@dataclass(kw_only=True)
class Remaining:
    """Slices that have not been left out.

    Args:
        slices: At the start.
        min_slices: As many go on where others do not come back; None waits for all.
        rejoin_seconds: From the loss of a slice until it is left out, unless it has lived that long again.
    """

    slices: int = 1
    min_slices: int | None = None
    rejoin_seconds: float = 0.0
    left_out: list[int] = field(default_factory=list, init=False)
    _down: int | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)

    @property
    def present(self) -> list[int]:
        """Numbers of the slices that are left."""
        return [number for number in range(self.slices) if number not in self.left_out]

    def killed(self, place: int, now: float, lived_seconds: float) -> Next:
        """What follows after a process of a slice was killed before any other.

        Args:
            place: Of the slice among those present.
            now: Seconds of any clock.
            lived_seconds: For which the process had run.
        """
        number = self.present[place]
        if self.min_slices is None or len(self.present) <= self.min_slices:
            return Next.restart
        again = number == self._down and lived_seconds <= self.rejoin_seconds
        if not again:
            self._down, self._since = number, now
        if now - self._since < self.rejoin_seconds:
            return Next.wait if again else Next.restart
        self.left_out.append(number)
        return Next.without
