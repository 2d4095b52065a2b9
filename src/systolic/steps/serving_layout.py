"""Sharing out of a server's devices: how many engines serve a language model, and over how many devices each lies.

--layout.data 2 --layout.tensor 4      two engines on four devices each
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from systolic.core.errors import LayoutError
from systolic.core.ranges import COUNT, check
from systolic.core.units import gibibytes
from systolic.job import Layout, Residual
from systolic.job.layout import AXIS
from systolic.models.decoder.checks import check_served
from systolic.models.decoder.config import Decoder

LEAST_ROWS = 8
"""Rows of an accelerator's matmul: a decode step with fewer texts costs as much, and on a GPU more."""
ROOM = 0.9
"""Share of a device's memory for weights and pages where nothing is compiled yet; programs need the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLayout:
    """Layout of each language model that is served.

    Args:
        data: Engines, on devices of their own; -1 takes the remaining devices.
        tensor: Devices that heads, hidden units and vocabulary of an engine are split over; -1 takes the fewest that hold its weights and pages.
        expert: Ways to split the experts of a mixture.

    Raises:
        LayoutError: a number outside its range.
    """

    data: Annotated[int, AXIS] = -1
    tensor: Annotated[int, AXIS] = -1
    expert: Annotated[int, COUNT] = 1

    def __post_init__(self) -> None:
        check(self, "layout", LayoutError)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNeed:
    """Memory of an engine over some devices."""

    bytes: int
    """Weights and pages on each device."""
    capacity_bytes: int
    """Memory of a device."""

    @property
    def fits(self) -> bool:
        """Whether programs have room beside them."""
        return self.bytes <= ROOM * self.capacity_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShares:
    """Engines of a model and the devices of each."""

    devices: int
    """Devices of this machine."""
    engines: int
    tensor: int
    expert: int
    reason: str
    """Why these."""

    @property
    def each(self) -> int:
        """Devices of an engine."""
        return self.tensor * self.expert

    @property
    def idle(self) -> int:
        """Devices of none."""
        return self.devices - self.engines * self.each

    @property
    def told_idle(self) -> str:
        """Idle devices, why, and what to change; "" if there are none."""
        if not self.idle:
            return ""
        engines = "1 engine" if self.engines == 1 else f"{self.engines} engines"
        return f"{self.idle} of {self.devices} devices are idle: {engines} of {self.each} take {self.engines * self.each} ({self.reason}); take a number of devices that {self.each} divides, or another --layout.tensor that the model's sizes allow"

    @property
    def layout(self) -> Layout:
        """Layout of one engine; the stream between blocks is whole on every device, since a step has few tokens."""
        return Layout(
            data=1, fsdp=1, tensor=self.tensor, expert=self.expert, residual=Residual.whole
        )


def share(
    layout: ServingLayout,
    devices: int,
    config: Decoder,
    need: Callable[[int], EngineNeed],
) -> DeviceShares:
    """Devices of each engine of a model.

    Args:
        layout: Devices of the axes, as asked for.
        devices: Of this machine.
        config: The model.
        need: Memory of an engine by the size of its tensor axis.

    Raises:
        LayoutError: there are too few devices, or the axes do not divide the model.
    """
    least = math.prod(max(size, 1) for size in (layout.data, layout.tensor, layout.expert))
    if least > devices:
        axes = [f"layout.{name} {size}" for name, size in _sizes(layout) if size > 1]
        have = f"{devices} devices are" if devices > 1 else "1 device is"
        raise LayoutError(f"{' x '.join(axes)} needs {least} devices and {have} here; give less")
    tensor, reason = layout.tensor, "as asked for"
    if tensor == -1:
        room = devices // (max(layout.data, 1) * layout.expert)
        tensor, reason = _tensor(room, layout, config, need)
    check_served(config, Layout(data=1, fsdp=1, tensor=tensor, expert=layout.expert))
    engines = devices // (tensor * layout.expert) if layout.data == -1 else layout.data
    return DeviceShares(
        devices=devices, engines=engines, tensor=tensor, expert=layout.expert, reason=reason
    )


def _sizes(layout: ServingLayout) -> list[tuple[str, int]]:
    return [("data", layout.data), ("tensor", layout.tensor), ("expert", layout.expert)]


def _tensor(
    room: int, layout: ServingLayout, config: Decoder, need: Callable[[int], EngineNeed]
) -> tuple[int, str]:
    """The tensor axis of those that hold a model, at most ``room``, that leaves the fewest devices idle, and of these the smallest; the largest where none holds it."""
    if room == 1:
        return 1, "one device for each engine"
    needs: dict[int, EngineNeed] = {}
    for ways in range(1, room + 1):
        try:
            check_served(config, Layout(data=1, fsdp=1, tensor=ways, expert=layout.expert))
            needs[ways] = need(ways)
        except LayoutError:
            continue
        if ways == 1 and needs[1].fits:
            return 1, f"{_of(needs[1])} fit on one device"
    if not needs:
        return (
            1,
            "",
        )  # The expert axis does not divide the model, which is refused with the sizes that do.
    holding = [ways for ways, engine_need in needs.items() if engine_need.fits]
    why = f"{_of(needs[min(needs)])} do not fit on one device"
    if not holding:
        return max(needs), f"{why}; {max(needs)} is the most that divides it"
    least = holding[0]
    # Engines that were counted leave idle what they leave.
    chosen = min(holding, key=lambda ways: (room % ways if layout.data == -1 else 0, ways))
    reason = f"{why}, {_of(needs[least])} fit on {least}"
    return chosen, reason if chosen == least else f"{reason}, and {chosen} leave fewer devices idle"


def _of(need: EngineNeed) -> str:
    return f"weights and pages of {gibibytes(need.bytes)} of {gibibytes(need.capacity_bytes)}"
