"""Bytes of ops by memory space, from HLO lines that compilers wrote."""

import pytest

from systolic.profile.ops import Activity, OpTraffic, kind_of, link_bytes, read_line, traffic_of

ARRAY = 5 * 1024 * 1024 * 256 * 4
IN_HBM, IN_HOST = (
    "f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",
    "f32[5,1024,1024,256]{3,2,1,0:T(8,128)S(5)}",
)
TO_DEVICE = (
    f"%copy-done.2 = {IN_HBM} copy-done(({IN_HBM}, {IN_HOST}, u32[]{{:S(2)}}) %copy-start.2)"
)
TO_HOST = f"%copy-start.1 = ({IN_HOST}, {IN_HBM}, u32[]{{:S(2)}}) copy-start({IN_HBM} %sum)"
PREFETCH = "%slice-start.47 = ((s8[10485760]{0:T(1024)(128)(4,1)}), s8[2097152]{0:T(1024)(128)(4,1)S(1)}, s32[]{:S(2)}) async-start(s8[10485760]{0:T(1024)(128)(4,1)} %bitcast.2015), calls=%async_computation.47"
REDUCED = "%all-reduce.1 = bf16[1024,5120]{1,0:T(8,128)(2,1)S(1)} all-reduce(bf16[1024,5120]{1,0:T(8,128)(2,1)S(1)} %select), channel_id=3, replica_groups=[1,2]<=[2], use_global_device_ids=true, to_apply=%add"


def traffic(text: str, accessed: float = 0.0) -> OpTraffic:
    line = read_line(text)
    assert line is not None
    return traffic_of(line, accessed)


def test_a_copy_names_its_direction():
    inward, outward = traffic(TO_DEVICE, ARRAY), traffic(TO_HOST, ARRAY)
    assert inward == OpTraffic(hbm=ARRAY, host=ARRAY, to_host=False)
    assert outward == OpTraffic(hbm=ARRAY, host=ARRAY, to_host=True)
    assert traffic(PREFETCH) == OpTraffic(hbm=2097152, vmem=2097152)


def test_what_is_in_vector_memory_is_not_device_memory():
    found = traffic(
        "%fusion.1 = bf16[1024,5120]{1,0:T(8,128)(2,1)S(1)} fusion(bf16[1024,5120]{1,0:T(8,128)(2,1)} %a, f32[1024]{0:T(1024)S(1)} %b), kind=kLoop, calls=%c",
        20975616,
    )
    assert found.vmem == 10485760 + 4096
    assert found.hbm == 20975616 - 10485760 - 4096
    assert found.space == "HBM"


@pytest.mark.parametrize(
    ("op", "groups", "sent"),
    [
        ("all-reduce", "replica_groups=[1,4]<=[4]", 2 * 3 / 4 * 4096),
        ("reduce-scatter", "replica_groups={{0,1,2,3}}", 3 / 4 * 4096),
        ("all-gather", "replica_groups={{0,1,2,3},{4,5,6,7}}", 3 * 4096),
        ("all-to-all", "replica_groups=[2,4]<=[4,2]T(1,0)", 3 / 4 * 4096),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 4096),
        ("all-reduce", "replica_groups={}", 0),
    ],
)
def test_a_collective_sends_its_share(op: str, groups: str, sent: float):
    line = read_line(f"%x.1 = f32[1024]{{0}} {op}(f32[1024]{{0}} %a), channel_id=1, {groups}")
    assert line is not None
    assert link_bytes(line)[0] == sent


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TO_DEVICE, Activity.host),
        (TO_HOST, Activity.host),
        (PREFETCH, Activity.memory),
        (REDUCED, Activity.collective),
        (
            '%m.1 = f32[8]{0} custom-call(f32[8]{0} %a), custom_call_target="tpu_custom_call"',
            Activity.kernel,
        ),
        (
            '%g.1 = f32[8]{0} custom-call(f32[8]{0} %a), custom_call_target="__cublas$gemm"',
            Activity.matmul,
        ),
        ("%copy.9 = f32[8,8]{0,1} copy(f32[8,8]{1,0} %a)", Activity.formatting),
        (f"%copy.9 = {IN_HOST} copy({IN_HBM} %a)", Activity.host),
        ("%while.1 = (f32[8]{0}) while((f32[8]{0}) %a), condition=%c, body=%b", Activity.loop),
        ("%add.1 = f32[8]{0} add(f32[8]{0} %a, f32[8]{0} %b)", Activity.other),
    ],
)
def test_kinds_of_ops(text: str, kind: Activity):
    line = read_line(text)
    assert line is not None
    found = kind_of(line.name, line.opcode, "", line, line.target, traffic_of(line, 0.0))
    assert found is kind


def test_a_line_that_was_cut_is_none():
    assert read_line("%fusion.1 = f32[8]{0} fusion(f32[8]{0} %a, f32[") is None
    assert read_line("jit_f(123)") is None
