"""Programs that leave a time open, and what their user says of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import slice
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.forecasting import Forecast, forecast_text
from systolic.forecasting.display import readings
from systolic.forecasting.display.page import render
from systolic.forecasting.display.text import lines
from systolic.hlo import parse
from systolic.report.terminal import plain
from systolic.sim.incomplete import Ends, GapKind, Gaps, given
from systolic.sim.roofline import ModuleSource, Peaks, roofline
from systolic.sim.simulate import simulate
from systolic.sim.timeline import PricedBy
from tests.recorded import loops

V5E = slice("v5e-1")
TURN_FLOOR = 2 * 256**3 / 197e12
"""Seconds of one matmul at v5e's peak."""


def dump(name: str, folder: Path) -> Path:
    path = folder / f"{name}.txt"
    path.write_text(loops.texts()[name])
    return path


def forecast(name: str, folder: Path, **more: Any) -> Forecast:
    return forecast_text(dump(name, folder), V5E, given(**more))


@pytest.mark.parametrize(
    ("name", "trips"), [("scan", 100), ("nested", 77), ("triangle", 210), ("scan_long", 1_000_000)]
)
def test_64_bit_counters_cost_what_32_bit_ones_cost(name: str, trips: int) -> None:
    narrow, wide = (simulate(loops.module(f"{name}{kind}"), V5E) for kind in ("", "64"))
    assert narrow.seconds > trips * TURN_FLOOR
    # A counter in two halves takes a few ops more on the scalar unit.
    assert narrow.seconds <= wide.seconds < narrow.seconds + trips * 3e-6
    assert wide.executed_flops == pytest.approx(trips * 2 * 256**3)
    assert wide.incomplete == narrow.incomplete == ()


COMPLETE = (
    "scan",
    "scan64",
    "each_hundredth",
    "one_of_three",
    "triangle64",
    "map_batches",
    "associative",
    "of_floats",
    "prints",
)
MISSING: dict[str, set[tuple[GapKind, str]]] = {
    "traced": {(GapKind.loop, "")},
    "traced64": {(GapKind.loop, "")},
    "until_large": {(GapKind.loop, "")},
    "loops_on_a_line": {(GapKind.loop, "")},
    "eigh": {(GapKind.call, "EighTpu")},
    "qr": {(GapKind.call, "QrDecompositionBlock"), (GapKind.call, "CompactWyHelper")},
    "cholesky": {(GapKind.call, "Cholesky"), (GapKind.call, "InvertDiagBlocksLowerTriangular")},
    "triangular": {(GapKind.call, "InvertDiagBlocksLowerTriangular")},
    "pure": {(GapKind.callback, "pure_callback")},
    "ordered": {(GapKind.callback, "io_callback")},
    "kernel": {(GapKind.kernel, "looped")},
}


@pytest.mark.parametrize("name", [*MISSING, *COMPLETE, "svd"])
def test_a_lower_bound_says_so_everywhere(name: str, tmp_path: Path) -> None:
    made = forecast(name, tmp_path)
    record = made.to_json()
    screen = "\n".join(plain(lines(made, 100)))
    page = render(made)
    if name in COMPLETE:
        assert not made.is_lower_bound
        assert not record["lower_bound"]
        assert record["bound"] == "complete"
        assert record["step_seconds_low"] < record["step_seconds"] < record["step_seconds_high"]
        assert "lower bound" not in screen
        assert "lower bound" not in page
        return
    assert made.is_lower_bound
    assert (" a step, time open" if made.is_assumed else " a step or more") in repr(made)
    assert record["lower_bound"]
    assert record["step_seconds_high"] is None
    assert record["bound"] == ("open" if made.is_assumed else "lower")
    assert "no upper end" in record["interval"]
    if made.is_assumed:  # A loop counts once, although it may make no trip.
        assert "Time is open: " in screen
        assert "at least" not in screen
        assert "lower bound" not in screen
        assert "an assumption" in made.cautions[0]
        assert "the fewest trips" in record["interval"]
    else:
        assert "Time is a lower bound: " in screen
        assert "at least" in screen
        assert "a lower bound" in page
    assert "or more" in screen
    assert "HFU" not in screen
    # The notes that change the figure come first and are all on the screen.
    assert made.cautions
    assert readings.notes(made)[: len(made.cautions)] == made.cautions
    for note in made.cautions:
        assert note[:60] in " ".join(screen.split())
    found = {(one.part, one.label) for one in made.incomplete}
    assert found == MISSING[name] if name in MISSING else len(found) > 4
    assert all(one.source for one in made.incomplete)
    numbers = {f"{one.source.rpartition(':')[2]})" for one in made.incomplete}
    assert any(line in made.cautions[0] for line in numbers)
    assert [part["kind"] for part in record["unpriced"]] == [
        one.part.value for one in made.incomplete
    ]


def test_a_bounded_loop_has_an_upper_end(tmp_path: Path) -> None:
    made, full = (
        forecast("until_large_or_50", tmp_path, **more) for more in ({}, {"trips": {"while": 50}})
    )
    assert made.is_lower_bound
    assert made.high == pytest.approx(full.high)
    assert made.low is not None
    assert full.low is not None
    assert made.low < full.low
    (part,) = made.to_json()["unpriced"]
    assert (part["least_trips"], part["most_trips"], part["counted_trips"]) == (0, 50, 1)
    assert "at most 50 times" in made.cautions[0]


def test_the_lower_end_has_the_fewest_trips(tmp_path: Path) -> None:
    made, none = (forecast("traced", tmp_path, **more) for more in ({}, {"trips": {"while": 0}}))
    assert made.is_assumed
    assert not none.incomplete
    assert made.low == pytest.approx(none.low)
    (part,) = made.to_json()["unpriced"]
    assert part["assumed"]
    # At least one is no assumption, nor are the bytes of a call.
    assert not forecast("eigh", tmp_path).is_assumed


def seconds_of(name: str, on_tpu: bool) -> tuple[float, float, float]:
    """Least, priced and most seconds of a recorded program; the same where nothing is open."""
    module = loops.module(name)
    if on_tpu:
        made = simulate(module, V5E)
    else:
        peaks = Peaks(matmul={"f32": 1e12}, memory=1e11)
        made = roofline(module, peaks, 1, ModuleSource.compiled)
    least, most = made.least, made.most
    if not made.incomplete:
        assert least is None
        assert most is None
        return made.seconds, made.seconds, made.seconds
    assert least is not None
    assert most is not None
    return least.seconds, made.seconds, most.seconds


def branches_of(name: str, on_tpu: bool) -> list[float]:
    """Seconds of each branch of the one conditional."""
    text, found = loops.texts()[name], []
    (names,) = re.findall(r"branch_computations={([^}]*)}", text)
    for branch in names.split(", "):
        alone = parse(text.replace(names, ", ".join([branch] * len(names.split(", ")))))
        one = simulate(alone, V5E) if on_tpu else None
        peaks = Peaks(matmul={"f32": 1e12}, memory=1e11)
        one = one or roofline(alone, peaks, 1, ModuleSource.compiled)
        found.append(one.seconds)
    return found


@pytest.mark.parametrize("on_tpu", [True, False])
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("each_hundredth", (0.99, 0.01)),
        ("one_of_three", (11 / 31, 10 / 31, 10 / 31)),
        ("first_half", (0.5, 0.5)),
    ],
)
def test_a_branch_costs_as_often_as_the_counter_takes_it(
    name: str, shares: tuple[float, ...], on_tpu: bool
) -> None:
    # The step with each branch in every turn is the measure of what a share of the turns costs.
    always = branches_of(name, on_tpu)
    wanted = sum(share * seconds for share, seconds in zip(shares, always, strict=True))
    assert seconds_of(name, on_tpu) == pytest.approx((wanted,) * 3)
    assert wanted < 0.95 * max(always)


@pytest.mark.parametrize("on_tpu", [True, False])
def test_a_branch_on_data_ranges_from_the_shortest_to_the_longest(on_tpu: bool) -> None:
    short, long = sorted(branches_of("on_data", on_tpu))
    assert seconds_of("on_data", on_tpu) == pytest.approx((short, long, long))
    # Data has a say in the first 15 of 30 turns only.
    short, long = sorted(branches_of("early_on_data", on_tpu))
    half = (short + long) / 2
    assert seconds_of("early_on_data", on_tpu) == pytest.approx((short, half, half))


def test_a_branch_on_data_says_so(tmp_path: Path) -> None:
    made = forecast("on_data", tmp_path)
    record, screen = made.to_json(), " ".join("\n".join(plain(lines(made, 100))).split())
    assert made.low is not None
    assert made.high is not None
    assert made.step_seconds is not None
    assert made.low < 0.7 * made.step_seconds < made.step_seconds < made.high
    assert record["lower_bound"]
    (part,) = record["unpriced"]
    assert (part["kind"], part["assumed"], part["op"]) == (
        "branch",
        True,
        f"conditional {part['name']}",
    )
    assert part["shortest_seconds"] < part["longest_seconds"] == pytest.approx(part["seconds"])
    assert record["lower_bound"]  # a part is open, though the time is no bound from below
    assert record["bound"] == "open"
    assert "Time is open: 1 branch on data" in screen
    assert "at least" not in screen
    assert "longest branch" in made.cautions[0]
    assert made.cautions[0] in record["notes"]


def test_a_loop_of_ops_whose_time_is_assumed_has_a_wide_range(tmp_path: Path) -> None:
    made = forecast("slice_by_slice", tmp_path)
    assert made.timeline is not None
    assert made.step_seconds is not None
    assert made.low is not None
    assert made.high is not None
    assert made.timeline.assumed > 0.9 * made.step_seconds
    assert made.low < made.step_seconds / 3 < made.step_seconds * 3 < made.high
    (note,) = [one for one in made.notes if "is assumed, by no measurement" in one]
    assert "0.2 us an op on few bytes and 0.3 us a turn" in note
    # A roofline assumes nothing for a turn.
    module = loops.module("slice_by_slice")
    peaks = Peaks(matmul={"f32": 1e12}, memory=1e11)
    assert roofline(module, peaks, 1, ModuleSource.compiled).assumed == 0


def test_a_print_takes_a_range_of_the_host_s_time(tmp_path: Path) -> None:
    made = forecast("prints", tmp_path)
    assert made.timeline is not None
    (span,) = [one for one, _ in made.timeline.leaves() if one.priced_by is PricedBy.print]
    assert made.step_seconds is not None
    assert made.low is not None
    assert made.high is not None
    assert made.step_seconds > span.seconds > 1e-4 > made.low
    assert 1e-2 < made.high < 2e-2
    (note,) = [one for one in made.notes if "--cost debug_print=1ms" in one]
    assert "by no measurement of this device" in note
    told = forecast("prints", tmp_path, costs={"debug_print": "5us"})
    assert told.step_seconds == pytest.approx(made.step_seconds - span.seconds + 5e-6)
    module = loops.module("prints")
    host = roofline(module, Peaks(matmul={"f32": 1e12}, memory=1e11), 1, ModuleSource.compiled)
    assert not host.incomplete
    assert host.by_rule == (span.seconds, span.low, span.high)


@pytest.mark.parametrize("name", ["traced", "until_large_or_50", "eigh", "pure", "scan64"])
def test_a_roofline_says_so_too(name: str) -> None:
    module = loops.module(name)
    peaks = Peaks(matmul={"f32": 1e12}, memory=1e11)
    made = roofline(module, peaks, 1, ModuleSource.compiled)
    found = {(one.part, one.label) for one in made.incomplete}
    assert found == MISSING.get(name, {(GapKind.loop, "")} if name.startswith("until") else set())
    assert (made.most is not None) == (name == "until_large_or_50")
    if name == "traced":
        (loop,) = made.incomplete
        more = roofline(module, peaks, 1, ModuleSource.compiled, given({loop.name: 50}))
        assert more.seconds - made.seconds == pytest.approx(49 * loop.seconds)
        assert more.incomplete == ()


def test_trips_that_are_given_are_multiplied_out_and_told(tmp_path: Path) -> None:
    once = forecast("traced", tmp_path)
    (loop,) = once.incomplete
    by_name, by_line, by_text = (
        forecast("traced", tmp_path, trips=trips)
        for trips in (
            {loop.name: 100},
            {loop.source.rpartition("/")[2]: 100},
            [f"{loop.name}=100"],
        )
    )
    assert not by_name.is_lower_bound
    assert by_name.step_seconds is not None
    assert once.step_seconds is not None
    assert by_name.step_seconds == by_line.step_seconds == by_text.step_seconds
    assert by_name.step_seconds - once.step_seconds == pytest.approx(99 * loop.seconds)
    assert by_name.step_seconds > 100 * TURN_FLOOR
    assert by_name.to_json()["given"] == [f"{loop.name} makes 100 trips"]
    assert "1 number given" in readings.time_origin(by_name)
    assert by_name.cautions[0].startswith("given by you: ")
    assert by_name.high is not None


def test_a_line_s_number_says_how_many_loops_it_set(tmp_path: Path) -> None:
    nested = forecast("loops_on_a_line", tmp_path)
    outer, inner = sorted(nested.incomplete, key=lambda one: -len(one.name))
    line = outer.source.rpartition("/")[2]
    assert outer.source == inner.source
    each = forecast("loops_on_a_line", tmp_path, trips={outer.name: 3, inner.name: 5})
    assert each.given == ("while.11 makes 3 trips", "while.7 makes 5 trips")
    # Side by side, one number for both is what the user says.
    text = loops.texts()["traced"]
    loop = next(one for one in text.split("\n") if " while(" in one)
    again = loop.replace("%while ", "%while.9 ").replace("ROOT ", "")
    assert again != loop
    path = tmp_path / "two.txt"
    path.write_text(text.replace(loop, f"{again}\n{loop}"))
    line = forecast("traced", tmp_path).incomplete[0].source.rpartition("/")[2]
    made = forecast_text(path, V5E, given({line: 4}))
    assert made.given == (f"{line} makes 4 trips in each of 2 loops",)
    assert not made.incomplete


@pytest.mark.parametrize(
    ("name", "label", "calls"),
    [("eigh", "EighTpu", 1), ("pure", "pure_callback", 1), ("kernel", "looped", 1)],
)
def test_a_cost_that_is_given_takes_the_place_of_the_price(
    name: str, label: str, calls: int, tmp_path: Path
) -> None:
    once = forecast(name, tmp_path)
    before = sum(one.seconds for one in once.incomplete if one.part is not GapKind.callback)
    made = forecast(name, tmp_path, costs={label: "2.5ms"})
    assert not made.is_lower_bound
    assert made.timeline is not None
    assert once.step_seconds is not None
    assert made.step_seconds == pytest.approx(once.step_seconds - before + calls * 2.5e-3)
    spans = [span for span, _ in made.timeline.leaves() if span.priced_by is PricedBy.given]
    assert [span.seconds for span in spans] == [2.5e-3] * calls
    assert made.given == (f"{label} takes 2.5 ms a call",)


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("traced", {"trips": {"whle": 3}}, "whle, which is no loop .* did you mean while"),
        ("scan", {"trips": {"while": 3}}, "gives 3 for while, .* it makes 100"),
        ("until_large_or_50", {"trips": {"while": 51}}, "ends it after 50 trips"),
        (
            "loops_on_a_line",
            {"trips": {"programs.py:269": 10}},
            "where loop while.7 is inside loop while.11; give each its own",
        ),
        ("eigh", {"costs": {"EigTpu": 1}}, "EigTpu, which is no kernel.* did you mean EighTpu"),
        ("scan", {"costs": {"x": 1}}, "it has none"),
        ("traced", {"trips": {"while": -1}}, "at least 0"),
        ("traced", {"trips": ["while"]}, "write NAME=NUMBER"),
        ("eigh", {"costs": {"EighTpu": "1 week"}}, "seconds of one call, such as 1.2ms"),
    ],
)
def test_what_is_given_wrong_is_one_line(
    name: str, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=says) as raised:
        forecast(name, tmp_path, **more)
    assert "\n" not in str(raised.value)


def test_the_command_takes_trips_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(dump("svd", tmp_path))
    assert main(["forecast", path, "--on", "v5e-1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = {
        part["name"]: part["most_trips"] for part in record["unpriced"] if part["kind"] == "loop"
    }
    labels = {part["label"] for part in record["unpriced"] if part["kind"] == "custom call"}
    assert len(names) == 3
    assert len(labels) >= 4
    words = ["forecast", path, "--on", "v5e-1", "--json"]
    for name, most in names.items():
        words += ["--trips", f"{name}={most}"]
    for label in labels:
        words += ["--cost", f"{label}=30us"]
    assert main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert not made["lower_bound"]
    assert len(made["given"]) == len(names) + len(labels)
    assert made["step_seconds"] > record["step_seconds"]
    assert main([*words[:4], "--trips", "while.1=2"]) != 0
    assert capsys.readouterr().err.startswith("systolic: --trips names while.1, which is no loop")


BY_DEVICE = """\
HloModule by_device, is_scheduled=true, num_partitions=4

%one (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}

%two (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}

%three (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}

ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %id = u32[] partition-id()
  %two_of = u32[] constant(2)
  %half = u32[] divide(%id, %two_of)
  %which = s32[] convert(%half)
  ROOT %taken = f32[] conditional(%which, %x, %x, %x), branch_computations={%one, %two, %three}
}
"""


def test_a_branch_on_the_device_costs_what_the_slowest_device_takes() -> None:
    module = parse(BY_DEVICE)
    gaps, taken = Gaps(module), module.entry["taken"]
    assert gaps.possible(taken) == [0, 1]
    for ends in Ends:
        assert gaps.at(ends).branches(module.entry, taken, {0: 1.0, 1: 3.0}) == {1: 1.0}
        assert gaps.at(ends).branches(module.entry, taken, {0: 2.0, 1: 1.0}) == {0: 1.0}
    assert not gaps.missed
    assert gaps.notes() == [
        "devices differ, and the slowest decides the step: taken takes the branches of the slowest"
    ]
