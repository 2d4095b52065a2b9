"""From devices, real or described, to the mesh of a layout."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from systolic.job import Layout


def make_mesh(layout: Layout, devices: Sequence[Any]) -> Mesh:
    """The six named axes of a definite layout over ``devices``.

    Within a slice the axes follow the torus; across slices (devices that differ in ``slice_index``)
    the axis ``layout.slices`` is the one that crosses the data-centre network.

    Raises:
        LayoutError: the slices don't divide that axis.
    """
    shape = list(layout.mesh_shape.values())
    names = tuple(layout.mesh_shape)
    slices = {slice_of(device) for device in devices if device.platform == "tpu"}
    if len(slices) > 1:
        layout.check_slices(len(slices))
        crossing = names.index(layout.slices.value)
        outer = [len(slices) if axis == crossing else 1 for axis in range(len(shape))]
        inner = [size // outside for size, outside in zip(shape, outer, strict=True)]
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    elif devices[0].platform == "tpu" and len(devices) > 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(list(devices)[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def slice_of(device: jax.Device) -> int:
    """The number of the slice that a device is in; 0 where there is one slice."""
    # Devices of one-slice platforms have no such attribute; those of a described topology have it but
    # dir() does not list it, so that asking is the only way to know.
    try:
        return device.slice_index or 0
    except AttributeError:
        return 0
