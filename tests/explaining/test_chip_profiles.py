"""Profiles of TPUs against figures that were worked out by hand from their events and shapes."""

import json
from functools import cache
from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.explaining.causes import causes_of_profile
from systolic.explaining.profiles import figures, unjudged
from systolic.explaining.step import Cause
from systolic.profile import Profile, open_profile
from systolic.profile.table import OpRow, ProfileTable
from tests.profile.real import BF16, HOST_OFFLOAD, KERNEL, QUANTIZED, excerpt_or_whole, whole

PARTS = pytest.mark.parametrize("part", ["excerpt", "whole"])
ARRAY = 5 * 1024 * 1024 * 256 * 4
"""Bytes of f32[5,1024,1024,256]."""


@cache
def opened(path: Path, chip: str = "") -> Profile:
    return open_profile(path, chip)


def explained(path: Path, chip: str = "") -> dict[str, Cause]:
    return {cause.name: cause for cause in causes_of_profile(opened(path, chip))}


def rows(path: Path, chip: str = "") -> dict[tuple[str, str], OpRow]:
    return {(row.program, row.op.raw.name): row for row in ProfileTable(opened(path, chip)).ops}


# Copies between host and device, and all-reduces, on v6e


@PARTS
def test_an_all_reduce_has_its_rate_on_the_link(part: str):
    row = rows(excerpt_or_whole(HOST_OFFLOAD, part))["jit__psum", "all-reduce"]
    assert row.median == pytest.approx(121.69e-3, rel=2e-4)
    assert row.op.traffic.link == ARRAY  # 2 (n - 1) / n of it, n = 2
    assert row.per_second == pytest.approx(44.1e9, rel=2e-3)
    assert row.rate is not None
    assert row.rate.unit == "one link between chips"
    assert row.share == pytest.approx(44.1 / 93.35, rel=2e-3)


@PARTS
def test_a_sum_and_a_fill_have_their_rate_of_device_memory(part: str):
    found = rows(excerpt_or_whole(HOST_OFFLOAD, part))
    added, filled = (
        found["jit_f", "broadcast_add_fusion.2"],
        found["jit_broadcast_in_dim", "broadcast.2"],
    )
    assert added.median == pytest.approx(7.91e-3, rel=1e-3)
    assert added.per_second == pytest.approx(2 * ARRAY / 7.91e-3, rel=2e-3)
    assert added.share == pytest.approx(0.829, abs=0.002)
    assert filled.median == pytest.approx(4.444e-3, rel=1e-4)
    assert filled.per_second == pytest.approx(1208e9, rel=1e-3)


@PARTS
def test_copies_have_the_rate_of_the_host_link_while_they_have_it_for_themselves(part: str):
    found = rows(excerpt_or_whole(HOST_OFFLOAD, part))
    inward, outward = found["jit_f", "copy-done"], found["jit_f", "copy-done.5"]
    assert inward.op.traffic.host == outward.op.traffic.host == ARRAY
    assert not inward.op.traffic.to_host
    assert outward.op.traffic.to_host
    assert inward.op.traffic.space == outward.op.traffic.space == "host"
    assert inward.per_second == pytest.approx(28.4e9, rel=2e-3)
    assert outward.per_second == pytest.approx(29.44e9, rel=2e-3)
    # One that starts with the first follows it on the link; it waits 194 ms, and moves in 202.
    second = found["jit_f", "copy-done.2"]
    assert second.per_second is not None
    assert second.per_second < inward.per_second
    assert second.flight > second.median


@PARTS
def test_a_step_that_waits_for_the_hosts_memory_is_explained_so(part: str):
    path = excerpt_or_whole(HOST_OFFLOAD, part)
    causes = explained(path)
    first = next(iter(causes.values()))
    assert first.name == "host-transfers"
    assert first.seconds == pytest.approx(0.760, rel=5e-3)
    assert first.work is not None
    assert first.work.unit == "host link"
    # Four of the six copies are waited for.
    assert first.work.amount == pytest.approx(4 * ARRAY)
    assert 26e9 < first.work.per_second < 29.5e9
    assert not any("remat" in text or "--layout" in text for text in first.advice)
    assert "pinned_host" in first.advice[0]
    memory = causes["memory-bound"]
    assert memory.seconds == pytest.approx(0.024, rel=0.01)
    assert "norms" not in memory.title
    assert memory.work is not None
    assert memory.work.share == pytest.approx(0.82, abs=0.01)
    hidden = figures(opened(path))["beside"]["host transfers"]["hidden_seconds"]
    assert hidden == pytest.approx(0.024, rel=0.01)  # while the sums run
    assert figures(opened(path))["shares"]["host transfers"] == pytest.approx(0.97, abs=0.002)


def test_all_devices_of_a_profile_are_read():
    path = whole(HOST_OFFLOAD)
    found = figures(opened(path))
    assert found["devices"] == 4
    assert found["device"] == "TPU v6 Lite"
    assert found["step_seconds"] == pytest.approx(0.784, abs=5e-4)
    assert not any("other devices" in note for note in unjudged(opened(path)))
    assert all(len(one.trace.ops) in (1503, 1504) for one in opened(path).devices)


# A Pallas kernel on v6e


def test_a_kernel_is_called_three_times():
    path = whole(KERNEL)
    profile = opened(path)
    times = [op.end - op.start for op in profile.trace.ops]
    assert times == pytest.approx([75.566e-6, 75.785e-6, 75.911e-6], rel=1e-5)
    row = rows(path)["jit_matmul_optimized", "matmul_optimized.1"]
    assert row.calls == 3
    assert row.op.traffic.hbm == 4 * (2048 * 1024 + 1024 * 2048 + 2048 * 2048)
    cause = explained(path)["custom-kernels"]
    assert "arrays of 33.6 MB at 44" in cause.evidence[0]
    # Its time in the median step, as the table of ops has it, not what is left of it beyond the FLOPs of its cost estimate.
    assert cause.seconds == pytest.approx(75.911e-6, rel=1e-5)
    assert cause.share == pytest.approx(figures(profile)["shares"]["custom kernels"])
    assert cause.evidence[0].startswith("0.0759 ms in matmul_optimized.1")


# Serving on TPU7x


def test_a_kernel_that_reads_some_pages_has_no_rate_of_all():
    """Its cache of 2 x 1.28 GB is updated in place: as read and written whole it would be at twice the memory's rate."""
    found = rows(whole(QUANTIZED), "tpu7x")
    row = found["jit_step_fun", "RPA-bq_32-bkvp_32-p_128-.37"]
    assert row.rate is None
    assert all(one.share is None or one.share < 1 for one in found.values())


@pytest.mark.parametrize(
    ("name", "milliseconds", "number"), [(BF16, 66.9, 3454), (QUANTIZED, 65.6, 4682)]
)
def test_a_trace_of_the_viewer_is_read(name: str, milliseconds: float, number: int):
    profile = opened(whole(name), "tpu7x")
    assert [len(one.trace.ops) for one in profile.devices] == [number, number]
    assert profile.seconds == pytest.approx(milliseconds * 1e-3, abs=5e-5)
    assert figures(profile)["shares"]["idle"] < 0.01
    assert sum(figures(profile)["shares"].values()) == pytest.approx(1)
    table = ProfileTable(profile)
    inside = sum(row.seconds for row in table.ops if row.program == "jit_step_fun")
    assert inside == pytest.approx(profile.seconds, rel=0.01)


@PARTS
def test_rates_beyond_a_chip_s_peaks_tell_that_it_is_another(part: str):
    path = excerpt_or_whole(BF16, part)
    assert not [note for note in unjudged(opened(path, "tpu7x")) if "rates against" in note]
    (note,) = [note for note in unjudged(opened(path, "v6e")) if "rates against" in note]
    assert "more than that chip can" in note
    assert "TPU v6 lite" in note


def test_collectives_kernels_and_layouts_are_causes_of_their_own():
    causes = explained(whole(BF16), "tpu7x")
    expected = {
        "attention-kernel": 17.0e-3,
        "exposed-collectives-other": 3.43e-3,
        "layout-copies": 2.1e-3,
    }
    for name, seconds in expected.items():
        assert causes[name].seconds == pytest.approx(seconds, rel=0.03), name
    links = causes["exposed-collectives-other"].work
    assert links is not None
    assert links.unit == "links between dies"
    assert links.amount == pytest.approx(129 * 1024 * 5120 * 2, rel=1e-3)
    copied = causes["layout-copies"].work
    assert copied is not None
    assert copied.unit == "device memory"
    assert copied.share is not None
    assert 0 < copied.share < 1


@PARTS
def test_rates_need_the_chip_that_a_trace_does_not_name(
    part: str, capsys: pytest.CaptureFixture[str]
):
    path = excerpt_or_whole(BF16, part)
    assert main(["explain", str(path)]) == 0
    assert "--chip tpu7x" in capsys.readouterr().out
    assert main(["explain", str(path), "--chip", "tpu7x", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["figures"]["device"] == "TPU7x"
    assert told["figures"]["devices"] == 2
    (row,) = (one for one in told["ops"] if one["name"] == "convolution_bitcast_fusion.63")
    assert row["flops"] == 289946992640
    # Two arrays are in vector memory: bf16[1024,5120] and f32[1024].
    assert row["hbm_bytes"] == pytest.approx(360725504 - 10485760 - 4096, rel=0.05)
    assert row["unit"] == "matrix units"
    assert 0.5 < row["share"] < 1
    with pytest.raises(OptionError, match="is of TPU v6 Lite"):
        open_profile(excerpt_or_whole(HOST_OFFLOAD, "excerpt"), "v5e")


def test_lines_that_price_nothing_name_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    path = whole(KERNEL)
    assert main(["explain", str(path), "--against", "lines"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no op of the profile is priced by its line alone" in line
    assert line.endswith("give --against program [option]")
    assert main(["explain", str(path), "--against", "program"]) == 0
    shown = capsys.readouterr().out
    assert "measured 0.0758 ms a run (median of 3), simulated 0.0749 ms" in shown
    assert "0.0748" not in shown
