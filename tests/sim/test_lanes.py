import pytest

from systolic.chips import slice
from systolic.sim.rates import rates_of
from tests.sim.test_simulate import BIG, GATHER, PART, gathered, of, run

PAIRS = "channel_id=2, source_target_pairs="


def test_permutes_in_opposite_directions_use_both_ways_of_a_link() -> None:
    """A windowed einsum begins two at once, one each way."""
    both = run(
        f"""\
  %x = {BIG} parameter(0)
  %s1 = ({BIG}, {BIG}) collective-permute-start(%x), {PAIRS}{{{{0,1}}}}
  %s2 = ({BIG}, {BIG}) collective-permute-start(%x), {PAIRS}{{{{1,0}}}}
  %d1 = {BIG} collective-permute-done(%s1)
  %d2 = {BIG} collective-permute-done(%s2)"""
    )
    same = run(
        f"""\
  %x = {BIG} parameter(0)
  %s1 = ({BIG}, {BIG}) collective-permute-start(%x), {PAIRS}{{{{0,1}}}}
  %s2 = ({BIG}, {BIG}) collective-permute-start(%x), {PAIRS}{{{{0,1}}}}
  %d1 = {BIG} collective-permute-done(%s1)
  %d2 = {BIG} collective-permute-done(%s2)"""
    )
    alone = 2**22 / rates_of(slice("v5e-4")).link
    assert both.seconds == pytest.approx(alone, rel=0.1)
    assert same.seconds == pytest.approx(2 * alone, rel=0.1)


def test_a_small_collective_takes_turns_with_a_large_one() -> None:
    """A reduction of a few bytes does not wait for the gather that is under way."""
    small = "f32[8]{0:T(256)}"
    timeline = run(
        f"""\
  %y = {PART} parameter(0)
  %z = {small} parameter(1)
  %start = ({PART}, {BIG}) all-gather-start(%y), {GATHER}
  %sum = {small} all-reduce(%z), channel_id=3, replica_groups={{{{0,1}}}}, to_apply=%add
  %done = {BIG} all-gather-done(%start)""",
        "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %s = f32[] add(%a, %b)\n}\n\n",
    )
    large = of(gathered(1), "start", "ici").seconds
    alone = of(
        run(
            f"""\
  %z = {small} parameter(0)
  %sum = {small} all-reduce(%z), channel_id=3, replica_groups={{{{0,1}}}}, to_apply=%add"""
        ),
        "sum",
    ).seconds
    assert of(timeline, "sum").seconds == pytest.approx(2 * alone)
    # What both move is moved, one way or the other.
    assert timeline.seconds == pytest.approx(large + alone)


def test_the_link_to_the_host_has_both_directions() -> None:
    there = f"{BIG[:-1]}S(5)}}"

    def copied(*ways: tuple[str, str]) -> float:
        starts = "\n".join(
            f"  %s{n} = ({to}, {at}, u32[]{{:S(2)}}) copy-start(%{'h' if at == there else 'x'})"
            for n, (to, at) in enumerate(ways)
        )
        ends = "\n".join(f"  %d{n} = {to} copy-done(%s{n})" for n, (to, _) in enumerate(ways))
        return run(
            f"  %x = {BIG} parameter(0)\n  %h = {there} parameter(1)\n{starts}\n{ends}"
        ).seconds

    out, back = (there, BIG), (BIG, there)
    alone = 2**22 / (slice("v5e-4").chip.pcie_bytes_per_second_per_chip or 0)
    assert copied(out) == pytest.approx(alone, rel=0.02)
    assert copied(out, back) == pytest.approx(copied(out))
    assert copied(out, out) == pytest.approx(2 * copied(out), rel=0.02)
