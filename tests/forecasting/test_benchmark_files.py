"""Benchmarks on missing and damaged files: one line that names the place, exit code 2; nothing is dropped in silence."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from systolic.core.units import Origin
from systolic.forecasting.text import FROM_SCHEDULE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
READ = {
    "accuracy": ("--published", "published.json"),
    "ablations": ("--pairs", "published.json"),
    "buckets": ("--buckets", "published.json"),
    "operations": ("--measured", ""),
}
"""The option that names the file of each benchmark, and its own file."""


def called(name: str, *cases: list[str], module: str = "run") -> list[dict[str, Any]]:
    """Calls the ``main`` of a benchmark's module with each case's words: exit code and what it prints.

    Modules of several benchmarks have the same names, so they are forgotten before and afterwards.
    """
    folder, found = BENCHMARKS / name, []
    with pytest.MonkeyPatch.context() as patch:
        for known in scripts():
            patch.delitem(sys.modules, known)
        patch.syspath_prepend(folder)
        run = import_module(module)
        for case in cases:
            patch.setattr(sys, "argv", [str(folder / f"{module}.py"), *case])
            told, shown, code = io.StringIO(), io.StringIO(), 0
            with redirect_stderr(told), redirect_stdout(shown):
                try:
                    run.main()
                except SystemExit as stop:
                    code = stop.code
            found.append({"code": code, "err": told.getvalue(), "out": shown.getvalue()})
        for own in scripts():
            del sys.modules[own]
    return found


def scripts() -> list[str]:
    """Modules at hand that are files of benchmarks."""
    files = {name: getattr(one, "__file__", None) for name, one in sys.modules.items()}
    return [name for name, file in files.items() if file and file.startswith(f"{BENCHMARKS}/")]


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
        "c": "shapes of matmul can't be read: dtype 'int8' is none of bf16, f32, s8",
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


HUGE = {
    "accuracy": "num_chips",
    "ablations": "step_before_s",
    "buckets": "step_ms",
    "operations": "measured_seconds",
}
"""A number of each benchmark's records."""


@pytest.mark.parametrize("name", list(READ))
def test_numbers_no_float_holds_and_places_no_file_can_be_in(name: str, tmp_path: Path) -> None:
    option, rows = READ[name][0], rows_of(name)
    (tmp_path / "huge.json").write_text(json.dumps([{**rows[0], HUGE[name]: 10**400}]))
    (tmp_path / "good.json").write_text(json.dumps(rows[:1]))
    good = [option, str(tmp_path / "good.json")]
    huge, proc, folder = called(
        name,
        [option, str(tmp_path / "huge.json")],
        [*good, "--out", "/proc/x.jsonl"],
        [*good, "--out", str(tmp_path / "nowhere" / "x.jsonl")],
    )
    assert [made["code"] for made in (huge, proc, folder)] == [2, 2, 2]
    assert f"{HUGE[name]} is 1000" in huge["err"]
    assert proc["err"].startswith("/proc/x.jsonl cannot be written")
    assert "x.jsonl cannot be written (No such file" in folder["err"]


@pytest.mark.parametrize(
    ("name", "module", "option"),
    [
        ("accuracy", "run", ["--table"]),
        ("ablations", "run", ["--table"]),
        ("operations", "table", []),
    ],
)
def test_a_table_of_no_rows(name: str, module: str, option: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl").write_text("{\n")
    cases = [[*option, str(tmp_path / file)] for file in ("empty.jsonl", "cut.jsonl")]
    for made in called(name, *cases, module=module):
        assert (made["code"], made["out"]) == (2, "")
        assert "holds no rows" in made["err"]


def test_the_table_of_lines_of_another_benchmark() -> None:
    other = str(BENCHMARKS / "results" / "2026-11-22-operations.jsonl")
    (made,) = called("accuracy", ["--table", other])
    assert (made["code"], made["out"]) == (2, "")
    assert "no run of this benchmark wrote" in made["err"]


def test_names_of_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for name, option in (
        ("accuracy", "--only"),
        ("ablations", "--only"),
        ("operations", "--match"),
    ):
        path.write_text(json.dumps(rows_of(name)[:2]))
        (made,) = called(name, [READ[name][0], str(path), option, "zzz"])
        assert (made["code"], made["out"]) == (2, "")
        assert made["err"] == f"{path} has no row named zzz; ask for others\n"


def test_pairs_on_chips_that_are_none(tmp_path: Path) -> None:
    (listed,) = called("ablations", ["--list"])
    lines = [json.loads(line) for line in listed["out"].splitlines()]
    first = next(line["id"] for line in lines if "before" in line)
    row = next(row for row in rows_of("ablations") if row["id"] == first)
    changes = [{"generation": "x"}, {"generation": "b200"}, {"chips": "0"}, {"chips": 0}]
    cases = []
    for number, change in enumerate(changes):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps([row | change]))
        cases.append(["--pairs", str(path), "--list"])
    for made in called("ablations", *cases):
        assert made["code"] == 2
        assert made["err"].count("\n") == 1
        assert first in made["err"]


def test_profiles_of_no_size_are_refused(tmp_path: Path) -> None:
    row, cases = rows_of("buckets")[0], []
    for field, value in (("seq_len", 0), ("batch_per_chip", -1), ("step_ms", 0)):
        path = tmp_path / f"{field}.json"
        path.write_text(json.dumps([row | {field: value}]))
        cases.append(["--buckets", str(path)])
    for made, case in zip(called("buckets", *cases), cases, strict=True):
        assert made["code"] == 2
        assert f"{Path(case[1]).stem} is " in made["err"]
        assert "a finite number above 0" in made["err"]


def test_operations_whose_shapes_are_none(tmp_path: Path) -> None:
    plain = {"generation": "v6e", "measured_seconds": 1e-3}
    whole = dict.fromkeys(("q", "k", "v"), "bf16[1,512,4,64]") | {"causal": True}
    norm = {"x": "bf16[8,8]", "axis": 7, "subtract_mean": True, "return_residuals": False}
    attention = {"a": {"q": None}, "b": {"q": 5}, "c": {"k": "bf16[1,512,4,32]"}}
    attention |= {"d": {"v": "bf16[1,256,4,64]"}, "e": {"k": "bf16[1,512,3,64]"}}
    rows = [
        plain | {"id": name, "what": "attention", "shapes": whole | change}
        for name, change in attention.items()
    ]
    rows.append(plain | {"id": "f", "what": "layer_norm", "shapes": norm})
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    (made,) = called("operations", ["--measured", str(path), "--left-out"])
    left = [json.loads(line) for line in made["out"].splitlines()]
    assert made["code"] == 0
    reasons = {one["ids"][0]: one["reason"].partition("can't be read: ")[2] for one in left}
    assert reasons == {
        "a": "None is no shape of bf16, f16, f32, bool, s32",
        "b": "5 is no shape of bf16, f16, f32, bool, s32",
        "c": "head dim 64 of q is not 32 of k",
        "d": "k is 512 long and v 256",
        "e": "4 heads of q are no multiple of 3 of k",
        "f": "tuple index out of range",
    }


def test_rows_none_of_which_can_be_used_are_one_line_instead_of_a_table(tmp_path: Path) -> None:
    row = {"id": "a", "generation": "v6e", "what": "sort", "shapes": {}, "measured_seconds": 1e-3}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (made,) = called("operations", ["--measured", str(path)])
    assert (made["code"], made["out"]) == (2, "")
    last = made["err"].splitlines()[-1]
    assert last == "none of the rows can be used; --left-out prints them by reason"


@pytest.mark.parametrize(
    ("end", "kept"), [('{"id": "b", "mo', ""), ('{"id": "b"}', '{"id": "b"}\n'), ("", "")]
)
def test_a_cut_last_line_of_an_earlier_run_is_ended_or_dropped(
    end: str, kept: str, tmp_path: Path
) -> None:
    sizes = {"m": 128, "k": 128, "n": 131, "dtype": "bf16"}
    row = {"id": "never compiled", "generation": "v6e", "what": "matmul", "shapes": sizes}
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps(row | {"measured_seconds": 1e-3}) + "\n")
    out.write_text('{"id": "a"}\n' + end)
    (made,) = called("operations", ["--measured", str(rows), "--out", str(out), "--again"])
    assert made["err"].splitlines()[-1].startswith("none of these rows was compiled before")
    assert out.read_text() == '{"id": "a"}\n' + kept


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("results/*-reach.jsonl")), ids=str)
def test_a_row_says_once_where_its_memory_is_from(path: Path) -> None:
    """The largest program's report of the compiler, though a small program beside it has none."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    said = {
        (row["memory_origin"], FROM_SCHEDULE in row["notes"]) for row in rows if row.get("notes")
    }
    assert said == {(Origin.compiled.value, False), (Origin.simulated.value, True)}
