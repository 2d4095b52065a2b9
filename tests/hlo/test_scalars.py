"""Values of single ops against a reference on whole numbers, written apart from the evaluator."""

import math
import operator
from collections.abc import Sequence
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systolic.hlo import parse
from systolic.hlo.scalars import Scalars, Scope, Turn
from systolic.hlo.values import UNKNOWN, Elements, Known, Value

BITS = {"pred": 1, "s8": 8, "u8": 8, "s32": 32, "u32": 32, "s64": 64, "u64": 64}
COMPARE = {"LT": "lt", "LE": "le", "GT": "gt", "GE": "ge", "EQ": "eq", "NE": "ne"}
PAIRS = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "remainder",
    "minimum",
    "maximum",
    "and",
    "or",
    "xor",
    "shift-left",
    "shift-right-logical",
    "shift-right-arithmetic",
]
ALL = (*PAIRS, "negate", "abs", "sign", "not", "clamp", "select", *COMPARE)


def wrapped(number: int, dtype: str) -> int:
    """A number as an integer of a type holds it."""
    number %= 1 << BITS[dtype]
    return (
        number - (1 << BITS[dtype]) if dtype[0] == "s" and number >> (BITS[dtype] - 1) else number
    )


def truth(op: str, numbers: Sequence[int], dtype: str) -> int | None:
    """What XLA computes; None where its backends differ."""
    a, b, c = (*numbers, 0, 0)[:3]
    bits, signed = BITS[dtype], dtype[0] == "s"
    if op in COMPARE:
        return int(getattr(operator, COMPARE[op])(a, b))
    if (op in ("divide", "remainder") and b == 0) or (op.startswith("shift") and not 0 <= b < bits):
        return None
    if op == "clamp":
        return None if a > c else min(max(b, a), c)
    quotient = abs(a) // abs(b or 1) * (1 if (a < 0) == (b < 0) else -1)
    made = {
        "add": a | b if dtype == "pred" else a + b,
        "subtract": a - b,
        "multiply": a * b,
        "divide": quotient,
        "remainder": a - b * quotient,
        "minimum": min(a, b),
        "maximum": max(a, b),
        "and": a & b,
        "or": a | b,
        "xor": a ^ b,
        "shift-left": a << b % 64,
        "shift-right-logical": (a % (1 << bits)) >> b % 64,
        "shift-right-arithmetic": wrapped(a, f"s{max(bits, 8)}") >> b % 64,
        "negate": -a,
        "abs": abs(a) if signed else a,
        "sign": (a > 0) - (a < 0),
        "not": ~a,
    }
    return wrapped(made[op], dtype)


def evaluated(text: str, values: Sequence[Value], computations: str = "") -> Value:
    """The value of an entry's root whose parameters are known."""
    module = parse(f"HloModule one, is_scheduled=true\n{computations}\n{text}\n")
    scope = Scope(Scalars(module), module.entry, lambda n: values[n], lambda *_: UNKNOWN)
    return scope.get(module.entry.root.name)


def entry(shapes: Sequence[str], made: str, root: str) -> str:
    """An entry of one op on parameters ``%p0``, ``%p1``…"""
    lines = [f"  %p{n} = {shape} parameter({n})" for n, shape in enumerate(shapes)]
    header = ", ".join(f"p{n}: {shape}" for n, shape in enumerate(shapes))
    body = "\n".join([*lines, f"  ROOT %made = {made} {root}"])
    return f"ENTRY %main ({header}) -> {made} {{\n{body}\n}}"


def numbers_of(dtype: str) -> st.SearchStrategy[int]:
    near = st.integers(-9, 70).map(lambda one: wrapped(one, dtype))
    anywhere = st.integers(0, (1 << 64) - 1).map(lambda one: wrapped(one, dtype))
    return near | near | anywhere


@st.composite
def ranges(draw: st.DrawFn, dtype: str, exact: bool) -> tuple[Known, int]:
    """A range, and a number in it."""
    number = draw(numbers_of(dtype))
    if exact:
        return Known(number, number), number
    low, high = (draw(numbers_of(dtype)) for _ in range(2))
    return Known(min(low, number, high), max(low, number, high)), number


@settings(max_examples=300, deadline=None)
@given(data=st.data(), op=st.sampled_from(ALL), dtype=st.sampled_from([*BITS]), exact=st.booleans())
def test_the_range_of_an_op_holds_what_it_computes(
    data: st.DataObject, op: str, dtype: str, exact: bool
) -> None:
    if dtype == "pred" and op not in (
        "add",
        "and",
        "or",
        "xor",
        "minimum",
        "maximum",
        "not",
        *COMPARE,
    ):
        return
    made, attributes, shapes = dtype, "", [dtype] * 2
    written = op
    if op in COMPARE:
        made, attributes, written = "pred", f", direction={op}", "compare"
    elif op in ("clamp", "select"):
        shapes = [dtype] * 3 if op == "clamp" else ["pred", dtype, dtype]
    elif op not in PAIRS:
        shapes = [dtype]
    held = [data.draw(ranges(one, exact)) for one in shapes]
    numbers = [number for _, number in held]
    wanted = truth(op, numbers, dtype) if op != "select" else numbers[1 if numbers[0] else 2]
    if wanted is None:
        return
    operands = ", ".join(f"%p{n}" for n in range(len(shapes)))
    text = entry([f"{one}[]" for one in shapes], f"{made}[]", f"{written}({operands}){attributes}")
    found = evaluated(text, [one for one, _ in held])
    assert isinstance(found, Known)
    assert found.low <= wanted <= found.high
    assert found.exact or not exact


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(), old=st.sampled_from([*BITS]), new=st.sampled_from([*BITS]), exact=st.booleans()
)
def test_conversions_and_bitcasts_hold_what_they_compute(
    data: st.DataObject, old: str, new: str, exact: bool
) -> None:
    range_, number = data.draw(ranges(old, exact))
    wanted = int(number != 0) if new == "pred" else wrapped(number, new)
    found = evaluated(entry([f"{old}[]"], f"{new}[]", "convert(%p0)"), [range_])
    assert isinstance(found, Known)
    assert found.low <= wanted <= found.high
    assert found.exact or not exact
    of_float = evaluated(entry(["f32[]"], f"{new}[]", "convert(%p0)"), [Known(300.0, 300.0)])
    fits = new == "pred" or wrapped(300, new) == 300
    assert of_float == (Known(*[1 if new == "pred" else 300] * 2) if fits else UNKNOWN)
    for op in ("bitcast", "bitcast-convert"):
        found = evaluated(entry([f"{old}[]"], f"{new}[]", f"{op}(%p0)"), [range_])
        assert isinstance(found, Known)
        # Of another width it is not one number to one.
        assert (found.low <= wanted <= found.high) if BITS[old] == BITS[new] else found == UNKNOWN


@given(number=st.integers(-(2**63), 2**63 - 1), signed=st.booleans())
def test_halves_of_64_bits_make_the_whole(number: int, signed: bool) -> None:
    dtype = "s64" if signed else "u64"
    whole = Known(*[wrapped(number, dtype)] * 2)

    def call(shapes: Sequence[str], made: str, target: str, given: Sequence[Known]) -> Known:
        operands = ", ".join(f"%p{n}" for n in range(len(shapes)))
        text = entry(shapes, made, f'custom-call({operands}), custom_call_target="{target}"')
        found = evaluated(text, given)
        assert isinstance(found, Known)
        return found

    halves = [call([f"{dtype}[]"], "u32[]", f"X64Split{end}", [whole]) for end in ("Low", "High")]
    assert halves == [Known(*[number >> shift & 0xFFFFFFFF] * 2) for shift in (0, 32)]
    assert call(["u32[]"] * 2, f"{dtype}[]", "X64Combine", halves) == whole


COMBINERS = ("add", "multiply", "minimum", "maximum", "and", "or", "xor")


def combined(op: str, dtype: str, root: str = "%a, %b") -> str:
    return f"""
%combine (a: {dtype}[], b: {dtype}[]) -> {dtype}[] {{
  %a = {dtype}[] parameter(0)
  %b = {dtype}[] parameter(1)
  ROOT %both = {dtype}[] {op}({root})
}}
"""


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    op=st.sampled_from(COMBINERS),
    dtype=st.sampled_from([*BITS]),
    size=st.sampled_from([0, 1, 2, 3, 5, 20]),
    like=st.booleans(),
    exact=st.booleans(),
)
def test_a_reduction_counts_its_initial_value_and_every_element(
    data: st.DataObject, op: str, dtype: str, size: int, like: bool, exact: bool
) -> None:
    if dtype == "pred" and op == "multiply":
        return
    held = [data.draw(ranges(dtype, exact)) for _ in range(min(size, 1) if like else size)]
    held = held * size if like else held
    initial, first = data.draw(ranges(dtype, exact))
    array: Value = UNKNOWN
    if held:
        array = held[0][0] if like or size == 1 else [one for one, _ in held]
        array = Elements(tuple(array)) if isinstance(array, list) and size > 16 else array
    wanted = reduce(lambda a, b: truth(op, [a, b], dtype) or 0, [n for _, n in held], first)
    text = entry(
        [f"{dtype}[{size}]", f"{dtype}[]"],
        f"{dtype}[]",
        "reduce(%p0, %p1), dimensions={0}, to_apply=%combine",
    )
    found = evaluated(text, [array, initial], combined(op, dtype))
    assert isinstance(found, Known)
    assert found.low <= wanted <= found.high
    assert found.exact or not exact or size > 16
    # Of its own argument twice, or of something else, it is no reduction of elements.
    assert evaluated(text, [array, initial], combined(op, dtype, "%a, %a")) == UNKNOWN


LONG = Elements(tuple(Known(n * n % 31, n * n % 31) for n in range(40)))


@pytest.mark.parametrize(
    ("shapes", "made", "root", "values", "wanted"),
    [
        ([], "s32[40]", "iota(), iota_dimension=0", [], list(range(40))),
        (["s32[40]", "s32[]"], "s32[1]", "dynamic-slice(%p0, %p1), dynamic_slice_sizes={1}", [LONG, Known(7, 7)], [18]),
        (["s32[40]", "s32[]"], "s32[1]", "dynamic-slice(%p0, %p1), dynamic_slice_sizes={1}", [LONG, Known(3, 5)], (9, 25)),
        (["s32[40]", "s32[]"], "s32[1]", "dynamic-slice(%p0, %p1), dynamic_slice_sizes={1}", [LONG, Known(0, 99)], (0, 28)),
        (["s32[40]"], "s32[20]", "slice(%p0), slice={[1:40:2]}", [LONG], [n * n % 31 for n in range(1, 40, 2)]),
        (["s32[40]"], "s32[40]", "reverse(%p0), dimensions={0}", [LONG], [n * n % 31 for n in range(39, -1, -1)]),
        (["s32[40]", "s32[40]"], "s32[40]", "add(%p0, %p1)", [LONG, Known(2, 2)], [n * n % 31 + 2 for n in range(40)]),
        (["s32[40]"], "s32[40,1]", "reshape(%p0)", [LONG], [n * n % 31 for n in range(40)]),
        (["s32[40]"], "s32[5,8]", "reshape(%p0)", [LONG], (0, 28)),
        (["s32[40]"], "s32[40,2]", "broadcast(%p0), dimensions={0}", [LONG], (0, 28)),
        ([], "s32[9,7]", "iota(), iota_dimension=1", [], (0, 6)),
    ],
)  # fmt: skip
def test_tables_keep_their_elements_where_these_stay_in_a_row(
    shapes: list[str], made: str, root: str, values: list[Value], wanted: object
) -> None:
    found = evaluated(entry(shapes, made, root), values)
    if isinstance(wanted, tuple):
        assert not isinstance(found, Elements)
        assert found == Known(*wanted)
        return
    assert isinstance(found, Known)
    elements = found.elements if isinstance(found, Elements) else (found,)
    assert [one.low for one in elements if one.exact] == wanted


@given(
    at=st.integers(-60, 60),
    step=st.integers(-9, 9),
    cell=st.sampled_from([None, 0, 1, 3]),
    lowest=st.integers(-8, 8),
)
def test_the_room_of_a_turn_is_that_of_walking(
    at: int, step: int, cell: int | None, lowest: int
) -> None:
    def place(number: int) -> int:
        return (number > 0) - (number < 0) if cell is None else (number - lowest) >> cell

    def walk(most: int) -> int:
        return next((n for n in range(most) if place(at + (n + 1) * step) != place(at)), most)

    room = Turn(at, cell, lowest).room(Turn(at - step, cell, lowest))
    if step and (place(at - step) != place(at) or (cell is None and at == 0)):
        assert room == -1
    else:
        assert walk(500) == (500 if room == math.inf else room)
