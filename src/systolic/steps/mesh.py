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
    slices = {
        device.slice_index for device in devices if device.platform == "tpu" and _has_slices(device)
    }
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


def _has_slices(device: jax.Device) -> bool:
    # Devices of one-slice platforms have no such attribute at all; there is no other way to ask.
    return "slice_index" in dir(device)
