import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from systolic.hlo import parse
from systolic.hlo.loops import counts_of
from tests.recorded import loops


def counted(
    start: str, bound: str, step: int, direction: str, *, swapped: bool = False, more: str = ""
) -> int | None:
    """The trip count of ``for i = start; i direction bound; i += step``."""
    sides = "%limit, %i" if swapped else "%i, %limit"
    module = parse(f"""\
HloModule loop, is_scheduled=true

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %state = (s32[], f32[8]) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %x = f32[8] get-tuple-element(%state), index=1
  %by = s32[] constant({step})
  %next = s32[] add(%at, %by)
  ROOT %out = (s32[], f32[8]) tuple(%next, %x)
}}

%condition (cond_state: (s32[], f32[8])) -> pred[] {{
  %cond_state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%cond_state), index=0
  %limit = s32[] constant({bound})
  ROOT %less = pred[] compare({sides}), direction={direction}
}}

ENTRY %main (x0: f32[8], n: s32[]) -> (s32[], f32[8]) {{
  %x0 = f32[8] parameter(0)
  %n = s32[] parameter(1)
  %first = s32[] {start}
  %initial = (s32[], f32[8]) tuple(%first, %x0)
  ROOT %loop = (s32[], f32[8]) while(%initial), condition=%condition, body=%body{more}
}}
""")
    found = counts_of(module).loops["loop"].mean
    return None if found is None else int(found)


def run(start: int, bound: int, step: int, direction: str) -> int | None:
    """By running the loop; None when it does not end."""
    holds = {
        "LT": int.__lt__,
        "LE": int.__le__,
        "GT": int.__gt__,
        "GE": int.__ge__,
        "NE": int.__ne__,
    }[direction]
    for turns in range(200):
        if not holds(start, bound):
            return turns
        start += step
    return None


@given(
    start=st.integers(-9, 9),
    bound=st.integers(-9, 9),
    step=st.integers(-4, 4).filter(bool),
    direction=st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
    swapped=st.booleans(),
)
def test_counts_what_running_it_counts(
    start: int, bound: int, step: int, direction: str, swapped: bool
) -> None:
    written = direction
    if swapped:
        written = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    found = counted(f"constant({start})", str(bound), step, written, swapped=swapped)
    wanted = run(start, bound, step, direction)
    # A counter that never gets there wraps around, and then it may.
    assert found == wanted if wanted is not None else found is None or found > 2**20


def test_a_start_from_an_argument_is_unknown() -> None:
    assert counted("copy(%n)", "8", 1, "LT") is None


def test_what_the_compiler_says_comes_first() -> None:
    said = (
        ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    )
    assert counted("copy(%n)", "8", 1, "LT", more=said) == 7


@pytest.mark.parametrize("bound", [1, 5])
def test_the_limit_may_come_from_the_loops_own_tuple(bound: int) -> None:
    module = parse(f"""\
HloModule loop, is_scheduled=true

%body (state: (s32[], s32[])) -> (s32[], s32[]) {{
  %state = (s32[], s32[]) parameter(0)
  %at = s32[] get-tuple-element(%state), index=1
  %end = s32[] get-tuple-element(%state), index=0
  %next = s32[] fusion(%at), kind=kLoop, calls=%increment
  ROOT %out = (s32[], s32[]) tuple(%end, %next)
}}

%increment (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %sum = s32[] add(%p, %one)
}}

%less_than (left: s32[], right: s32[]) -> pred[] {{
  %left = s32[] parameter(0)
  %right = s32[] parameter(1)
  ROOT %less = pred[] compare(%left, %right), direction=LT
}}

%condition (cond_state: (s32[], s32[])) -> pred[] {{
  %cond_state = (s32[], s32[]) parameter(0)
  %limit = s32[] get-tuple-element(%cond_state), index=0
  %i = s32[] get-tuple-element(%cond_state), index=1
  ROOT %done = pred[] fusion(%i, %limit), kind=kLoop, calls=%less_than
}}

ENTRY %main () -> (s32[], s32[]) {{
  %zero = s32[] constant(0)
  %end = s32[] constant({bound})
  %initial = (s32[], s32[]) tuple(%end, %zero)
  ROOT %loop = (s32[], s32[]) while(%initial), condition=%condition, body=%body
}}
""")
    assert counts_of(module).loops["loop"].mean == bound


EXACT = {
    "fori_u32": [42],
    "fori_i16": [50],
    "fori_i8": [50],
    "fori_u8": [240],
    "fori_s64": [42],
    "fori_u64_64": [42],
    "scan": [100],
    "scan64": [100],
    "scan_long": [1_000_000],
    "scan_long64": [1_000_000],
    "scan_reversed": [37],
    "scan_reversed64": [37],
    "scan_gradient": [41, 41],
    "scan_gradient64": [41, 41],
    "scan_unrolled": [6],  # and two turns behind it
    "fori_unrolled": [14],  # of seven turns each
    "down": [34],
    "down64": [34],
    "below_zero": [13],
    "below_zero64": [13],
    "unequal": [12],
    "unequal64": [12],
    "swapped": [19],
    "doubled": [10],
    "doubled64": [10],
    "halved": [11],
    "of_floats": [8],
    "bound_carried": [39],
    "bound_carried64": [39],
    "both_move": [26],
    "both_move64": [26],
    "by_a_flag": [51],
    "nested": [7, 11],
    "nested64": [7, 11],
    "nested_carried": [9, 13],
    "nested_carried64": [9, 13],
    "triangle": [10.5, 20],  # 210 turns in 20 runs
    "triangle64": [10.5, 20],
    "pyramid": [2, 3.5, 8],  # 56 turns in 28 runs, 28 in 8
    "in_branches": [5, 31],
    "in_branches64": [5, 31],
    "map_batches": [10],
    "map_batches64": [10],
    "associative": [],
    "half_as_often": [4.5, 20],  # 0, 0, 1, 1, … 9, 9
    "half_as_often64": [4.5, 20],  # of a division that is written out in a thousand ops
    "tenths": [10],
    "tenths64": [11],  # ten times 0.1 is less than 1 in f64, and no less in f32
    "of_bf16": [15],
    "in_an_array": [30],
    "in_an_array64": [30],
    "in_an_element": [15],
    "in_an_element64": [15],
    "in_the_first_element": [10],
    "in_elements_by_turns": [15],
    "trips_of_a_table": [3.75, 4],
    "of_several": [30],
    "of_several64": [30],
}
"""Trips of each loop of a recorded program, ascending."""
OPEN = {
    "traced": [(0, None)],
    "traced64": [(0, None)],
    "traced_clipped": [(0, 64)],
    "clipped": [(10, 64)],
    "clipped64": [(10, 64)],
    "at_most": [(0, 50)],
    "at_most64": [(0, 50)],
    "from_at_least": [(0, 61)],
    "from_at_least64": [(0, 61)],
    "down_from": [(3, 60)],
    "down_from64": [(3, 60)],
    "until_large": [(0, None)],
    "until_large_or_50": [(0, 50)],
}
"""Least and most trips where data decides."""


@pytest.mark.parametrize("name", EXACT)
def test_trips_of_recorded_loops_are_those_of_the_source(name: str) -> None:
    found = counts_of(loops.module(name)).loops
    assert all(one.known for one in found.values())
    assert sorted(one.mean or 0 for one in found.values()) == EXACT[name]


@pytest.mark.parametrize("name", OPEN)
def test_what_data_decides_has_the_range_that_the_program_leaves(name: str) -> None:
    found = counts_of(loops.module(name)).loops
    assert [(one.least, one.most) for one in found.values()] == OPEN[name]
    assert not any(one.known for one in found.values())


def test_the_width_of_integers_changes_no_count() -> None:
    expected = {**EXACT, **OPEN}
    wide = {name: found for name, found in expected.items() if f"{name}64" in expected}
    assert len(wide) >= 25
    other = {name: (found, expected[f"{name}64"]) for name, found in wide.items()}
    assert {name for name, (one, two) in other.items() if one != two} == {"tenths"}
    recorded = set(loops.texts())
    assert {name for name in recorded if f"{name}64" in recorded} <= set(wide)


@pytest.mark.parametrize(("name", "trips"), [("cpu_down_u32", 37), ("cpu_wraps_i8", 128)])
def test_counters_that_are_known_come_before_what_the_compiler_says(name: str, trips: int) -> None:
    # XLA's CPU compiler notes one trip for either loop.
    assert '"known_trip_count":{"n":"1"}' in loops.texts()[name]
    (found,) = counts_of(loops.module(name)).loops.values()
    assert (found.least, found.most, found.mean) == (trips, trips, trips)


TAKEN = {
    "each_hundredth": {(0,): 990 / 1000, (1,): 10 / 1000},
    "one_of_three": {(0,): 11 / 31, (1,): 10 / 31, (2,): 10 / 31},
    "first_half": {(0,): 0.5, (1,): 0.5},
    "on_data": {(0, 1): 1.0},
    "early_on_data": {(0, 1): 0.5, (0,): 0.5},
}
"""Share of runs that may take each set of branches; a predicate comes as an integer, whose 1 is for true."""


@pytest.mark.parametrize("name", TAKEN)
def test_counters_choose_branches_turn_by_turn(name: str) -> None:
    (found,) = counts_of(loops.module(name)).branches.values()
    assert found == pytest.approx(TAKEN[name])


def test_ten_thousand_turns_are_followed_and_more_are_left_open() -> None:
    text = loops.texts()["each_hundredth"]
    assert text.count("constant(1000)") == 1
    for turns, wanted in {10_000: {(0,): 0.99, (1,): 0.01}, 10_001: {(0, 1): 1.0}}.items():
        module = parse(text.replace("constant(1000)", f"constant({turns})"))
        (found,) = counts_of(module).branches.values()
        assert found == pytest.approx(wanted)


ARITHMETIC = """\
HloModule loop, is_scheduled=true

%body (state: ({t}[], {t}[])) -> ({t}[], {t}[]) {{
  %state = ({t}[], {t}[]) parameter(0)
  %i = {t}[] get-tuple-element(%state), index=0
  %j = {t}[] get-tuple-element(%state), index=1
  %by = {t}[] constant({step})
  %most = {t}[] constant({most})
  %more = {t}[] add(%i, %by)
  %next = {t}[] {limit}(%more, %most)
  %carried = pred[] compare(%next, %i), direction=LT
  %one = {t}[] constant(1)
  %after = {t}[] add(%j, %one)
  %other = {t}[] select(%carried, %after, %j)
  ROOT %out = ({t}[], {t}[]) tuple(%next, %other)
}}

%condition (cond_state: ({t}[], {t}[])) -> pred[] {{
  %cond_state = ({t}[], {t}[]) parameter(0)
  %i = {t}[] get-tuple-element(%cond_state), index=0
  %j = {t}[] get-tuple-element(%cond_state), index=1
  %bound = {t}[] constant({bound})
  %turns = {t}[] constant(3)
  %one = pred[] compare(%i, %bound), direction={direction}
  %two = pred[] compare(%j, %turns), direction=LT
  ROOT %both = pred[] {both}(%one, %two)
}}

ENTRY %main () -> ({t}[], {t}[]) {{
  %first = {t}[] constant({start})
  %zero = {t}[] constant(0)
  %initial = ({t}[], {t}[]) tuple(%first, %zero)
  ROOT %loop = ({t}[], {t}[]) while(%initial), condition=%condition, body=%body
}}
"""


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(["u8", "s8"]),
    start=st.integers(0, 90),
    bound=st.integers(0, 90),
    step=st.integers(-7, 7),
    most=st.integers(0, 100),
    limit=st.sampled_from(["minimum", "maximum", "add", "subtract"]),
    direction=st.sampled_from(["LT", "LE", "GT", "GE", "NE", "EQ"]),
    both=st.sampled_from(["and", "or"]),
)
@example(
    dtype="s8",
    start=0,
    bound=0,
    step=0,
    most=19,
    limit="subtract",
    direction="NE",
    both="or",
)  # wraps 133 times
def test_counters_that_wrap_carry_and_are_limited_count_as_by_running(
    dtype: str,
    start: int,
    bound: int,
    step: int,
    most: int,
    limit: str,
    direction: str,
    both: str,
) -> None:
    bits, lowest = int(dtype[1:]), -(1 << int(dtype[1:]) - 1) if dtype[0] == "s" else 0

    def wrapped(number: int) -> int:
        return (number - lowest) % (1 << bits) + lowest

    text = ARITHMETIC.format(
        t=dtype,
        start=start,
        bound=bound,
        step=wrapped(step),
        most=most,
        limit=limit,
        direction=direction,
        both=both,
    )
    limits = {"minimum": min, "maximum": max, "add": int.__add__, "subtract": int.__sub__}
    holds = {"LT": "__lt__", "LE": "__le__", "GT": "__gt__", "GE": "__ge__", "NE": "__ne__"}
    seen, turns, state = set(), 0, (start, 0)
    while state not in seen and turns < 2000:
        seen.add(state)
        i, j = state
        one, two = getattr(i, holds.get(direction, "__eq__"))(bound), j < 3
        if not (one and two if both == "and" else one or two):
            break
        made = wrapped(limits[limit](wrapped(i + wrapped(step)), most))
        state, turns = (made, wrapped(j + 1) if made < i else j), turns + 1
    else:
        return  # it comes back to where it was, or takes long
    found = counts_of(parse(text)).loops["loop"]
    assert (found.least, found.most, found.mean) == (turns, turns, turns)


CLIPPED = """\
HloModule loop, is_scheduled=true

%body (state: (u8[], u8[], u8[])) -> (u8[], u8[], u8[]) {{
  %state = (u8[], u8[], u8[]) parameter(0)
  %i = u8[] get-tuple-element(%state), index=0
  %low = u8[] get-tuple-element(%state), index=1
  %high = u8[] get-tuple-element(%state), index=2
  %one = u8[] constant(1)
  %next = u8[] add(%i, %one)
  ROOT %out = (u8[], u8[], u8[]) tuple(%next, %low, %high)
}}

%condition (cond_state: (u8[], u8[], u8[])) -> pred[] {{
  %cond_state = (u8[], u8[], u8[]) parameter(0)
  %i = u8[] get-tuple-element(%cond_state), index=0
  %low = u8[] get-tuple-element(%cond_state), index=1
  %high = u8[] get-tuple-element(%cond_state), index=2
  %none = u8[] constant(0)
  %more = pred[] compare(%high, %none), direction=NE
  %signed = s8[] bitcast-convert(%high)
  %bottom = s8[] constant(0)
  %positive = pred[] compare(%signed, %bottom), direction=GT
  %same = pred[] compare(%high, %none), direction=EQ
  %less = pred[] compare(%i, %low), direction=LT
  %both = pred[] and(%same, %less)
  ROOT %goes_on = pred[] or(%positive, %both)
}}

ENTRY %main (n: s8[]) -> (u8[], u8[], u8[]) {{
  %n = s8[] parameter(0)
  %bottom = s8[] constant(0)
  %negative = pred[] compare(%n, %bottom), direction=LT
  %all = u8[] constant(255)
  %none = u8[] constant(0)
  %low0 = u8[] bitcast-convert(%n)
  %high0 = u8[] select(%negative, %all, %none)
{ops}
  %initial = (u8[], u8[], u8[]) tuple(%none, %low{last}, %high{last})
  ROOT %loop = (u8[], u8[], u8[]) while(%initial), condition=%condition, body=%body
}}
"""
LIMIT = """\
  %bound{to} = u8[] constant({bound})
  %signed{to} = s8[] bitcast-convert(%high{of})
  %beyond{to} = pred[] compare(%signed{to}, %bottom), direction={way}
  %same{to} = pred[] compare(%high{of}, %none), direction=EQ
  %less{to} = pred[] compare(%low{of}, %bound{to}), direction={way}
  %both{to} = pred[] and(%same{to}, %less{to})
  %takes{to} = pred[] or(%beyond{to}, %both{to})
  %low{to} = u8[] select(%takes{to}, %bound{to}, %low{of})
  %high{to} = u8[] select(%takes{to}, %none, %high{of})"""
"""A number in two halves, at most (GT) or at least (LT) a bound."""


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["LT", "GT"]), st.integers(0, 90)), max_size=4))
def test_limits_of_numbers_in_halves_bound_what_running_them_counts(
    limits: list[tuple[str, int]],
) -> None:
    ops = [
        LIMIT.format(to=at + 1, of=at, way=way, bound=bound)
        for at, (way, bound) in enumerate(limits)
    ]
    text = CLIPPED.format(ops="\n".join(ops), last=len(limits))
    found = counts_of(parse(text)).loops["loop"]
    trips = []
    for number in range(-128, 128):
        for way, bound in limits:
            number = min(number, bound) if way == "GT" else max(number, bound)
        trips.append(max(number, 0))
    assert (found.least, found.most) == (min(trips), max(trips))
    assert found.known == (min(trips) == max(trips))


NESTED = """\
HloModule nested, is_scheduled=true, num_partitions=8

%largest (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %both = s32[] maximum(%a, %b)
}}

%turn (within: (s32[], s32[])) -> (s32[], s32[]) {{
  %within = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%within), index=0
  %bound = s32[] get-tuple-element(%within), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  ROOT %out = (s32[], s32[]) tuple(%next, %bound)
}}

%less (within: (s32[], s32[])) -> pred[] {{
  %within = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%within), index=0
  %bound = s32[] get-tuple-element(%within), index=1
  ROOT %goes_on = pred[] compare(%j, %bound), direction=LT
}}

%body (state: (s32[], s32[30])) -> (s32[], s32[30]) {{
  %state = (s32[], s32[30]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %table = s32[30] get-tuple-element(%state), index=1
  %item = s32[1] dynamic-slice(%table, %i), dynamic_slice_sizes={{1}}
  %id = u32[] partition-id()
  %device = s32[] convert(%id)
  %three = s32[] constant(3)
  %line = s32[1] broadcast(%three), dimensions={{}}
  %items = s32[2] concatenate(%item, %line), dimensions={{0}}
  %from = s32[] constant(10)
  %bound = s32[] {bound}
  %zero = s32[] constant(0)
  %first = (s32[], s32[]) tuple(%zero, %bound)
  %inner = (s32[], s32[]) while(%first), condition=%less, body=%turn
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], s32[30]) tuple(%next, %table)
}}

%condition (state: (s32[], s32[30])) -> pred[] {{
  %state = (s32[], s32[30]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %turns = s32[] constant(30)
  ROOT %more = pred[] compare(%i, %turns), direction=LT
}}

ENTRY %main () -> (s32[], s32[30]) {{
  %zero = s32[] constant(0)
  %table = s32[30] iota(), iota_dimension=0
  %initial = (s32[], s32[30]) tuple(%zero, %table)
  ROOT %outer = (s32[], s32[30]) while(%initial), condition=%condition, body=%body
}}
"""


@pytest.mark.parametrize(
    ("bound", "mean", "apart"),
    [
        ("reshape(%item)", 29 / 2, False),
        ("reduce(%items, %from), dimensions={0}, to_apply=%largest", 10 + 19 * 20 / 2 / 30, False),
        ("reduce(%line, %from), dimensions={0}, to_apply=%largest", 10, False),
        ("copy(%device)", 7, True),
        ("maximum(%device, %i)", (7 * 8 + sum(range(8, 30))) / 30, True),
        ("all-reduce(%device), to_apply=%largest", None, False),
    ],
)
def test_bounds_from_reductions_scanned_items_and_the_device_are_known(
    bound: str, mean: float | None, apart: bool
) -> None:
    found = counts_of(parse(NESTED.format(bound=bound)))
    inner = found.loops["inner"]
    assert inner.mean == (None if mean is None else pytest.approx(mean))
    assert found.apart == ({"inner"} if apart else set())
    if mean is None:
        assert (inner.least, inner.most) == (0, 7)
