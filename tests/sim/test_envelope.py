"""A sample of benchmarks/envelope: its rules on schedules that libtpu wrote."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from systolic.chips import slice
from systolic.sim.rates import rates_of

ROOT = Path(__file__).parents[2]
SCHEDULES = ROOT / "tests" / "recorded" / "envelope"


sys.path.insert(0, str(ROOT / "benchmarks" / "envelope"))  # its modules import each other by name
cases, physics = importlib.import_module("cases"), importlib.import_module("physics")
kinds, functions = importlib.import_module("kinds"), importlib.import_module("functions")


def _load() -> ModuleType:
    path = ROOT / "benchmarks" / "envelope" / "run.py"
    found = importlib.util.spec_from_file_location("envelope_run", path)
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


envelope = _load()
FAMILIES = sorted({path.name.partition("-")[0] for path in SCHEDULES.glob("*.json")})


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_schedules_keep_the_rules(family: str) -> None:
    records = [envelope.recorded(path) for path in sorted(SCHEDULES.glob(f"{family}-*.json"))]
    assert len(records) == cases.FAMILY
    found, checked = physics.breaks(records)
    assert found == []
    assert checked["answer"] == checked["floor"] == cases.FAMILY
    assert checked["layers"] == checked["batch"] == checked["sequence"] == 1
    assert checked["split"] + checked["slices"] == 1
    decoding = [case for case in map(cases.case_of, records) if case.verb == "decode"]
    rows = [case.batch / case.ways("data", "fsdp", "expert") for case in decoding]
    assert checked["decode"] == sum(number >= 8 for number in rows)


def test_the_sample_covers_what_is_computed() -> None:
    records = [json.loads(path.read_text()) for path in sorted(SCHEDULES.glob("*.json"))]
    found = [cases.case_of(record) for record in records]
    assert {case.verb for case in found} == {"train", "prefill", "decode"}
    assert any(case.member == "slices" for case in found)
    assert any(case.experts > 1 for case in found)
    assert len(found) == 25
    decoding = [case for case in found if case.verb == "decode"]
    assert any(case.batch / case.ways("data", "fsdp", "expert") >= 8 for case in decoding)


def test_jobs_are_the_same_for_the_same_seed() -> None:
    one, other = cases.jobs(10, 7), cases.jobs(10, 7)
    assert one == other
    assert one != cases.jobs(10, 8)
    assert [case.problem() for case in one] == [None] * 10


def test_a_floor_by_hand() -> None:
    """One dense layer, batch 8, on four v5e chips with tensor 4."""
    case = cases.Case(
        family=0,
        member="base",
        verb="decode",
        slice="v5e-4",
        layers=1,
        d_model=2048,
        d_ff=8192,
        heads=16,
        kv_heads=8,
        vocab=32_768,
        experts=1,
        sequence=1024,
        batch=8,
        remat="none",
        axes=(("tensor", 4),),
    )
    weights = 2048 * 128 * (16 + 16 + 8 + 8) + 3 * 2048 * 8192 + 2048 * 32_768
    cache = 8 * 1024 * 2 * 8 * 128
    floor = physics.floor_of(case)
    assert floor.bytes == pytest.approx((weights + cache) * 2 / 4 / 819e9)
    scores = 2 * 2 * 16 * 128 * 1024
    assert floor.flops == pytest.approx(8 * (2 * weights + scores) / 4 / 197e12)
    sums = 2 * 2 * 3 / 4 * 8 * 2048 * 2
    assert floor.links == pytest.approx(sums / (4 * 50e9))


def test_rules_catch_what_they_are_for() -> None:
    base, layers, *_ = cases.jobs(5, 0)
    floor = physics.floor_of(base).seconds

    def record(case: object, seconds: float) -> dict:
        made = {"name": case.name, "case": vars(case) | {"axes": case.axes}}  # ty: ignore
        return {**made, "fits": True, "step_seconds": seconds, "memory_bytes": 1}

    found, _ = physics.breaks([record(base, 0.5 * floor), record(layers, 100 * floor)])
    assert [one.rule for one in found] == ["floor"]
    found, _ = physics.breaks([record(base, 100 * floor), record(layers, 99 * floor)])
    assert [one.rule for one in found] == ["layers"]


def test_functions_are_of_all_kinds_and_the_same_for_the_same_seed() -> None:
    found = kinds.functions(150, 0)
    assert len(found) >= 150
    assert {case.kind for case in found} == set(kinds.KINDS)
    assert [case.key for case in found] == [case.key for case in kinds.functions(150, 0)]
    assert len({case.key for case in found}) == len({case.name for case in found})
    assert any(case.x64 for case in found)
    assert all(max(case.work.seconds(rates_of(slice(case.on))).values()) > 0 for case in found)


def test_a_function_s_floor_by_hand() -> None:
    (gather,) = [c for c in kinds.functions(150, 0) if c.name == "01-gather-base"]
    table, count = gather.options["table"], gather.options["count"]
    assert (table, gather.options["width"]) == (2**27, 1)
    rates = rates_of(slice(gather.on))
    granule = rates.chip.hbm_granule_bytes
    floor = gather.work.seconds(rates)
    assert floor["granules"] == pytest.approx(
        min(count * granule, table * gather.work.bytes / count) / rates.hbm
    )
    assert floor["addresses"] == pytest.approx(count / rates.clock_hz)
    (loop,) = [c for c in kinds.functions(150, 0) if c.name == "00-loop-base"]
    by_hand = 2 * loop.options["d"] ** 3 * loop.options["trips"]
    assert loop.work.flops == by_hand


def test_rules_of_functions_catch_what_they_are_for() -> None:
    family = [c for c in kinds.functions(10, 0) if c.name.startswith("00-loop")]
    base = family[0]
    floor = max(base.work.seconds(rates_of(slice(base.on))).values())

    def record(seconds: float, **more: object) -> dict[str, object]:
        made = {"step_seconds": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds}
        return {**made, "lower_bound": False, "unpriced": 0.0, **more}

    good = {c.key: record(100 * floor * max(c.least, 1.0)) for c in family}
    assert functions.breaks(family, good)[0] == []
    x64 = next(c for c in family if c.x64)
    for changed, rule in (
        ({base.key: record(0.5 * floor)}, "floor"),
        ({x64.key: record(50 * floor)}, "x64"),
        ({base.key: record(100 * floor, high=99 * floor)}, "range"),
        ({base.key: record(100 * floor, lower_bound=True)}, "bound"),
        ({base.key: record(100 * floor, unpriced=floor * 2)}, "priced"),
        ({family[1].key: record(101 * floor)}, "grows"),
        ({family[1].key: {"problem": "failed"}}, "answer"),
    ):
        assert [one.rule for one in functions.breaks(family, {**good, **changed})[0]] == [rule]
