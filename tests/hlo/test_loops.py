import pytest
from hypothesis import given
from hypothesis import strategies as st

from systolic.hlo import parse
from systolic.hlo.loops import trip_count


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
    return trip_count(module, module.entry, module.entry["loop"])


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
    assert found == run(start, bound, step, direction)


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
    assert trip_count(module, module.entry, module.entry["loop"]) == bound
