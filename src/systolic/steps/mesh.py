"""Mesh of a layout over real or described devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from systolic.job import Layout, Placement


def make_mesh(layout: Layout, devices: Sequence[Any]) -> Mesh:
    """The six named axes of a definite layout over ``devices``.

    Within a slice the axes follow the torus; across slices (devices that differ in ``slice_index``)
    the axis ``layout.slices`` is the one that crosses the data-centre network.

    Raises:
        LayoutError: the slices don't divide that axis.
    """
    names, sizes = tuple(layout.mesh_shape), list(layout.mesh_shape.values())
    layout.check_slices(num_slices := slices_of(devices))
    outer = [num_slices if name == layout.slices.value else 1 for name in names]
    grid = place(sizes, outer, devices, layout.placement)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def slices_of(devices: Sequence[Any]) -> int:
    """Number of TPU slices that devices are in; 1 on other platforms."""
    return max(len({slice_of(device) for device in devices if device.platform == "tpu"}), 1)


def place(
    sizes: Sequence[int],
    outer: Sequence[int],
    devices: Sequence[Any],
    placement: Placement = Placement.lines,
) -> np.ndarray:
    """Devices by mesh axes [*sizes].

    Args:
        sizes: Sizes of the axes; their product is the number of devices.
        outer: Number of slices that each axis crosses.
        devices: Devices of one platform.
        placement: Placement of the axes on the torus of a TPU slice.
    """
    if devices[0].platform != "tpu" or len(devices) == 1:
        return np.array(list(devices)[: math.prod(sizes)]).reshape(sizes)
    inner = [size // ways for size, ways in zip(sizes, outer, strict=True)]
    if placement is Placement.blocks:
        slices = sorted({slice_of(device) for device in devices})
        parts = [
            blocks(inner, [d for d in devices if slice_of(d) == slice_number])
            for slice_number in slices
        ]
        crossing = max(range(len(outer)), key=lambda axis: outer[axis])
        return np.concatenate(parts, axis=crossing)
    if math.prod(outer) > 1:
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def blocks(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """The devices of one slice by mesh axes [*shape], each axis a compact block of the torus.

    The innermost axis is placed first: the devices of one chip, then factor by factor along whichever
    torus axis has most chips left, so that 4 ways are 2 x 2 chips rather than 4 in a row.
    """
    places = [(*device.coords, device.core_on_chip) for device in devices]
    torus = np.empty([max(axis) + 1 for axis in zip(*places, strict=True)], dtype=object)
    for place, device in zip(places, devices, strict=True):
        torus[place] = device
    left, core = list(torus.shape), torus.ndim - 1
    factors: list[list[tuple[int, int]]] = [[] for _ in left]
    """Factors of each torus axis, nearest neighbours first: (ways, mesh axis)."""
    for axis in reversed(range(len(shape))):
        for ways in _primes(shape[axis]):
            possible = [n for n in range(len(left)) if left[n] % ways == 0]
            along = core if core in possible else max(possible, key=lambda n: left[n])
            left[along] //= ways
            factors[along].append((ways, axis))
    ordered = [factor for along in factors for factor in reversed(along)]
    split = torus.reshape([ways for ways, _ in ordered])
    by_axis = sorted(range(len(ordered)), key=lambda n: ordered[n][1])
    return split.transpose(by_axis).reshape(shape)


def _primes(number: int) -> list[int]:
    """Prime factors, largest first."""
    primes, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return primes[::-1]


def slice_of(device: jax.Device) -> int:
    """The number of the slice that a device is in; 0 where there is one slice."""
    # Devices of one-slice platforms lack the attribute; those of a described topology have it
    # unlisted in dir(), so it can only be tried.
    try:
        return device.slice_index or 0
    except AttributeError:
        return 0
