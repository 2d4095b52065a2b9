"""Benchmarks on missing and damaged files: one line that names the place, exit code 2; nothing is dropped in silence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
READ = {
    "accuracy": ("--published", "published.json"),
    "ablations": ("--pairs", "published.json"),
    "buckets": ("--buckets", "published.json"),
    "operations": ("--measured", ""),
}
"""The option that names the file of each benchmark, and its own file."""


def called(name: str, *cases: list[str], module: str = "run") -> list[dict[str, Any]]:
    child = Path(__file__).with_name("files_child.py")
    words = [str(BENCHMARKS / name), module, *(json.dumps(case) for case in cases)]
    done = subprocess.run(
        [sys.executable, child, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rows_of(name: str) -> list[dict[str, Any]]:
    if name == "operations":
        rows = Path(__file__).parents[1] / "recorded" / "operations" / "rows.json"
        recorded = json.loads(rows.read_text()).values()
        return [{**row, "generation": row["slice"].partition("-")[0]} for row in recorded]
    return json.loads((BENCHMARKS / name / READ[name][1]).read_text())


DAMAGE: dict[str, tuple[str, Any]] = {
    "accuracy": ("num_chips", "many"),
    "ablations": ("step_before_s", "fast"),
    "buckets": ("step_ms", None),
    "operations": ("measured_seconds", "3 ms"),
}
"""A field of each benchmark's records, with a value that it can't have."""
INSIDE: dict[str, tuple[str, Any]] = {
    "accuracy": ("parallelism", {"ici": 5}),
    "ablations": ("base", 5),
    "buckets": ("buckets_ms_per_chip_step", {"loop fusion": "long"}),
    "operations": ("shapes", 3),
}
"""A field whose content can't be read."""


@pytest.mark.parametrize("name", list(READ))
def test_a_file_that_can_not_be_read_is_one_line(name: str, tmp_path: Path) -> None:
    option, rows = READ[name][0], rows_of(name)
    field, value = DAMAGE[name]
    inside, content = INSIDE[name]
    files = {
        "cut.json": json.dumps(rows)[:1000],
        "lines.jsonl": f"{json.dumps(rows[0])}\nnot json\n",
        "object.json": '{"rows": []}',
        "numbers.json": "[1, 2]",
        "empty.json": "[]",
        "field.json": json.dumps([rows[0], {**rows[1], field: value}]),
        "inside.json": json.dumps([{**rows[0], inside: content}]),
        "binary.json": "",
        "earlier.jsonl": '{"id": "x"}\n{"id": "y"}\n',
    }
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\x89PNG\xff")
    (tmp_path / "good.json").write_text(json.dumps(rows[:2]))
    said = {
        "nowhere.json": "cannot be read (No such file or directory)",
        "cut.json": "it may be cut short",
        "lines.jsonl": "line 2 is not JSON",
        "object.json": "record 1 has no field",
        "numbers.json": "record 1 is 1, not an object",
        "empty.json": "has no record",
        "field.json": f"record 2 ({rows[1]['id']})",
        "inside.json": inside,
        "binary.json": "is not text",
    }
    cases = [[option, str(tmp_path / file)] for file in said]
    good = [option, str(tmp_path / "good.json")]
    cases.append([*good, "--out", str(tmp_path / "earlier.jsonl")])
    told = [*said.values(), "line 1 has no 'mode'"]
    for made, text in zip(called(name, *cases), told, strict=True):
        assert made["code"] == 2, made
        assert "Traceback" not in made["err"]
        line = made["err"].splitlines()[-1]
        assert text in line
        if text == said["field.json"]:
            assert field in line
        assert str(tmp_path) in line


def test_the_table_of_a_missing_file(tmp_path: Path) -> None:
    missing = str(tmp_path / "rows.jsonl")
    for name in ("accuracy", "ablations"):
        (made,) = called(name, ["--table", missing])
        assert (made["code"], made["out"]) == (2, "")
        assert made["err"].startswith(f"{missing} cannot be read")
    for made in called("operations", [missing], [], module="table"):
        assert made["code"] == 2


def test_a_list_of_what_can_be_expressed_is_json(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(rows_of("ablations")))
    (made,) = called("ablations", ["--pairs", str(path), "--list"])
    listed = [json.loads(line) for line in made["out"].splitlines()]
    assert [one["id"] for one in listed] == [row["id"] for row in rows_of("ablations")]
    expressed = [one for one in listed if "reason" not in one]
    assert 50 < len(expressed) < 80
    assert expressed[0]["before"]["model"]["layers"] > 1
    assert all(one["before"] != one["after"] for one in expressed)


def test_rows_that_can_not_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    plain = {"id": "a", "generation": "v6e", "what": "matmul", "measured_seconds": 1e-3}
    sizes = {"m": 128, "k": 128, "n": 128, "dtype": "bf16"}
    rows = [
        plain | {"shapes": sizes},
        plain | {"shapes": sizes},
        plain | {"id": "b", "shapes": {"m": 128, "k": 128, "dtype": "bf16"}},
        plain | {"id": "c", "shapes": sizes | {"dtype": "int8"}},
        plain | {"id": "d", "shapes": {}, "what": "sort"},
        plain | {"id": "e", "shapes": sizes, "measured_seconds": 1e-6},
        plain | {"id": "f", "shapes": sizes, "measured_seconds": None},
        plain | {"id": "g", "shapes": sizes, "generation": "v7"},
        plain | {"id": "h", "shapes": {"x": "bf16[8"}, "what": "layer_norm"},
        plain | {"id": "j", "shapes": {}, "what": "grouped_matmul"},
        plain | {"id": "i", "shapes": sizes, "implementation": "pallas"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made,) = called("operations", ["--measured", str(path), "--left-out"])
    left = [json.loads(line) for line in made["out"].splitlines()]
    assert {one["ids"][0]: one["reason"] for one in left} == {
        "b": "shapes or config of matmul lack 'n'",
        "c": "shapes of matmul can't be read: dtype 'int8' is not bf16",
        "d": "no program here for this kind of operation",
        "e": "shorter than 30 us",
        "f": "no measured_seconds",
        "g": "generation v7 is none of v4, v5e, v5p, v6e, tpu7x",
        "h": "shapes of layer_norm can't be read: 'bf16[8' is no shape of bf16, f16, f32, bool, s32",
        "j": "shapes or config of grouped_matmul lack 'precision'",
        "i": "implementation pallas of matmul has no program here",
    }
    assert made["err"].startswith(
        "11 rows, 1 have the id of another, 10 asked for, 9 of them left out:"
    )
