"""Meshes over described slices, whose devices know their slice but do not list it."""

from dataclasses import dataclass
from typing import Any

import pytest

from systolic.compiling.functions import _mesh
from systolic.compiling.traced import FunctionCall
from systolic.core.errors import LayoutError, OptionError
from systolic.job import Layout
from systolic.steps.target import make_mesh, slice_of


@dataclass(frozen=True)
class Described:
    """As libtpu describes a device: ``slice_index`` answers, ``dir()`` has nothing of it."""

    id: int
    coords: tuple[int, int, int]
    hidden: tuple[tuple[str, int], ...] = ()
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0
    process_index: int = 0

    def __getattr__(self, name: str) -> Any:
        for key, value in self.hidden:
            if key == name:
                return value
        raise AttributeError(name)


def mesh_of(axes: dict[str, int], devices: list[Described]) -> Any:
    return _mesh(FunctionCall(content=b"", name="f", mesh=axes, specs=()), devices)


def devices(slices: int) -> list[Described]:
    return [
        Described(
            id=100_000 * (number + 1) + 2 * y + x,
            coords=(x, y, 0),
            hidden=(("slice_index", number),),
            process_index=number,
        )
        for number in range(slices)
        for y in range(2)
        for x in range(2)
    ]


def test_only_the_data_axis_crosses_slices() -> None:
    mesh = make_mesh(Layout(data=2, fsdp=1, expert=2, tensor=2), devices(2))
    grid = mesh.devices.reshape(2, 4)
    for number in range(2):
        assert {slice_of(device) for device in grid[number]} == {number}
    # The same place of the torus on both sides of the network.
    assert [d.coords for d in grid[0]] == [d.coords for d in grid[1]]


def test_slices_that_do_not_divide_the_crossing_axis() -> None:
    with pytest.raises(LayoutError):
        make_mesh(Layout(data=1, fsdp=4, tensor=2), devices(2))


def test_one_slice_has_no_number() -> None:
    assert slice_of(Described(id=0, coords=(0, 0, 0))) == 0  # ty: ignore[invalid-argument-type]


def test_a_function_s_first_axis_that_can_crosses_the_slices() -> None:
    mesh = mesh_of({"rows": 1, "copies": 4, "parts": 2}, devices(2))
    grid = mesh.devices.reshape(4, 2)
    for number in range(2):
        assert {slice_of(d) for d in grid[2 * number : 2 * number + 2].flat} == {number}


def test_a_function_s_mesh_without_an_axis_for_the_slices() -> None:
    with pytest.raises(OptionError, match="is a multiple of the 3 slices"):
        mesh_of({"copies": 4, "parts": 4}, devices(3))
