import re

import pytest

from systolic.chips import slice
from systolic.core.errors import DataError
from systolic.hlo import parse
from systolic.hlo.loops import counts_of
from systolic.hlo.module import Module, aliased_operand, aliases_of
from systolic.sim.simulate import simulate
from tests.recorded import hlo as recorded

OLD = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {2}: (1, {}) }, entry_computation_layout={(f32[8,128]{1,0:T(8,128)})->f32[8,128]{1,0:T(8,128)}}, num_partitions=4

%fused_computation (param_0: f32[8,128]) -> f32[8,128] {
  %param_0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %negate.1 = f32[8,128]{1,0:T(8,128)} negate(f32[8,128]{1,0:T(8,128)} %param_0)
}

ENTRY %main.4 (Arg_0.1: f32[8,128]) -> f32[8,128] {
  %Arg_0.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(f32[8,128]{1,0:T(8,128)} %Arg_0.1)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done((f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) %copy-start)
  %constant.1 = f32[2]{0} constant({1, 2})
  ROOT %fusion = f32[8,128]{1,0:T(8,128)} fusion(f32[8,128]{1,0:T(8,128)S(1)} %copy-done), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/jit(main)/neg" source_file="/home/me/f.py" source_line=12}, backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"118"}}
}
"""


def test_operands_printed_with_their_shapes() -> None:
    module = parse(OLD)
    entry = module.entry
    assert [i.operands for i in entry] == [
        ("0",),
        ("Arg_0.1",),
        ("copy-start",),
        ("{1, 2}",),
        ("copy-done",),
    ]
    assert entry.root.name == "fusion"
    assert entry.root.cycles == 118
    assert str(module.source(entry.root)) == "/home/me/f.py:12"
    assert module.callee(entry.root, "calls").root.operands == ("param_0",)
    assert module.num_partitions == 4
    assert module.donations == {0: 0, 2: 1}


def test_comments_between_operands() -> None:
    names = ", ".join(f"/*index={n}*/%a" if n % 5 == 0 and n else "%a" for n in range(7))
    module = parse(
        f"HloModule m\n\nENTRY %e () -> (f32[]) {{\n  %a = f32[] parameter(0)\n  ROOT %t = (f32[]) tuple({names})\n}}\n"
    )
    assert module.entry.root.operands == ("a",) * 7


def compact(text: str) -> str:
    """A module as XLA's dumps write it since jaxlib 0.11: no get-tuple-element, and ``%while.1#2`` where one is read."""
    part = re.compile(
        r"^  %(\S+) = .* get-tuple-element\(.*%(\S+)\), index=(\d+).*\n(?:(?!  \S|\}$).*\n)*",
        re.MULTILINE,
    )
    made = []
    for computation in text.split("\n}\n"):
        named = {f"%{one[1]}": f"%{one[2]}#{one[3]}" for one in part.finditer(computation)}
        computation = part.sub("", computation)
        for _ in range(2):  # parts of parts
            computation = re.sub(
                r"%[\w.-]+", lambda one, named=named: named.get(one[0], one[0]), computation
            )
        made.append(computation)
    return "\n}\n".join(made)


def test_parts_of_tuples_without_lines_of_their_own() -> None:
    text = recorded.text("lm-v5e-4")
    plain, short = parse(text), parse(compact(text))
    assert "get-tuple-element(" in text
    assert "get-tuple-element(" not in compact(text)

    def lines(module: Module) -> list[list[tuple[str, str]]]:
        return [
            sorted((one.opcode, str(one.shape)) for one in computation)
            for computation in module.computations.values()
        ]

    assert lines(short) == lines(plain)
    assert counts_of(short) == counts_of(plain)
    seconds = [simulate(module, slice("v5e-4")).seconds for module in (plain, short)]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-9)

    inner = """\
HloModule m

ENTRY %e (a: ((f32[8], s32[]), f32[2])) -> f32[8] {
  %a = ((f32[8], s32[]), f32[2]) parameter(0)
  ROOT %n = f32[8] negate(%a#0#0)
}
"""
    assert [one.name for one in parse(inner).entry] == ["a", "a#0", "a#0#0", "n"]
    with pytest.raises(
        DataError, match=r"a#0#2 in e is no part of a tuple; the text may be damaged"
    ):
        parse(inner.replace("#0#0", "#0#2"))


def test_an_attribute_that_spans_lines_belongs_to_its_instruction() -> None:
    module = parse("""\
HloModule m, is_scheduled=true

ENTRY %e (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": 512
}}, metadata={op_name="jit(f)/pallas_call"}
  ROOT %n = f32[8]{0} negate(%k)
}
""")
    assert [i.opcode for i in module.entry] == ["parameter", "custom-call", "negate"]
    assert module.entry["k"].op_name == "jit(f)/pallas_call"
    assert '"block": 512' in (module.entry["k"].attribute("frontend_attributes") or "")


def test_a_computation_of_another_thread_ends_where_it_ends() -> None:
    module = parse("""\
HloModule m, is_scheduled=true

%offloaded (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%a)
}, execution_thread="sparsecore"

ENTRY %e (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%b)
}
""")
    assert list(module.computations) == ["offloaded", "e"]
    assert module.computations["offloaded"].root.opcode == "negate"


def test_aliases() -> None:
    module = parse("""\
HloModule m

ENTRY %e (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %b = f32[8] parameter(1)
  %f = (f32[8], f32[8]) fusion(%a, %b), kind=kLoop, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%g
  ROOT %h = f32[8] fusion(%a, %b), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%g
}
""")
    assert aliases_of(module.entry["f"]) == {1: 0, 2: 1}
    assert aliased_operand(module.entry["f"], 0) is None
    assert aliased_operand(module.entry["h"], 0) == 1
    assert aliases_of(module.entry["a"]) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "module { func.func public @main() }",
        "HloModule m\n",
        "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %a = f32[] parameter(0)\n",
        "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %a = f32[] parameter(0\n}\n",
        "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %a = f32[]\n}\n",
        "HloModule m\n\nENTRY %e () -> f32[] {\n}\n",
        "HloModule\n",
    ],
)
def test_damaged_text_is_one_line(text: str) -> None:
    with pytest.raises(DataError) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_a_call_into_nothing_is_one_line() -> None:
    module = parse(
        "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %a = f32[] fusion(), kind=kLoop, calls=%gone\n}\n"
    )
    with pytest.raises(DataError, match="gone"):
        module.callee(module.entry.root, "calls")


@pytest.mark.parametrize("name", recorded.NAMES)
def test_every_line_of_a_recorded_module_is_read(name: str) -> None:
    text, module = recorded.text(name), recorded.module(name)
    heads = re.findall(r"^  (?:ROOT )?%\S+ = ", text, flags=re.MULTILINE)
    assert sum(len(c) for c in module.computations.values()) == len(heads)
    assert len(module.computations) == len(re.findall(r"^(?:ENTRY )?%.*\{$", text, re.MULTILINE))
    assert module.is_scheduled


@pytest.mark.parametrize("name", recorded.NAMES)
def test_every_name_in_a_recorded_module_is_known(name: str) -> None:
    module = recorded.module(name)
    for computation in module.computations.values():
        assert computation.root.root
        for instruction in computation:
            assert instruction.shape.padded_bytes >= instruction.shape.bytes
            if instruction.opcode not in ("parameter", "constant", "iota"):
                assert set(instruction.operands) <= set(computation.index), instruction.name
            for called in instruction.called_computations:
                assert called in module.computations


@pytest.mark.parametrize("name", recorded.NAMES)
def test_a_recorded_module_knows_its_source(name: str) -> None:
    module = recorded.module(name)
    sources = {
        str(frame.file)
        for computation in module.computations.values()
        for instruction in computation
        if (frame := module.source(instruction)) is not None
    }
    assert any(file.endswith("models/decoder/module.py") for file in sources)
    assert not any(file.startswith("/") for file in sources)


def test_round_numbers_of_the_dense_model() -> None:
    module = recorded.module("lm-v5e-4")
    assert module.name == "jit_train"
    assert module.num_partitions == 4
    parameters = {p.op_name: p.shape for p in module.entry.parameters}
    assert len(parameters) == 45
    assert parameters["state.params['embedding']"].dims == (8192, 512 // 4)
    # All 41 leaves of the state are donated; the four of the batch are not.
    assert module.donations == {n: n for n in range(41)}
