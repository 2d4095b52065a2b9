"""Benchmarks against chips: what records say becomes jobs by rule, and what is printed is computed right."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiler
from systolic.core.units import Origin
from systolic.sim.timeline import PricedBy, Resource, Span, Timeline
from tests.recorded import hlo

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ACCURACY = str(BENCHMARKS / "accuracy")


def _load(folder: str, name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(
        f"benchmark_{folder}_{name}", BENCHMARKS / folder / f"{name}.py"
    )
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    sys.modules[f"benchmark_{folder}_{name}"] = made
    found.loader.exec_module(made)
    return made


sys.path.insert(0, ACCURACY)  # the benchmarks' modules import each other by name
sys.path.insert(0, str(BENCHMARKS / "ablations"))
import ask  # noqa: E402
import pairs  # noqa: E402
import records  # noqa: E402
import rows  # noqa: E402
import xla_flags  # noqa: E402

accuracy = _load("accuracy", "run")
ablations = _load("ablations", "run")
buckets = _load("buckets", "run")
chips = _load("plan", "chips")
RECORDS = json.loads(rows.PUBLISHED.read_text())
PAIRS = json.loads((BENCHMARKS / "ablations" / "published.json").read_text())


def test_every_record_is_a_job_or_has_a_reason() -> None:
    found = rows.expressed()
    assert [one.id for one in found] == [record["id"] for record in RECORDS]
    said = [one for one in found if isinstance(one, rows.Row)]
    assert len(said) >= 70
    for one in found:
        if isinstance(one, rows.Skipped):
            assert one.reason
            assert "\n" not in one.reason


def test_rows_of_torchprime_have_the_flags_of_its_image() -> None:
    silent = [r["id"] for r in RECORDS if r["id"].startswith("torchprime") and not r["xla_flags"]]
    found = {row.id: set(row.flags) for row in rows.rows()}
    wanted = {"--xla_tpu_scoped_vmem_limit_kib=98304", "--xla_enable_async_all_gather=true"}
    assert len(silent) >= 5
    assert all(wanted <= found[name] for name in silent)


def test_every_row_is_a_job_on_its_slice() -> None:
    for row in rows.rows():
        recipe = recipes.find(row.recipe)
        job = recipe(recipes.typed(recipe, dict(row.options)))
        on = slice(row.slice)
        job.layout.on(on.num_devices, on.num_slices)


def test_a_row_by_hand() -> None:
    """MaxText's 16B on one v5e-256: 32 layers, two matrices, six rows a chip."""
    row = next(row for row in rows.rows() if row.id == "maxtext-v5e-16b-1xv5e-256")
    assert row.slice == "v5e:16x16"
    assert row.options["batch"] == 6 * 256
    split = {"attention_backward": "split"}  # MaxText's own default
    assert row.options["layout"] == {"fsdp": 256, "remat": "full"} | split
    assert row.options["model"] | {"qk_norm": False} == row.options["model"]
    assert row.options["model"]["mlp"] == "relu"
    assert row.published_seconds == pytest.approx(10.6259)


def _record(**changes: Any) -> dict[str, Any]:
    plain = next(r for r in RECORDS if r["id"] == "wiki-maxtext-qwen3-8b-v6e8-s8192-bs1")
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"category": "diffusion_video"}, "diffusion"),
        ({"category": "speech"}, "no recipe for speech"),
        ({"generation": "v9"}, "v9"),
        ({"step_time_best_s": None}, "step_time_best_s is not stated"),
        ({"global_batch": None, "per_device_batch": None}, "batch is not stated"),
        ({"parallelism": None}, "mesh is not stated"),
        ({"parallelism": {"ici": {"fsdp": 4}}}, "mesh has 4 devices"),
        ({"parallelism": {"ici": {"ulysses": 8}}}, "'ulysses' is not in the layout"),
        ({"quantization": "int4 weights"}, "int4"),
        ({"arch": None, "model": "unheard-of-9b"}, "neither stated nor known"),
        ({"usable_for_validation": False}, "not fit for validation"),
    ],
)
def test_what_a_job_can_not_say_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    found = rows.row_of(_record(**changes))
    assert isinstance(found, rows.Skipped)
    assert reason in found.reason


def test_latent_attention_and_shared_experts_by_hand() -> None:
    """DeepSeek V3's and Gemma 4's records; FLOPs are those that their trainer counted, less what is a departure."""
    found = {row.id: row for row in rows.rows()}
    record = {one["id"]: one for one in RECORDS}
    deepseek = found["tpurecipes-tpu7x-deepseek-v3-128chips-S4096-bf16"].options["model"]
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    assert [deepseek["latent"][name] for name in names] == [128, 64, 128, 512, 1536]
    assert (deepseek["d_ff"], deepseek["dense_d_ff"], deepseek["dense_layers"]) == (2048, 18_432, 3)
    assert deepseek["shared_experts"] == 1
    assert deepseek["router"]["groups"] == 8
    # No capacity is stated: none is dropped. A stated one is a bound.
    assert deepseek["dispatch"] == "dropless"
    bounded = found["tpurecipes-v6e-mixtral-8x7b-1xv6e-256"].options["model"]
    assert bounded["capacity_factor"] == 1.25
    assert "dispatch" not in bounded
    maverick = found["tpurecipes-v5p-llama4-maverick-v5p-256"].options["model"]
    assert (maverick["mixture_every"], maverick["d_ff"], maverick["dense_d_ff"]) == (
        2,
        8192,
        16_384,
    )
    assert maverick["shared_experts"] == 1
    gemma = found["tpurecipes-tpu7x-gemma4-26b-64chips-S4096-bf16"]
    assert gemma.options["model"]["shared_experts"] == 3, "2112 of 704"
    assert any("heads of 512" in departure for departure in gemma.departures)
    assert record[gemma.id]["arch"]["d_ff"] == 2112


def test_sizes_come_from_the_models_name() -> None:
    found = rows.row_of(_record(arch=None, model="Llama3.1-70B"))
    assert isinstance(found, rows.Row)
    assert found.options["model"]["layers"] == 80
    assert found.options["model"]["d_ff"] == 28672


def test_batch_per_device_is_of_devices() -> None:
    found = rows.row_of(_record(global_batch=None, per_device_batch=3))
    assert isinstance(found, rows.Row)
    assert found.options["batch"] == 24


def test_flags_in_words() -> None:
    unknown: list[str] = []
    text = "scoped vmem 100352 KiB; latency_hiding_scheduler_rerun=3; SparseCore offload of reduce-scatter and all-reduce, collective aggregator; windowed einsum off (exact string not printed)"
    found = xla_flags.stated(text, unknown)
    assert "--xla_tpu_scoped_vmem_limit_kib=100352" in found
    assert "--xla_latency_hiding_scheduler_rerun=3" in found
    assert "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true" in found
    assert "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true" in found
    assert not any("offload_all_gather" in flag for flag in found)
    assert xla_flags.NO_WINDOWS in found
    assert unknown == []
    assert xla_flags.stated("--xla_tpu_a=1 --megascale_x=2 --xla_b=c", []) == [
        "--xla_tpu_a=1",
        "--xla_b=c",
    ]
    assert xla_flags.stated("X: CUSTOM_VMEM_LIMIT_FLAG(vmem_limit=122880)", []) == [
        "--xla_tpu_scoped_vmem_limit_kib=122880"
    ]
    xla_flags.stated("DENSE_VMEM_LIMIT_FLAG + SOME_NEW_GROUP", unknown)
    assert unknown == ["flags SOME_NEW_GROUP are not known"]


def test_halves_are_fixed_and_both_there() -> None:
    assert rows.half("maxtext-v5e-16b-1xv5e-256") == rows.half("maxtext-v5e-16b-1xv5e-256")
    found = [rows.half(row.id) for row in rows.rows()]
    assert 0.35 < found.count("fit") / len(found) < 0.65


def test_errors_by_hand(tmp_path: Path) -> None:
    def row(name: str, error: float | None, **more: Any) -> dict[str, Any]:
        return {
            "id": name,
            "generation": "v6e",
            "half": "fit",
            "measured_seconds": 2.0,
            "slice": "v6e-8",
            "forecast_seconds": None if error is None else 2.0 * (1 + error),
            "error": error,
            "time_by_resource": {"mxu": 1.0},
            **more,
        }

    records = [
        row("a", 0.10),
        row("b", -0.20),
        row("c", None, problem="does not fit: 40.00 of 31.25 GiB"),
        {"id": "d", "reason": "no diffusion model here", "half": "fit"},
    ]
    text = accuracy.table(records)
    assert "| v6e | 2 of 3 | 15.0% | 15.0% | -5.0% | -20.0% | 1 |" in text
    assert "-20.0% b" in text
    assert "wrongly rejected here: c, does not fit: 40.00 of 31.25 GiB" in text
    assert "no diffusion model here: d" in text
    path = tmp_path / "rows.jsonl"
    for record in records:
        ask.append(path, record)
    path.write_text(path.read_text()[:-20])  # the machine went down in the middle of a line
    assert [r["id"] for r in ask.lines(path)] == ["a", "b", "c"]


def test_what_broke_off_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for name, problem in (("a", "the compiler died of SIGTERM"), ("b", "does not fit: 2 of 1 GiB")):
        ask.append(path, {"id": name, "mode": "quick", "problem": problem})
    ask.append(path, {"id": "c", "mode": "quick", "error": 0.1})
    ask.append(path, {"id": "d", "mode": "full", "error": 0.1})
    assert list(ask.settled(path, "quick")) == ["b", "c"]
    assert ask.settled(None, "quick") == {}


def _pair(name: str) -> Any:
    return pairs.pair_of(next(record for record in PAIRS if record["id"] == name))


def test_every_pair_is_two_jobs_or_has_a_reason() -> None:
    found = [pairs.pair_of(record) for record in PAIRS]
    said = [one for one in found if isinstance(one, pairs.Pair)]
    assert len(said) >= 50
    recipe = recipes.find("lm")
    for one in said:
        assert one.before != one.after
        for side in (one.before, one.after):
            job = recipe(recipes.typed(recipe, side.options()))
            on = slice(side.slice)
            job.layout.on(on.num_devices, on.num_slices)
    assert all(one.reason for one in found if isinstance(one, pairs.Skipped))


def test_one_flag_changes() -> None:
    found = _pair("llama3-v6e8-scoped_vmem-7546")
    assert set(found.before.flags) - set(found.after.flags) == {f"{xla_flags.VMEM}=98304"}
    assert set(found.after.flags) - set(found.before.flags) == {f"{xla_flags.VMEM}=131072"}
    assert found.measured_delta == pytest.approx(4.34243 / 4.25558 - 1)
    windows = _pair("llama3-v6e8-collective-6568")
    assert xla_flags.NO_WINDOWS in windows.before.flags
    assert f"{xla_flags.WINDOWED}=4" in windows.after.flags


def test_a_change_says_what_was_before() -> None:
    found = _pair("qwen3-cx-v239")  # 98304 (was 100352), on a base without a number
    assert f"{xla_flags.VMEM}=100352" in found.before.flags
    assert f"{xla_flags.VMEM}=98304" in found.after.flags


def test_layouts_batches_and_policies_change() -> None:
    tensor = _pair("llama3-torchax-v6e8-TP2-14")
    assert (tensor.before.layout["fsdp"], tensor.after.layout["fsdp"]) == (8, 4)
    assert tensor.after.layout["tensor"] == 2
    batch = _pair("llama3-v6e8-bs3to4")
    assert (batch.before.options()["batch"], batch.after.options()["batch"]) == (24, 32)
    policy = _pair("llama3-v6e8-remat-7641")
    assert policy.before.layout["remat"] == "full"
    assert policy.after.layout["remat_names"] == ["query", "key", "value"]


def test_signs_and_ranks_by_hand() -> None:
    def line(name: str, measured: float, forecast: float | None) -> dict[str, Any]:
        return {
            "id": name,
            "measured_delta": measured,
            "forecast_delta": forecast,
            "half": "judge",
            "family": "x",
        }

    records = [line("a", 0.02, 0.01), line("b", -0.03, 0.04), line("c", 0.001, -0.2)]
    text = ablations.table(records)
    assert "judge: 3 pairs forecast; 1 of 2 signs right" in text
    assert "| b | judge | -3.0% | +4.0% | WRONG |" in text
    near = records[1] | {"before_seconds": 4.0, "after_recomputed_seconds": 0.5}
    assert "WRONG, XLA recomputes on one side to fit" in ablations.table([near])
    assert pairs.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]) == pytest.approx(0.5)
    assert pairs.spearman([1.0, 2.0, 2.0], [1.0, 2.0, 2.0]) == pytest.approx(1.0)


def _setting(name: str, measured: float, forecast: float, rows: int = 4) -> dict[str, Any]:
    times = {"measured_seconds": measured, "forecast_seconds": forecast, "problem": None}
    return {"id": name, "series": "x", "half": "fit", "examples": rows} | times


def test_a_pick_and_its_regret_by_hand() -> None:
    # A second of four rows, and 2.2 of eight: 0.25 and 0.275 a row measured, 0.3 and 0.25 forecast.
    group = [
        _setting("a", 1.0, 1.2),
        _setting("b", 2.2, 2.0, rows=8),
        _setting("c", 1.2, 1.3),
    ]
    found = chips.verdict(group)
    assert (found.pick, found.settings) == ("b", 3)
    assert found.regret == pytest.approx(0.1)
    assert found.spearman == pytest.approx(0.5)  # 1, 2, 3 against 2, 1, 3
    assert (found.apart, found.right) == (3, 2)
    # Of picks that tie the slowest counts.
    tied = [_setting("a", 1.0, 1.2), _setting("b", 1.1, 1.2), _setting("c", 1.2, 1.3)]
    assert chips.verdict(tied).regret == pytest.approx(0.1)
    assert found.simplest == found.regret  # of another batch no setting ties with it
    assert "| x | fit | 3 | b | 10.0% | 10.0% | 0.50 | 2 of 3 |" in chips.table(group)
    near = 1.2 * (1 + chips.PAIRED_ERROR / 2)
    flagged = _setting("a", 1.0, 1.2) | {"flags": ["--xla_x=1"]}
    one, two = {"fsdp": 8, "remat": "full"}, {"fsdp": 4, "tensor": 2, "remat": "none"}
    fast = flagged | {"layout": two}
    assert chips.complexity(flagged | {"layout": one}) < chips.complexity(fast)
    plain = _setting("b", 1.05, near) | {"layout": one}
    assert chips.verdict([fast, plain, _setting("c", 1.2, 1.3)]).simplest == pytest.approx(0.05)


def test_rows_are_priced_anew_without_a_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(root=tmp_path).quick()
    made = ask.forecast({}, (), "v5e-1", compiler, "digits")
    seconds = made["forecast_seconds"]
    row = {"id": "a", "slice": "v5e-1", "mode": "quick", "measured_seconds": seconds / 1.25}
    row |= {"program": made["program"], "cached": False, "stale": True}
    earlier = [
        row | {"forecast_seconds": 9.0, "error": 0.5},
        {**row, "id": "b", "program": "0" * 32, "forecast_seconds": 9.0, "error": 0.5},
        {"id": "c", "mode": "quick", "error": None, "reason": "no recipe"},
    ]
    monkeypatch.setattr(ask, "compile_program", None)
    fresh, lost, none = accuracy.again(earlier, tmp_path)
    assert fresh["forecast_seconds"] == pytest.approx(seconds)
    assert fresh["error"] == pytest.approx(0.25)
    assert "stale" not in fresh
    assert not fresh["cached"]
    assert (lost["forecast_seconds"], lost["stale"]) == (9.0, True)
    assert none == earlier[2]
    setting = {"digest": made["program"], "slice": "v5e-1", "forecast_seconds": 9.0}
    monkeypatch.setattr(chips, "cache_home", lambda: tmp_path)
    assert chips.priced_again(setting)["forecast_seconds"] == pytest.approx(seconds)
    assert chips.priced_again(setting | {"digest": None})["forecast_seconds"] == 9.0
    assert records.left_stale([fresh], tmp_path) == "all 1 rows have today's prices"
    assert records.left_stale([fresh, lost], tmp_path).startswith("1 of 2 rows keep their earlier")


def test_paired_errors_by_hand() -> None:
    # Both 10 % too slow: nothing between them. One of two 10 % too slow: ln 1.1, once.
    alike = [_setting("a", 1.0, 1.1), _setting("b", 2.0, 2.2)]
    unlike = [_setting("a", 1.0, 1.1), _setting("b", 2.0, 2.0)]
    assert chips.paired_errors(alike, 1.0) == [pytest.approx(0.0)]
    assert chips.paired_errors(alike) == []  # 2.2 is not near 1.1
    assert chips.spread([alike]) == 0.0
    assert chips.spread([unlike], 1.0) == pytest.approx(0.09531, abs=1e-5)
    assert chips.spread([alike, unlike], 1.0) == pytest.approx(0.09531 / 2**0.5, abs=1e-5)


def test_a_plans_tie_is_as_wide_as_close_settings_are_off() -> None:
    stored = ask.lines(BENCHMARKS / "results" / "2026-11-28-plan-chips.jsonl")
    fit = [group for group in chips.grouped(stored) if group[0]["half"] == "fit"]
    assert len(fit) >= 10
    assert chips.spread(fit) == pytest.approx(chips.PAIRED_ERROR, abs=0.0006)


def test_settings_that_no_option_tells_apart_are_one() -> None:
    one = chips.Setting(
        id="a", family="f", series="x", slice="v5e-4", measured_seconds=1.0, options={}, flags=()
    )

    def job(seconds: float, batch: int) -> Any:
        return chips.replace(one, measured_seconds=seconds, options={"batch": batch})

    settings = [job(1.0, 4), job(1.02, 4), job(2.0, 8), job(3.0, 12), job(4.0, 16), job(5.0, 16)]
    (group,) = chips.series(settings).values()
    assert [setting.measured_seconds for setting in group] == [1.01, 2.0, 3.0]
    assert chips.series(settings[:3]) == {}  # two are no series


def test_families_lie_whole_in_one_half() -> None:
    halves: dict[str, set[str]] = {}
    for setting in chips.of_ablations(chips.ROOT / "ablations" / "published.json"):
        halves.setdefault(setting.family, set()).add(chips.half(setting.family))
        assert chips.SQUARE not in setting.options
    assert len(halves) >= 4
    assert all(len(names) == 1 for names in halves.values())


def test_flags_of_scripts_that_records_name_only() -> None:
    early = next(r for r in RECORDS if r["id"] == "torchprime-2xv6e-256-llama3.1-405b-gbs128")
    assert xla_flags.of_record(early, []) == list(xla_flags.TORCHPRIME_405B)
    departures: list[str] = []
    record = {"id": "m", "model": "MaxText 128B (global_parameter_scale=128)", "generation": "v5e"}
    assert xla_flags.NO_WINDOWS in xla_flags.of_record(record, departures)
    assert departures == [xla_flags.WITHOUT_WINDOWS]
    assert xla_flags.of_record({**record, "generation": "v5p"}, []) == []
    assert _pair("maxtext-128b-v5e-offload").before.flags == xla_flags.MAXTEXT_128B_V5E


def test_buckets_by_hand() -> None:
    def span(seconds: float, resource: Resource, **more: Any) -> Span:
        return Span("x", "fusion", 0.0, seconds, resource, **more)

    layer = (
        span(2.0, Resource.mxu, flops=1.0, priced_by=PricedBy.cycles),
        span(1.0, Resource.mxu, flops=1.0, priced_by=PricedBy.kernel),
        span(0.5, Resource.hbm, priced_by=PricedBy.bytes),
        span(0.7, Resource.ici, priced_by=PricedBy.network),
        span(9.0, Resource.ici, lane="ici"),
    )
    made = Timeline(
        Origin.simulated,
        10.0,
        (Span("loop", "while", 0.0, 10.0, Resource.mxu, repeat=2, inside=layer),),
    )
    assert ask.buckets(made) == pytest.approx(
        {"matmul": 4.0, "attention": 2.0, "elementwise": 1.0, "collective": 3.0}
    )


def test_what_xla_recomputes_by_hand() -> None:
    def span(name: str, flops: float) -> Span:
        return Span(name, "fusion", 0.0, 0.25, Resource.mxu, flops=flops)

    spans = (span("fusion.3", 1.0), span("fusion.3.remat", 1.0), span("copy.remat2", 0.0))
    assert ask.recomputed(Timeline(Origin.simulated, 1.0, spans)) == 0.25


def test_copies_and_slices_of_a_recorded_schedule_are_formatting() -> None:
    module = hlo.module("lm-v5e-4")
    of = {one.name: one for held in module.computations.values() for one in held}
    assert ask.moves(module, of["copy.290"])
    assert ask.moves(module, of["constant_dynamic-slice_fusion.26"])
    assert not ask.moves(module, of["multiply_power_fusion.1"])
    copy, power = (
        Span(name, of[name].opcode, 0.0, 1.0, Resource.hbm)
        for name in ("copy.290", "multiply_power_fusion.1")
    )
    made = Timeline(Origin.simulated, 2.0, (copy, power))
    assert ask.formatting(made, module) == 1.0


def test_profiles_are_programs() -> None:
    records = json.loads((BENCHMARKS / "buckets" / "published.json").read_text())
    found = buckets.measured(records)
    assert found[(2048, 4, False)] == pytest.approx(
        {
            "step": 1.0081,
            "matmul": 0.62718,
            "attention": 0.12529,
            "elementwise": 0.16209,
            "collective": 0.09354,
            "loops": 0.12386,
            "formatting": 0.0375,
        },
        rel=1e-2,
    )
    assert (8192, 4, True) in found
    assert (8192, 4, False) in found


def test_no_model_of_a_trainer_lies_in_both_halves() -> None:
    records = {record["id"]: record for record in RECORDS}
    halves: dict[tuple[str, str, str], set[str]] = {}
    for row in rows.rows():
        trainer = row.id.split("-")[0]
        of = (row.generation, trainer, str(records[row.id]["model"]))
        halves.setdefault(of, set()).add(rows.half(row.family))
    split = [of for of, found in halves.items() if len(found) > 1 and of[1] != "wiki"]
    assert not split
    assert {half for found in halves.values() for half in found} == {"fit", "judge"}


def test_a_script_sets_what_its_record_leaves_out() -> None:
    """MLPerf 4.1's trillium-512.sh: flags, blocks of 1,024, gradients of the MLP and the output in bf16."""
    by_id = {row.id: row for row in rows.rows()}
    row = by_id["mlperf-v4.1-gpt3-175b-int8-trillium-512-maxtext"]
    assert row.options["model"]["rounding"] == {"backward": "heads"}
    assert row.options["layout"]["attention_block"] == 1024
    assert "--xla_tpu_enable_async_collective_fusion=true" in row.flags
    stated = by_id["tpurecipes-v6e-gpt3-175b-bf16-1xv6e-256"]
    assert "rounding" not in stated.options["model"]
    assert stated.flags != row.flags
    fixed = by_id["tpurecipes-tpu7x-llama3.1-70b-64chips-S8192-fp8_full"]
    assert fixed.options["model"]["rounding"] == {"largest": 224.0}
