import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from systolic.core.errors import DataError
from systolic.hlo import parse_groups
from systolic.hlo.groups import groups_of
from systolic.hlo.module import Instruction


def collective(rest: str) -> Instruction:
    return Instruction(
        name="c", opcode="all-gather", shape_text="f32[8]", operands=("p",), rest=rest, root=False
    )


def test_lists() -> None:
    assert parse_groups("{{0,1},{2,3}}", 4).groups == ((0, 1), (2, 3))
    assert parse_groups("{{0,2,4,6},{1,3,5,7}}", 8).size == 4


@pytest.mark.parametrize("text", ["{}", ""])
def test_no_list_is_one_group_of_all(text: str) -> None:
    assert parse_groups(text, 4).groups == ((0, 1, 2, 3),)


def test_iota_with_and_without_a_transpose() -> None:
    assert parse_groups("[2,4]<=[8]", 8).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parse_groups("[4,2]<=[2,4]T(1,0)", 8).groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_iota_equals_the_list_it_stands_for(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(0, len(sizes)))
    moved = [sizes[axis] for axis in order]
    shape = [math.prod(moved[:cut]), math.prod(moved[cut:])]
    dims, turn = ",".join(map(str, sizes)), ",".join(map(str, order))
    found = parse_groups(f"[{shape[0]},{shape[1]}]<=[{dims}]T({turn})", math.prod(sizes)).groups
    # By counting coordinates, the slowest first, as the format is defined.
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    flat = [
        sum(at * strides[axis] for at, axis in zip(place, order, strict=True))
        for place in itertools.product(*(range(size) for size in moved))
    ]
    assert found == tuple(
        tuple(flat[row * shape[1] : (row + 1) * shape[1]]) for row in range(shape[0])
    )


def test_mesh_axes() -> None:
    assert parse_groups("mesh['a'=2,'b'=2] {'b'}", 4).groups == ((0, 1), (2, 3))
    assert parse_groups("mesh['a'=2,'b'=2] {'a'}", 4).groups == ((0, 2), (1, 3))
    assert parse_groups("mesh['a'=2,'b'=2] {'b','a'}", 4).groups == ((0, 2, 1, 3),)


def test_mesh_axes_over_devices_in_another_order() -> None:
    turned = "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) "
    assert parse_groups(turned + "{'a'}", 8).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parse_groups(turned + "{'b'}", 8).groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    listed = "mesh['a'=2,'b'=2], device_ids=([3,2,1,0]) {'b'}"
    assert parse_groups(listed, 4).groups == ((3, 2), (1, 0))


def test_mesh_with_an_order_of_devices() -> None:
    text = "mesh['a'=2,'b'=2], device_ids=([3,2,1,0]) {'b'}"
    assert parse_groups(text, 4).groups == ((3, 2), (1, 0))


def test_part_of_a_mesh_axis() -> None:
    # 'x':(1)2 is the slower half of an axis of 4: devices 0 and 2, 1 and 3.
    assert parse_groups("mesh['x'=4] {'x':(1)2}", 4).groups == ((0, 2), (1, 3))
    assert parse_groups("mesh['x'=4] {'x':(2)2}", 4).groups == ((0, 1), (2, 3))
    assert parse_groups("mesh['x'=8] {'x':(2)2}", 8).groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_two_parts_of_one_mesh_axis() -> None:
    assert parse_groups("mesh['x'=8] {'x':(1)2, 'x':(4)2}", 8).groups == (
        (0, 1, 4, 5),
        (2, 3, 6, 7),
    )


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_mesh_groups_share_all_other_coordinates(sizes: list[int], data: st.DataObject) -> None:
    names = [f"a{n}" for n in range(len(sizes))]
    used = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    axes = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    picked = ", ".join(f"'{names[axis]}'" for axis in used)
    found = parse_groups(f"mesh[{axes}] {{{picked}}}", math.prod(sizes)).groups
    assert sorted(itertools.chain(*found)) == list(range(math.prod(sizes)))
    for group in found:
        assert len(group) == math.prod(sizes[axis] for axis in used)
        places = np.array([np.unravel_index(device, sizes) for device in group])
        for axis in range(len(sizes)):
            if axis not in used:
                assert len(set(places[:, axis])) == 1


def test_groups_of_an_instruction() -> None:
    found = groups_of(collective(", replica_groups={{0,1},{2,3}}, dimensions={0}"), 4)
    assert found.groups == ((0, 1), (2, 3))
    found = groups_of(collective(", replica_groups=[1,4]<=[4], dimensions={0}"), 4)
    assert found.groups == ((0, 1, 2, 3),)
    found = groups_of(
        collective(", channel_id=1, replica_groups=mesh['a'=4,'b'=1] {'a'}, x={1}"), 4
    )
    assert found.groups == ((0, 1, 2, 3),)
    found = groups_of(collective(", channel_id=1"), 3)
    assert found.groups == ((0, 1, 2),)


def test_pairs_of_a_permute() -> None:
    found = groups_of(collective(", source_target_pairs={{0,1},{1,0}}"), 2)
    assert found.pairs
    assert found.groups == ((0, 1), (1, 0))


@pytest.mark.parametrize("text", ["nonsense", "mesh{'a'}", "mesh['a'=2] {'b'}", "[2,2]<=[8]"])
def test_damaged_groups_are_one_line(text: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_groups(text, 4)
    assert "\n" not in str(raised.value)
