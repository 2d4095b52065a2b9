"""Drawings of a layout's mesh on the torus of its slice: the groups of each axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from systolic.chips import Slice
from systolic.job import Axis, Layout
from systolic.report import charts
from systolic.report.charts import COLOURS, Cell, Mesh
from systolic.sim.network import default_places

FEW = 4
"""Groups with a colour where there are more than :data:`COLOURS`."""
SMALL = 256
"""Most chips drawn with their places; in larger slices neighbours of a group are one block."""
SLICES = 2
"""Most slices drawn; all look alike."""
WIDTH = 480.0
"""Width of a drawing in its units."""
LARGEST_CELL = 34.0
LEGIBLE = 17.0
"""Width of a device from which its index is written on it."""
PLANE_GAP = 0.7
"""Gap between the planes of a 3D torus, as a share of a cell."""

Place = Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Drawing of one mesh axis: devices of a colour communicate along it."""

    axis: str
    size: int
    groups: int
    coloured: int
    """The groups that have a colour."""
    mesh: Mesh

    @property
    def cells(self) -> Sequence[Cell]:
        """Devices, or blocks of neighbours of one group, labelled with their index along the axis."""
        return self.mesh.cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Torus:
    """Drawings of all axes of a layout with a size above 1."""

    drawings: Sequence[Drawing]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    place: tuple[int, ...]
    """x, y, z, core, slice."""
    mesh: tuple[int, ...]
    """Its index along each mesh axis."""


def torus(on: Slice, layout: Layout, places: Sequence[Place]) -> Torus | None:
    """Drawings of a layout; None for a single device or a slice that is no torus.

    Args:
        on: The slice.
        layout: A definite layout.
        places: (x, y, z, core, slice) of each device in mesh order, from the compiler; empty where
            unknown, then the axes are laid out in order.
    """
    axes = [axis for axis in Axis if layout.size(axis) > 1]
    if on.platform != "tpu" or not axes:
        return None
    notes = []
    if len(places) != on.num_devices:
        places = default_places(on)
        notes.append(
            "the compiler's order of the devices is not known, so the axes are drawn in order"
        )
    if on.num_slices > SLICES:
        notes.append(f"{SLICES} of {on.num_slices} slices are drawn; the others are alike")
    sizes = tuple(layout.mesh_shape.values())
    devices = [
        _Device(place=tuple(place), mesh=_unravelled(index, sizes))
        for index, place in enumerate(places)
        if place[4] < SLICES
    ]
    if any(on.wrap):
        letters = [letter for letter, wraps in zip("xyz", on.wrap, strict=False) if wraps]
        notes.append(f"the links along {', '.join(letters)} wrap around")
    return Torus(
        drawings=[_drawing(on, axis, list(Axis).index(axis), sizes, devices) for axis in axes],
        notes=notes,
    )


def _drawing(
    on: Slice, axis: Axis, at: int, sizes: tuple[int, ...], devices: Sequence[_Device]
) -> Drawing:
    x, y, z = (*on.topology, 1, 1, 1)[:3]
    cores = on.chip.devices_per_chip or 1
    num_slices = min(on.num_slices, SLICES)
    planes = [(number, level) for number in range(num_slices) for level in range(z)]
    across = _columns(len(planes))
    cell = min(LARGEST_CELL, WIDTH / (across * x + (across - 1) * PLANE_GAP))
    step_x, step_y = (x + PLANE_GAP) * cell, y * cell + (0 if len(planes) == 1 else 20)
    names, corners = [], {}
    for index, (number, level) in enumerate(planes):
        row, column = divmod(index, across)
        top = row * step_y + (16 if len(planes) > 1 else 0)
        corners[number, level] = (column * step_x, top)
        parts = ([f"slice {number}"] if num_slices > 1 else []) + ([f"z {level}"] if z > 1 else [])
        if parts:
            names.append((column * step_x, top - 4, ", ".join(parts)))
    groups: dict[tuple[int, ...], int] = {}
    total = math.prod(sizes) // sizes[at]
    most = total if total <= COLOURS else FEW
    cells = []
    for device in devices:
        rest = (*device.mesh[:at], *device.mesh[at + 1 :])
        group = groups.setdefault(rest, len(groups))
        a, b, c, core, number = device.place
        left, top = corners[number, c]
        width = cell / cores
        spot = Cell(
            x=left + a * cell + core * width,
            y=top + b * cell,
            width=width,
            height=cell,
            colour=group if group < most else COLOURS,
            text=_text(device, sizes, cores),
            label=str(device.mesh[at]) if width >= LEGIBLE else "",
        )
        cells.append(spot)
    small = on.num_chips // on.num_slices <= SMALL
    rows = math.ceil(len(planes) / across)
    return Drawing(
        axis=axis.value,
        size=sizes[at],
        groups=total,
        coloured=most,
        mesh=Mesh(
            title=f"Groups of the axis {axis.value} on the chips",
            width=round(across * x * cell + (across - 1) * PLANE_GAP * cell, 2),
            height=round(rows * step_y, 2),
            cells=charts.separated(cells, cell) if small else charts.merged(cells),
            planes=names,
        ),
    )


def _columns(planes: int) -> int:
    """Planes per row, so that rows are full and the drawing is wider than high."""
    least = math.sqrt(1.3 * planes)
    return next(n for n in range(1, planes + 1) if planes % n == 0 and (n >= least or n == planes))


def _unravelled(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    indices = []
    for size in reversed(sizes):
        index, rest = divmod(index, size)
        indices.append(rest)
    return tuple(reversed(indices))


def _text(device: _Device, sizes: tuple[int, ...], cores: int) -> str:
    """``chip 1,2,0: data 0, fsdp 5``."""
    a, b, c, core, number = device.place
    where = f"chip {a},{b},{c}" + (f" core {core}" if cores > 1 else "")
    where += f" of slice {number}" if number else ""
    along = [
        f"{axis.value} {index}"
        for axis, index, size in zip(Axis, device.mesh, sizes, strict=True)
        if size > 1
    ]
    return f"{where}: {', '.join(along)}"
