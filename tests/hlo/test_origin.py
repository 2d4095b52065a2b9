from systolic.hlo import parse
from systolic.hlo.module import named

MODULE = parse("""\
HloModule m, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %sine = f32[8] sine(%p), metadata={op_name="jit(f)/model/sin"}
}

%outer (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  %held = f32[8] fusion(%q), kind=kLoop, calls=%inner
  ROOT %turned = f32[8] bitcast(%held)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0), metadata={op_name="params[\\'w\\']"}
  %fused = f32[8] fusion(%x), kind=kLoop, calls=%outer
  %start = (f32[8], f32[8], u32[]) copy-start(%fused)
  %done = f32[8] copy-done(%start)
  %plain = f32[8] copy(%x)
  %made = f32[8] custom-call(), custom_call_target="AllocateBuffer"
  ROOT %sum = f32[8] add(%done, %plain), metadata={op_name="jit(f)/add"}
}
""")


def name_of(instruction: str) -> str:
    return named(MODULE, MODULE.entry, MODULE.entry[instruction]).op_name


def test_an_op_with_a_name_is_itself() -> None:
    assert name_of("sum") == "jit(f)/add"


def test_a_fusion_is_what_it_holds() -> None:
    assert name_of("fused") == "jit(f)/model/sin"


def test_a_copy_is_what_it_copies() -> None:
    assert name_of("done") == name_of("start") == "jit(f)/model/sin"
    assert name_of("plain") == "params['w']"


def test_what_nothing_names_has_no_name() -> None:
    assert name_of("made") == ""
