"""Where mesh axes lie on the torus of a described slice."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from systolic.job import Axis, Layout, Placement
from systolic.steps.target import blocks, make_mesh


@dataclass(frozen=True)
class Device:
    """A TPU device as a topology describes it."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"


def torus(x: int, y: int, z: int = 1, cores: int = 1, slices: int = 1) -> list[Device]:
    ranges = map(range, (slices, z, y, x, cores))
    return [Device((a, b, c), core, n) for n, c, b, a, core in itertools.product(*ranges)]


def box(group: list[Device]) -> int:
    """Devices that the smallest box around a group could hold."""
    places = [(*device.coords, device.core_on_chip) for device in group]
    return math.prod(max(axis) - min(axis) + 1 for axis in zip(*places, strict=True))


@given(
    sides=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 3),
    cores=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_blocks_hold_each_device_once_and_the_innermost_axis_is_compact(
    sides: tuple[int, int, int], cores: int, data: st.DataObject
) -> None:
    devices = torus(*sides, cores=cores)
    left, shape = len(devices), []
    for _ in range(2):
        size = data.draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32) if left % n == 0]))
        shape.append(size)
        left //= size
    grid = blocks([left, *shape], devices)
    assert grid.shape == (left, *shape)
    assert sorted(map(hash, grid.flat)) == sorted(map(hash, devices))
    for group in grid.reshape(-1, grid.shape[-1]):
        assert box(list(group)) == grid.shape[-1]
    # The two innermost axes together are a block, too.
    for group in grid.reshape(left, -1):
        assert box(list(group)) == len(group)


def test_four_ways_are_two_by_two() -> None:
    layout = Layout(fsdp=64, tensor=4, placement=Placement.blocks)
    grid = make_mesh(layout, torus(16, 16)).devices
    group = grid.reshape(64, 4)[5]
    spans = [max(axis) - min(axis) for axis in zip(*(d.coords for d in group), strict=True)]
    assert spans == [1, 1, 0]


@pytest.mark.parametrize("axis", [Axis.data, Axis.fsdp])
def test_one_axis_crosses_slices_whatever_the_placement(axis: Axis) -> None:
    sizes = {"data": 4, "fsdp": 4, "tensor": 2}
    layout = Layout(**sizes, slices=axis, placement=Placement.blocks)
    grid = make_mesh(layout, torus(4, 4, slices=2)).devices
    names = list(layout.mesh_shape)
    halves = np.split(grid, 2, axis=names.index(axis.value))
    for number, half in enumerate(halves):
        assert {device.slice_index for device in half.flat} == {number}
