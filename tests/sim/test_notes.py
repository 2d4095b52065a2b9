"""One note of a kind, in recorded programs and by hand."""

import pytest

from systolic.chips import slice
from systolic.forecasting.cautions import cautions_of
from systolic.hlo import parse
from systolic.sim.simulate import simulate
from systolic.sim.timeline import merged

KERNEL = (
    "kernel {}: balanced routing, {} groups of equal size, each begun inside a tile of 128 rows"
)


def test_notes_that_differ_in_names_and_numbers_are_one() -> None:
    notes = [
        KERNEL.format("ragged-dot.3", 8),
        "no rule prices custom-call Odd",
        KERNEL.format("ragged-dot.17.cloned", 64),
        "no rule prices custom-call Even",
        KERNEL.format("jvp.transpose.5", 8),
    ]
    assert merged(notes) == (
        f"{notes[0]} (and 2 more like it)",
        "no rule prices custom-call Odd",
        "no rule prices custom-call Even",
    )
    assert merged([]) == ()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_loops_of_unknown_length_make_one_note(count: int) -> None:
    loops = "\n".join(
        f"  %while.{n} = (s32[], f32[8]) while(%start), condition=%go, body=%turn"
        for n in range(count)
    )
    module = parse(f"""HloModule m, is_scheduled=true

%turn (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  ROOT %p = (s32[], f32[8]) parameter(0)
}}

%go (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]) parameter(0)
  ROOT %odd = pred[] custom-call(%q), custom_call_target="Odd"
}}

ENTRY %main (start: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %start = (s32[], f32[8]) parameter(0)
{loops}
  ROOT %end = (s32[], f32[8]) copy(%while.0)
}}
""")
    (note,) = cautions_of(simulate(module, slice("v5e-1")))
    assert note.startswith("trips that the program leaves open: while.0 counted once")
    assert f"and {count - 3} more;" in note or count <= 3
    assert 'give them with --trips while.0=100, in Python trips={"while.0": 100}' in note


def test_a_forecast_names_the_clock_that_it_assumes() -> None:
    module = parse("""HloModule m, is_scheduled=true

ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024] parameter(0)
  ROOT %y = f32[1024,1024] negate(%x)
}
""")
    (note,) = (note for note in simulate(module, slice("tpu7x-8")).notes if "GHz" in note)
    assert note.startswith("assumes tpu7x's default power state 3, 1.962 GHz; ")
    assert "have state 7, 2.2 GHz: --flags=--xla_tpu_dvfs_p_state=7" in note
    chosen = simulate(module, slice("tpu7x-8"), flags=["--xla_tpu_dvfs_p_state=7"])
    other = simulate(module, slice("v6e-8"))
    assert not any("GHz" in note for note in (*chosen.notes, *other.notes))
