"""Calibrations as files, and what they change in a forecast."""

import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

import systolic
from systolic.chips import slice
from systolic.compiling import Compiled, Outcome
from systolic.compiling.compile import Pool
from systolic.compiling.outcome import HLO, REPORT
from systolic.compiling.traced import ProgramFacts
from systolic.core import files
from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.forecasting.calibrations import (
    CalibrationRecord,
    ProfileSource,
    calibration_for,
    load,
    names,
    path_of,
    save,
)
from systolic.forecasting.cost import ForecastCommand, ForecastCompile
from systolic.forecasting.memory import memory_map
from systolic.forecasting.run import assemble, detail_of, interval_of
from systolic.hlo import parse
from systolic.planning import search as search_module
from systolic.planning.display.text import notes
from systolic.sim.calibration import Calibration, CostKind, Factor
from systolic.sim.cost_kinds import kind_of_span, least_seconds
from systolic.sim.incomplete import Given
from systolic.sim.price import OpPrice
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from systolic.sim.timeline import PricedBy, Resource, Timeline
from tests.forecasting.display.recorded import FOLDER
from tests.recorded import hlo as recorded

LM = "lm-v5e-4"


def factor(value: float, low: float = 0.0, high: float = 0.0, works: int = 9) -> Factor:
    return Factor(
        value=value, low=low or value, high=high or value, ops=12, works=works, seconds=1.0
    )


def calibration(chip: str = "v5e", **factors: Factor) -> Calibration:
    by = {CostKind[name]: one for name, one in factors.items()}
    return Calibration(name="mine", chip=chip, factors=by, made="2026-11-27", num_profiles=1)


def record(of: Calibration) -> CalibrationRecord:
    source = ProfileSource(
        file="/profiles/host.xplane.pb",
        devices=4,
        programs={"jit_step": 5.0},
        priced_by="simulated programs",
        matched_seconds=0.9,
        total_seconds=1.0,
        not_matched={"custom kernels": 0.1},
    )
    return CalibrationRecord(
        calibration=of, sources=(source,), compiler="libtpu 0.0.42.1", systolic="0.1.0"
    )


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "systolic" / "calibrations"


# Files


def test_a_calibration_is_read_as_it_was_written(own_folder: Path) -> None:
    made = record(calibration(matmul=factor(1.1, 1.0, 1.3), host=factor(28e9, 26e9, 29e9)))
    path = save(made)
    assert path == own_folder / "mine.json"
    assert load("mine") == made == load(path)
    assert names() == ["mine"]
    plain = json.loads(path.read_text())
    assert plain["version"] == 2
    assert plain["kinds"]["host copies"]["bytes_per_second"] == 28e9
    assert plain["kinds"]["matmul"] == {
        "factor": 1.1,
        "p10": 1.0,
        "p90": 1.3,
        "ops": 12,
        "shapes": 9,
        "seconds": 1.0,
    }


def test_a_write_that_fails_leaves_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(record(calibration(matmul=factor(1.1))))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match="free some space"):
        save(record(calibration(matmul=factor(2.0))))
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["mine.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 3}, "is of version 3 and this Systolic reads 1 and 2"),
        ({"format": "other"}, "is no calibration"),
        ({"kinds": {"matmuls": {}}}, "damaged .*Invalid enum value 'matmuls'"),
        ({"kinds": {"matmul": {"factor": 1.0}}}, "damaged .*missing required field `p10`"),
        (
            {"kinds": {"matmul": {"p10": 1, "p90": 1, "ops": 1, "shapes": 1, "seconds": 1}}},
            "damaged .matmul has no factor",
        ),
        ({"sources": None}, r"damaged .*Expected `array`, got `null` - at `\$.sources`"),
    ],
)
def test_a_damaged_file_is_one_line(change: dict[str, object], said: str) -> None:
    path = save(record(calibration(matmul=factor(1.1))))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=said) as caught:
        load("mine")
    assert "systolic calibrate" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_tell_memories_apart_keeps_its_other_kinds() -> None:
    path = save(record(calibration(matmul=factor(1.1), formatting=factor(5.3))))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
    read = load("mine")
    assert set(read.calibration.factors) == {CostKind.matmul}
    assert "formatting: the file is of version 1" in read.left_out[0]
    assert "systolic calibrate PROFILE" in read.left_out[0]


@pytest.mark.parametrize("number", [0, -1, 8.5, "NaN", "1e999"])
def test_a_factor_out_of_bounds_is_refused(number: float | str) -> None:
    path = save(record(calibration(matmul=factor(1.1))))
    path.write_text(path.read_text().replace('"factor": 1.1', f'"factor": {number}'))
    with pytest.raises(DataError, match="matmul is"):
        load("mine")


def test_half_a_file_is_refused() -> None:
    path = save(record(calibration(matmul=factor(1.1))))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="cut short"):
        load("mine")


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(NotFoundError, match=r"none yet in .*calibrations; make one: systolic cal"):
        load("mine")
    save(record(calibration(matmul=factor(1.1))))
    with pytest.raises(NotFoundError, match=r"no calibration min; did you mean mine.* has mine; "):
        load("min")
    with pytest.raises(NotFoundError, match="is no file"):
        load("folder/mine.json")


@pytest.mark.parametrize("name", ["", "../mine", "a/b", "-x", "mine.json", "a" * 101, "a b"])
def test_a_name_that_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="--name is"):
        save(record(replace(calibration(matmul=factor(1.1)), name=name)))


def test_the_users_folder_without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert path_of("mine") == Path("~/.config/systolic/calibrations/mine.json").expanduser()


# In the simulator


def simulated(of: Calibration | None, name: str = LM, on: str = "v5e-4") -> Timeline:
    return simulate(recorded.module(name), slice(on), given=Given(calibration=of))


def by_kind(timeline: Timeline) -> dict[CostKind | None, float]:
    found: dict[CostKind | None, float] = {}
    for span, times in timeline.leaves():
        if span.lane == "core":
            kind = kind_of_span(span)
            found[kind] = found.get(kind, 0.0) + span.seconds * times
    return found


def test_only_the_ops_of_a_kind_change() -> None:
    plain, slower = by_kind(simulated(None)), by_kind(simulated(calibration(matmul=factor(1.5))))
    assert plain[CostKind.matmul] > 0
    assert slower[CostKind.matmul] == pytest.approx(1.5 * plain[CostKind.matmul])
    for kind in (CostKind.elementwise, CostKind.formatting, None):
        assert slower.get(kind, 0.0) == pytest.approx(plain.get(kind, 0.0), rel=0.02), kind
    # What runs beside a slower matmul is waited for no longer than before.
    assert slower.get(CostKind.all_gather, 0.0) <= plain.get(CostKind.all_gather, 0.0) + 1e-12


def test_a_matmul_takes_no_less_than_its_work_at_the_peak() -> None:
    plain, faster = simulated(None), simulated(calibration(matmul=factor(0.25)))
    flops = sum(s.flops * n for s, n in plain.leaves() if kind_of_span(s) is CostKind.matmul)
    least = flops / (slice("v5e-4").chip.peak_bf16_flops_per_second or 0)
    seconds = by_kind(faster)[CostKind.matmul]
    assert seconds >= least
    assert seconds < by_kind(plain)[CostKind.matmul]


def test_a_kernel_may_take_less_than_its_arrays_would() -> None:
    """A kernel over pages of a cache has the whole cache among its operands."""
    rates = rates_of(slice("v5e-1"))
    large = OpPrice(1e-3, Resource.mxu, PricedBy.kernel, flops=1e9, bytes=10 * rates.hbm)
    assert least_seconds(large, rates) == pytest.approx(1e9 / rates.peaks["bf16"])
    fusion = replace(large, by=PricedBy.bytes, flops=0.0, bytes=1e-3 * rates.hbm)
    assert least_seconds(fusion, rates) == pytest.approx(1e-3)
    slower = calibration(kernel=factor(0.5), elementwise=factor(0.5))
    assert slower.seconds(CostKind.kernel, 1e-3, least_seconds(large, rates)) == 5e-4
    assert slower.seconds(CostKind.elementwise, 1e-3, least_seconds(fusion, rates)) == 1e-3


def test_the_host_link_takes_the_measured_rate() -> None:
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[1048576] {\n"
        "  %p = f32[1048576]{0:T(1024)S(5)} parameter(0)\n"
        "  %s = (f32[1048576]{0:T(1024)}, f32[1048576]{0:T(1024)S(5)}, u32[]) copy-start(%p)\n"
        "  ROOT %d = f32[1048576]{0:T(1024)} copy-done(%s)\n}\n"
    )
    measured = calibration("v6e", host=factor(28e9))
    made = simulate(parse(text), slice("v6e-1"), given=Given(calibration=measured))
    assert made.seconds == pytest.approx(4 * 2**20 / 28e9, rel=0.01)
    plain = simulate(parse(text), slice("v6e-1"))
    assert plain.seconds == pytest.approx(4 * 2**20 / 64e9, rel=0.02)
    # Chips copied 29.4 GB/s by themselves: 4 MiB take 143 us there, 78 more than at 64.
    (note,) = (note for note in plain.notes if "by themselves" in note)
    assert "at 29.4, at which each way of these takes 0.0783 ms longer" in note
    assert not [note for note in made.notes if "by themselves" in note]


def test_a_host_link_is_no_faster_than_it_is_published() -> None:
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[1048576] {\n"
        "  %p = f32[1048576]{0:T(1024)S(5)} parameter(0)\n"
        "  %s = (f32[1048576]{0:T(1024)}, f32[1048576]{0:T(1024)S(5)}, u32[]) copy-start(%p)\n"
        "  ROOT %d = f32[1048576]{0:T(1024)} copy-done(%s)\n}\n"
    )
    measured = calibration("v6e", host=factor(90e9))
    made = simulate(parse(text), slice("v6e-1"), given=Given(calibration=measured))
    assert made.seconds == simulate(parse(text), slice("v6e-1")).seconds
    (note,) = (note for note in made.notes if "host link" in note)
    assert "has host copies at 90 GB/s, and the host link carries 64 GB/s" in note


PASS = """HloModule m, is_scheduled=true

ENTRY %main (p: bf16[1024,4096]) -> bf16[1024,4096] {
  %p = bf16[1024,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %in = bf16[1024,4096]{0,1:T(8,128)(2,1)S(1)} copy(%p)
  %within = bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)} copy(%in)
  ROOT %out = bf16[1024,4096]{0,1:T(8,128)(2,1)} copy(%within)
}
"""


def test_a_relayout_of_vector_memory_says_nothing_of_device_memory() -> None:
    """Copies between vector memory are 11 times their price on TPU7x, those of device memory 3.4 times theirs."""

    def of(**factors: Factor) -> dict[str, float]:
        given = Given(calibration=calibration("tpu7x", **factors)) if factors else Given()
        made = simulate(parse(PASS), slice("tpu7x-2"), given=given)
        return {span.name: span.seconds for span, _ in made.leaves()}

    plain, within, memory = of(), of(vmem_formatting=factor(8.0)), of(formatting=factor(3.0))
    assert within == pytest.approx(plain | {"within": 8 * plain["within"]})
    ends = {name: 3 * plain[name] for name in ("in", "out")}
    assert memory == pytest.approx(plain | ends)


REDUCE = """HloModule m, is_scheduled=true, num_partitions={devices}

%sum (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}}

ENTRY %main (p: f32[{size}]) -> f32[{size}] {{
  %p = f32[{size}]{{0:T(1024)}} parameter(0)
  ROOT %sums = f32[{size}]{{0:T(1024)}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%sum
}}
"""
SIZE = 1 << 28
LINK = 50e9
"""Bytes/s of a link of v5e, one way, as published."""


@pytest.mark.parametrize(
    ("on", "groups", "arrays"),
    [
        # A pair: each sends half of the array and then the other half of the sum, over one link.
        ("v5e-4", "{{0,1},{2,3}}", 1.0),
        # Four of 2 x 2: 2 x 3 arrays over four links, both ways.
        ("v5e-4", "{{0,1,2,3}}", 6 / 8),
        # All of 16 x 16: 2 x 255 arrays over 2 x 256 links, both ways.
        ("v5e-256", "[1,256]<=[256]", 2 * 255 / (2 * 512)),
    ],
)
def test_a_factor_makes_no_collective_faster_than_its_links(
    on: str, groups: str, arrays: float
) -> None:
    devices = slice(on).num_devices
    module = parse(REDUCE.format(devices=devices, size=SIZE, groups=groups))
    made = simulate(
        module, slice(on), given=Given(calibration=calibration(all_reduce=factor(0.25)))
    )
    (seconds,) = (span.seconds for span, _ in made.leaves())
    assert seconds == pytest.approx(arrays * 4 * SIZE / LINK, rel=1e-6)
    (note,) = made.notes
    assert note.startswith("the factor 0.25 of all-reduce would make 1 op faster than the links")
    assert note.endswith("(sums)")
    slower = Given(calibration=calibration(all_reduce=factor(1.5)))
    assert not simulate(module, slice(on), given=slower).notes


def test_a_factor_beyond_the_peak_is_said() -> None:
    made = simulated(calibration(matmul=factor(0.25)))
    (note,) = (note for note in made.notes if "would make" in note)
    assert note.startswith("the factor 0.25 of matmul would make ")
    assert "faster than the peaks of the matrix units and of device memory allow" in note
    assert not any(
        "would make" in note for note in simulated(calibration(matmul=factor(1.5))).notes
    )


def test_what_runs_beside_the_core_is_not_corrected() -> None:
    """A slice that a SparseCore or a DMA engine fetches is not a copy of the core."""
    plain = simulated(None, "decode-tpu7x-8", "tpu7x-8")
    slower = simulated(calibration("tpu7x", formatting=factor(8.0)), "decode-tpu7x-8", "tpu7x-8")
    own = by_kind(plain)[CostKind.formatting]
    assert slower.seconds - plain.seconds <= 7 * own + 1e-9


def forecast_of(timeline: Timeline, name: str = LM) -> systolic.Forecast:
    module = recorded.module(name)
    facts = ProgramFacts(unit="tokens", units=8)
    return assemble(
        module=module,
        timeline=timeline,
        memory=memory_map(module, None),
        facts=facts,
        name=name,
        on=slice("v5e-4"),
        compiler=ForecastCompile(),
    )


def test_the_range_comes_from_the_spread() -> None:
    made = forecast_of(simulated(calibration(matmul=factor(1.2, 1.1, 1.5))))
    told = made.to_json()["calibration"]
    matmuls = told["corrected_seconds"]["matmul"]
    rest = made.step_seconds - matmuls - made.timeline.by_rule[0]
    low, high, _ = interval_of(
        "v5e", rest, ProgramFacts(unit="tokens"), detail_of(recorded.module(LM))
    )
    by_rule = made.timeline.by_rule
    assert made.low == pytest.approx(low + matmuls * 1.1 / 1.2 + by_rule[1])
    assert made.high == pytest.approx(high + matmuls * 1.5 / 1.2 + by_rule[2])
    assert told["name"] == "mine"
    assert told["kinds"]["matmul"]["factor"] == 1.2
    line = made.cautions[0]
    assert "corrected by the calibration mine (v5e, 1 profile, 2026-11-27)" in line
    assert "matmul x 1.20 (1.10 to 1.50)" in line
    assert "\n" not in line
    assert "percentile of the ops of the calibration mine" in made.interval


def test_few_shapes_give_no_range_of_their_own() -> None:
    few = forecast_of(simulated(calibration(matmul=factor(1.2, 1.19, 1.21, works=2))))
    assert "percentile" not in few.interval
    assert "matmul x 1.20 by 2 shapes only" in few.cautions[0]


def test_without_a_calibration_nothing_is_said() -> None:
    made = forecast_of(simulated(None))
    assert made.to_json()["calibration"] is None
    assert not any("calibration" in note for note in (*made.cautions, *made.notes))


def test_a_calibration_of_kinds_that_a_step_has_not_says_so() -> None:
    made = forecast_of(simulated(calibration(dies=factor(0.9))))
    assert "nothing is corrected" in made.cautions[0]


# Of another chip


@pytest.mark.parametrize("on", ["v6e-4", "cpu", "8xh100"])
def test_another_chip_is_refused(on: str) -> None:
    with pytest.raises(OptionError, match=f"mine is of v5e and {on} is .*systolic calibrate"):
        calibration_for(calibration(matmul=factor(1.1)), [slice("v5e-4"), slice(on)])


def test_the_simulator_refuses_another_chip_itself() -> None:
    with pytest.raises(OptionError, match="mine is of v6e"):
        simulated(calibration("v6e", matmul=factor(1.1)))


def test_python_refuses_before_anything_is_compiled() -> None:
    save(record(calibration("v6e", matmul=factor(1.1))))
    for on in ("v5e-4", ["v6e-4", "v5e-4"]):
        with pytest.raises(OptionError, match="mine is of v6e and v5e-4 is v5e"):
            systolic.forecast("lm", on=on, calibration="mine")
    with pytest.raises(OptionError, match="mine is of v6e and v5e-4 is v5e"):
        systolic.plan("lm", on="v5e-4", calibration="mine")
    with pytest.raises(NotFoundError, match="did you mean mine"):
        systolic.forecast(lambda x: x, 1.0, on="v6e-4", calibration="mien")


def test_a_plan_corrects_what_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every compile is answered with what the compiler once said of a language model on v5e-4."""
    shutil.copy(FOLDER / "lm-scoped-v5e-4.hlo.gz", tmp_path / HLO)
    shutil.copy(FOLDER / "lm-scoped-v5e-4.json", tmp_path / REPORT)

    class RecordedPool(Pool):
        def submit(self, *_: object) -> "Future[Outcome]":
            answer: Future[Outcome] = Future()
            answer.set_result(Compiled(tmp_path, "recorded", True))
            return answer

    monkeypatch.setattr(search_module, "Pool", RecordedPool)
    save(record(calibration("v5e", matmul=factor(1.5, 1.4, 1.6))))
    sizes = {"model.layers": 2, "model.d-model": 256, "batch": 8, "sequence": 256, "steps": 10}
    limits = {"programs": 1, "finalists": 0, "workers": 1}
    plain, slower = (
        systolic.plan("lm", on="v5e-4", calibration=name, **limits, **sizes)
        for name in (None, "mine")
    )
    assert plain.best is not None
    assert slower.best is not None
    assert plain.best.forecast.calibration is None
    assert slower.best.forecast.calibration.name == "mine"
    assert slower.best.forecast.step_seconds > plain.best.forecast.step_seconds
    told = [line for line in notes(slower) if "corrected by the calibration mine" in line]
    assert len(told) == 1
    assert "estimates before a compile are not" in told[0]
    assert not any("calibration" in line for line in notes(plain))


def test_another_evaluator_has_times_of_its_own() -> None:
    with pytest.raises(OptionError, match="not the compiler's"):
        systolic.plan(
            "lm",
            on="v5e-4",
            calibration=calibration(matmul=factor(1.1)),
            evaluator=lambda _: None,  # type: ignore[arg-type, return-value]
        )


def test_a_compile_and_a_command_write_what_they_know() -> None:
    """Names and order of the JSON, which users read."""
    compiled = ForecastCompile(
        versions={"jax": "0.10.2", "libtpu": None}, seconds=1.5, cached=False, flags=[]
    )
    assert json.dumps(compiled.to_json()) == (
        '{"jax": "0.10.2", "libtpu": null, "seconds": 1.5, "cached": false, "flags": []}'
    )
    assert ForecastCompile().to_json() == {}
    again = ForecastCommand(target="lm", arguments=[], quick=False)
    assert json.dumps(again.to_json()) == '{"target": "lm", "arguments": [], "quick": false}'
