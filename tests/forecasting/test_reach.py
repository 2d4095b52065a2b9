"""Rows of trainers' own programs against the published records, and the table of their errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import slice
from tests.forecasting.test_benchmark_files import BENCHMARKS, called

ROWS = [json.loads(line) for line in (BENCHMARKS / "reach" / "rows.jsonl").read_text().splitlines()]
RECORDS = {
    one["id"]: one for one in json.loads((BENCHMARKS / "accuracy" / "published.json").read_text())
}


def value(row: dict[str, Any], name: str) -> float | None:
    """A number among the arguments of a row."""
    found = [one.partition("=")[2] for one in row["arguments"] if one.startswith(f"{name}=")]
    return float(found[0]) if found else None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['id']}-{row['program']}")
def test_arguments_are_those_of_the_record(row: dict[str, Any]) -> None:
    record, on = RECORDS[row["id"]], slice(row["on"])
    assert (on.num_chips, on.num_slices) == (record["num_chips"], record["num_slices"] or 1)
    batch = value(row, "per_device_batch_size")
    assert batch is not None
    assert batch * on.num_devices == record["global_batch"]
    assert value(row, "max_target_length") in (None, record["seq_len"])
    assert row["source"]
    names = [one.partition("=")[0] for one in row["arguments"]]
    assert len(names) == len(set(names))


def test_rows_are_of_four_generations_at_least() -> None:
    chips = {slice(row["on"]).chip.name for row in ROWS}
    assert chips >= {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert len({row["id"] for row in ROWS}) >= 50


def test_the_table_has_errors_by_hand_and_what_failed(tmp_path: Path) -> None:
    name, lost = "tpurecipes-v6e-llama3.1-8b-v6e-8", "maxtext-docs-v5p-8-deepseek2-16b"
    row = {
        "id": name,
        "trainer": "maxtext",
        "on": "v6e-8",
        "seconds": 20.0,
        "forecast_seconds": 1.2 * RECORDS[name]["step_time_best_s"],
        "fits": True,
        "peak_bytes": 2**34,
        "memory_origin": "compiled",
        "capacity_bytes": 2**35,
    }
    failed = {"id": lost, "trainer": "maxtext", "on": "v5p-8", "seconds": 1.0}
    failed["problem"] = "systolic: python train.py failed before its step was known: KeyError: 'x'"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, failed)))
    (told,) = called("reach", [str(path)], module="report")
    assert f"| {name} | fit | 8 | 3.443 s | 4.132 s | +20.0% |" in told["out"]
    assert "fits, 16.0 of 32.0 GiB | 20 s |" in told["out"]
    assert "| v6e | 1 of 1 | 20.0% | 20.0% | +20.0% | 1 |" in told["out"]
    assert f"- +20.0% {name} (fit): " in told["out"]
    assert f"- no forecast: {lost}: KeyError: 'x'" in told["out"]


def test_a_run_needs_the_trainer_s_python(tmp_path: Path) -> None:
    (told,) = called("reach", ["--out", str(tmp_path / "rows.jsonl")])
    assert told["code"] == 2
    assert told["err"].startswith("no Python for maxtext")


def test_rows_whose_program_was_not_kept_are_named(tmp_path: Path) -> None:
    name, lost = "tpurecipes-v6e-llama3.1-8b-v6e-8", "maxtext-docs-v5p-8-deepseek2-16b"
    before, out = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    rows = [
        {"id": name, "trainer": "maxtext", "on": "v6e-8", "forecast_seconds": 4.0, "seconds": 1.0},
        {"id": lost, "trainer": "maxtext", "on": "v5p-8", "problem": "KeyError: 'x'"},
    ]
    before.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (told,) = called(
        "reach", ["--again", str(tmp_path), "--before", str(before), "--out", str(out)]
    )
    assert told["code"] == 0
    assert told["err"].startswith("1 of 2 rows keep their earlier prices (stale)")
    assert told["err"].rstrip().endswith(name)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        rows[0] | {"stale": True},
        rows[1],
    ]
