import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systolic.core.errors import DataError
from systolic.hlo import parse_shape
from systolic.hlo.shape import HBM, HOST, VMEM, bits_of, split


def test_tiles_pad_the_fastest_dims() -> None:
    shape = parse_shape("bf16[5,200]{1,0:T(8,128)(2,1)S(1)}")
    assert (shape.dtype, shape.dims, shape.tile, shape.space) == ("bf16", (5, 200), (8, 128), VMEM)
    assert shape.bytes == 5 * 200 * 2
    assert shape.padded_dims == (8, 256)
    assert shape.padded_bytes == 8 * 256 * 2


def test_padding_follows_the_layout_not_the_order_of_dims() -> None:
    # Dim 0 is the fastest here, so it is the one filled up to 128.
    assert parse_shape("f32[5,200]{0,1:T(8,128)}").padded_dims == (128, 200)
    assert parse_shape("f32[3,5,200]{2,0,1:T(8,128)}").padded_dims == (8, 5, 256)


def test_a_tile_of_more_dims_than_the_array() -> None:
    assert parse_shape("s32[]{:T(128)}").padded_bytes == 4
    assert parse_shape("f32[512]{0:T(1024)}").padded_bytes == 4096


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("pred[7]", 7),
        ("s4[7]{0:T(1024)(128)(8,1)E(4)}", 4),
        ("f8e4m3fn[10]", 10),
        ("f4e2m1fn[10]", 5),
        ("u1[9]", 2),
        ("c64[3]", 24),
        ("token[]", 0),
        ("bf16[0,128]{1,0}", 0),
        ("f32[<=8]", 32),
    ],
)
def test_bytes_of_dtypes(text: str, bytes_: int) -> None:
    assert parse_shape(text).bytes == bytes_


def test_memory_spaces() -> None:
    assert parse_shape("f32[8]{0:T(1024)}").space == HBM
    assert parse_shape("f32[8]{0:T(1024)S(5)}").space == HOST
    assert parse_shape("u32[]{:S(2)}").space == 2
    both = parse_shape("(f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)})")
    assert both.bytes_in(HBM) == both.bytes_in(VMEM) == 4096


def test_nested_tuples_and_comments() -> None:
    shape = parse_shape("((f32[2]{0}), f32[3]{0}, /*index=2*/(), s32[])")
    assert [array.dims for array in shape.arrays()] == [(2,), (3,), ()]
    assert shape.parts is not None
    assert shape.parts[2].parts == ()
    assert shape.bytes == 8 + 12 + 4


@pytest.mark.parametrize("text", ["", "f32", "[3]", "f32[?]", "f32[a]", "9[3]", "f32[-1]"])
def test_what_is_no_shape_is_one_line(text: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_shape(text).bytes  # noqa: B018
    assert "\n" not in str(raised.value)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(DataError, match="'q7'"):
        bits_of("q7")


@given(
    dims=st.lists(st.integers(0, 300), max_size=4),
    tile=st.lists(st.sampled_from([1, 2, 4, 8, 128, 256]), min_size=1, max_size=2),
    dtype=st.sampled_from(["pred", "s4", "bf16", "f32"]),
    data=st.data(),
)
def test_padding_only_adds(
    dims: list[int], tile: list[int], dtype: str, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(dims))))
    text = f"{dtype}[{','.join(map(str, dims))}]{{{','.join(map(str, order))}:T({','.join(map(str, tile))})}}"
    shape = parse_shape(text)
    assert shape.elements == math.prod(dims)
    assert shape.padded_bytes >= shape.bytes
    for dim, size in zip(order, reversed(tile), strict=False):
        assert shape.padded_dims[dim] % size == 0
        assert shape.padded_dims[dim] - shape.dims[dim] < size


@given(st.lists(st.sampled_from(["f32[2,3]{1,0}", "(f32[1], s32[])", "u8[4]{0:T(8)(4,1)}"])))
def test_split_is_the_inverse_of_joining(parts: list[str]) -> None:
    assert split(", ".join(parts)) == parts
