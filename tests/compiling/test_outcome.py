"""What out-of-memory messages say, those of today's compiler and of older ones."""

from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.compiling.outcome import Compiled, rejection
from systolic.core.errors import RunError
from systolic.forecasting.run import of_outcome

GIB = 2**30
SHORT = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for"
    " HLO temporaries (19.43G) exceeds available HBM (15.75G)."
)
LONG = """\
XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.

Total hbm usage >= 20.76G:
    reserved        264.00M
    program          12.50G
    arguments         8.00G

Output size 8.00G; shares 8.00G with arguments.

Program hbm requirement 12.50G:
    HLO temp         12.50G (100.0% utilization: Unpadded (12.40G) Padded (12.50G), 0.0% fragmentation (0B))

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(train)/jvp(model)/mlp/dot_general[precision=None]" source_file="/home/me/model.py" source_line=41
     Shape: bf16[8,4096,65536]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     XLA label: fusion.12 = fusion(param.3, fusion.4), kind=kOutput, calls=fused_computation.7
     Allocation type: HLO temp
     ==========================

  2. Size: 2.00G
     Operator: op_name="jit(train)/transpose(jvp(model))/mlp/dot_general" source_file="/home/me/model.py" source_line=42
     Shape: f32[65536,8192]{1,0:T(8,128)}
     Unpadded size: 2.00G
     XLA label: fusion.13 = fusion(fusion.12), kind=kLoop, calls=fused_computation.8
     Allocation type: HLO temp
     ==========================

  3. Size: 512.00M
     Shape: bf16[128,1024,2048]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 500.00M
     Extra memory due to padding: 12.00M (1.0x expansion)
     XLA label: all-gather.5 = all-gather(param.4), replica_groups={{0,1}}
     Allocation type: HLO temp
     ==========================

  4. Size: 3.00G
     Operator: op_name="state.params['embedding']"
     Shape: f32[98304,8192]{1,0:T(8,128)}
     Unpadded size: 3.00G
     XLA label: param.9 = parameter(9)
     Allocation type: arguments
     ==========================
"""
ON_CHIP = (
    "XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in"
    " memory space vmem. Used 17.50M of 16.00M vmem. Exceeded vmem capacity by 1.50M."
)


def test_todays_message() -> None:
    found = rejection(SHORT, 0)
    assert found is not None
    assert (found.space, found.buffers) == ("hbm", ())
    assert found.need_bytes == round(19.43 * GIB)
    assert found.have_bytes == 15.75 * GIB


def test_the_long_message_and_its_buffers() -> None:
    found = rejection(LONG, 0)
    assert found is not None
    assert (found.need_bytes, found.have_bytes) == (20.5 * GIB, 15.75 * GIB)
    assert [b.bytes for b in found.buffers] == [4 * GIB, 3 * GIB, 2 * GIB, GIB // 2]
    first = found.buffers[0]
    assert first.op == "jit(train)/jvp(model)/mlp/dot_general[precision=None]"
    assert first.shape == "bf16[8,4096,65536]{2,1,0:T(8,128)(2,1)}"
    assert first.source == "/home/me/model.py:41"
    assert first.kind == "HLO temp"
    assert found.buffers[3].op == ""


def test_buffers_of_the_message_have_kinds_in_a_forecast() -> None:
    found = rejection(LONG, 0)
    assert found is not None
    record = of_outcome(found, "mine", slice("v5e-4"), 0.0).to_json()
    assert [b["kind"] for b in record["rejected"]["buffers"]] == [
        "saved activations",
        "parameters",
        "gradients",
        "collective buffers",
    ]
    assert record["hbm"]["peak_bytes"] == 20.5 * GIB
    rejected = {name: value for name, value in record["rejected"].items() if name != "buffers"}
    assert rejected == {
        "space": "hbm",
        "need_bytes": 20.5 * GIB,
        "have_bytes": 15.75 * GIB,
        "remedies": [],
    }
    assert list(record["rejected"]["buffers"][0]) == ["bytes", "op", "shape", "source", "kind"]


def test_on_chip_memory_is_told_apart() -> None:
    found = rejection(ON_CHIP, 0)
    assert found is not None
    assert (found.space, found.need_bytes) == ("vmem", 17.5 * 2**20)


@pytest.mark.parametrize(
    "text", ["", "INVALID_ARGUMENT: No such compile option", "INTERNAL: Mosaic failed to compile"]
)
def test_other_failures_are_no_refusal(text: str) -> None:
    assert rejection(text, 0) is None


def test_an_unreadable_refusal_is_still_one() -> None:
    found = rejection("RESOURCE_EXHAUSTED: words of a later version", 7)
    assert found is not None
    assert (found.need_bytes, found.have_bytes) == (0, 7)


@pytest.mark.parametrize("content", [None, b"no gzip", b"\x1f\x8b\x08\x00half"])
def test_a_damaged_entry_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "module.hlo.gz").write_bytes(content)
    with pytest.raises(RunError, match="is damaged") as raised:
        Compiled(tmp_path, "abc", False).hlo  # noqa: B018
    assert "\n" not in str(raised.value)
