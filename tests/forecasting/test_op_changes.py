"""Which ops changed between two dumps: one train step by two compilers and under one flag, and texts that differ by hand."""

import json
import re
from pathlib import Path

import pytest

import systolic
from systolic.chips import slice
from systolic.cli.main import main
from systolic.core.errors import DataError
from systolic.forecasting import compare_texts
from systolic.forecasting.comparison import ForecastChanges, compare_forecasts
from systolic.forecasting.costs import core
from systolic.forecasting.display import comparison
from systolic.forecasting.op_changes import (
    OpChange,
    OpFate,
    OpGroup,
    groups_in,
    groups_of,
    table_of,
)
from systolic.forecasting.op_changes import changes_of as changes_between
from systolic.hlo import Module, parse
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Timeline
from tests.recorded import hlo

ON = slice("v6e-4")
NEW, OLD, FLAG = "upgrade_new-v6e-4", "upgrade_old-v6e-4", "upgrade_vmem-v6e-4"
Side = tuple[Module, Timeline]


def side(text: str) -> Side:
    module = parse(text)
    return module, simulate(module, ON)


@pytest.fixture(scope="module")
def sides() -> dict[str, Side]:
    return {name: side(hlo.text(name)) for name in (NEW, OLD, FLAG)}


def groups(of: Side) -> list[OpGroup]:
    return groups_of([(*of, 1.0)])


def changes_of(before: Side, after: Side) -> list[OpChange]:
    return changes_between(groups(before), groups(after))


def seconds(one: Side) -> float:
    return sum(span.seconds * times for span, times in core(one[1]))


def changed(rows: list[OpChange]) -> list[OpChange]:
    return [row for row in rows if row.change is not OpFate.same]


def test_a_program_has_no_changes_to_itself(sides: dict[str, Side]) -> None:
    rows = changes_of(sides[NEW], sides[NEW])
    assert changed(rows) == []
    assert sum(row.before_seconds for row in rows) == pytest.approx(seconds(sides[NEW]))


def renumbered(text: str) -> str:
    """Other numbers for all instructions."""
    return re.sub(r"(%[\w-]+)\.(\d+)\b", lambda found: f"{found[1]}.{int(found[2]) + 7000}", text)


def moved(text: str) -> str:
    """The program's own lines three further down, as after an edit above it."""
    file = re.search(r'^(\d+) ".*versions\.py"', text, re.MULTILINE)
    assert file is not None
    return re.sub(
        rf"(file_name_id={file[1]} .*?\bline=)(\d+)",
        lambda found: f"{found[1]}{int(found[2]) + 3}",
        text,
    )


@pytest.mark.parametrize("change", [renumbered, moved])
def test_numbers_of_instructions_and_lines_are_no_change(change, sides: dict[str, Side]) -> None:
    other = change(hlo.text(NEW))
    assert other != hlo.text(NEW)
    assert changed(changes_of(sides[NEW], side(other))) == []


@pytest.mark.parametrize("before", [OLD, FLAG])
def test_every_op_is_in_one_row(before: str, sides: dict[str, Side]) -> None:
    rows = changes_of(sides[before], sides[NEW])
    assert sum(row.before_seconds for row in rows) == pytest.approx(seconds(sides[before]))
    assert sum(row.after_seconds for row in rows) == pytest.approx(seconds(sides[NEW]))
    sizes = [abs(row.seconds) for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_the_other_direction_mirrors(sides: dict[str, Side]) -> None:
    there, back = changes_of(sides[OLD], sides[NEW]), changes_of(sides[NEW], sides[OLD])
    gone = [row for row in there if row.change is OpFate.gone]
    new = [row for row in back if row.change is OpFate.new]
    assert sum(row.seconds for row in gone) == pytest.approx(
        -sum(row.seconds for row in new), rel=0.2
    )


def test_two_compilers_have_the_same_matmuls(sides: dict[str, Side]) -> None:
    """Each layer's products are there before and after: none is new or gone, over versions of JAX that name them otherwise."""
    rows = [row for row in changes_of(sides[OLD], sides[NEW]) if row.kind == "matmul"]
    assert {row.change for row in rows} <= {OpFate.same, OpFate.slower, OpFate.faster, OpFate.fused}
    assert {"mlp", "attention", "head"} <= {row.layer.split("/")[0] for row in rows}


def test_one_op_by_hand(sides: dict[str, Side]) -> None:
    """The slowest matmul at twice the cycles."""
    timeline = sides[NEW][1]
    span = max(
        (span for span, _ in core(timeline) if span.flops and span.opcode == "fusion"),
        key=lambda span: span.seconds,
    )
    lines = hlo.text(NEW).splitlines()
    at = next(n for n, line in enumerate(lines) if f"%{span.name} = " in line)
    lines[at] = re.sub(
        r'"estimated_cycles":"(\d+)"',
        lambda found: f'"estimated_cycles":"{2 * int(found[1])}"',
        lines[at],
    )
    other = side("\n".join(lines))
    rows = changes_of(sides[NEW], other)
    slow = next(row for row in rows if row.change is OpFate.slower)
    assert span.name in slow.after_ops
    assert slow.kind == "matmul"
    assert slow.seconds == pytest.approx(other[1].seconds - timeline.seconds, rel=0.02)
    assert rows.index(slow) == 0


def test_an_edit_that_moves_lines_and_names_scopes_pairs_the_same_work() -> None:
    """Two days of one recipe: no scopes on the first, lines 11 to 22 further down on the second."""
    on = slice("v5e-4")
    modules = [parse(hlo.text(name)) for name in ("lm-v5e-4", "lm-scoped-v5e-4")]
    before, after = ((module, simulate(module, on)) for module in modules)
    rows = changes_of(before, after)
    lost = [row for row in rows if row.change in (OpFate.new, OpFate.gone)]
    assert sum(abs(row.seconds) for row in lost) < 0.02 * seconds(after)
    up = next(row for row in rows if row.source == "decoder/module.py:81" and row.kind == "matmul")
    assert up.before_seconds == pytest.approx(up.after_seconds, rel=0.01)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    new, old = tmp_path / "new.txt", tmp_path / "old.txt"
    new.write_text(hlo.text(NEW))
    old.write_text(hlo.text(OLD))
    return new, old


def test_the_verb_tells_the_ops(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = files
    page = tmp_path / "page.html"
    words = [str(new), "--against", str(old), "--on", "v6e-4"]
    assert main(["forecast", *words, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "from old.txt on v6e-4 to new.txt on v6e-4" in text
    assert "ops that changed, by time: " in text
    assert main(["forecast", *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    step = next(one for one in record["against"] if one["name"] == "step")
    ops = record["against_ops"]
    assert ops[0]["kind"] in text
    assert abs(sum(one["after_seconds"] - one["before_seconds"] for one in ops)) > 0.5 * abs(
        step["after"] - step["before"]
    )
    assert "Changes <small>since old.txt on v6e-4</small>" in page.read_text()
    assert page.read_text().count("<tr title=") == min(len(ops), comparison.PAGE_ROWS)


def test_saved_forecasts_are_compared_as_their_dumps(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forecast's JSON keeps its ops: both saved, either saved and the other a dump, and two dumps say the same."""
    kept = [tmp_path / "new.json", tmp_path / "old.json"]
    for dump, path in zip(files, kept, strict=True):
        assert main(["forecast", str(dump), "--on", "v6e-4", "--json"]) == 0
        path.write_text(capsys.readouterr().out)

    def against(after: Path, before: Path, *words: str) -> dict:
        assert main(["forecast", str(after), "--against", str(before), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    dumps = against(*files, "--on", "v6e-4")
    assert dumps["against_ops"]
    for answer in (
        against(*kept),
        against(kept[0], files[1]),
        against(files[0], kept[1], "--on", "v6e-4"),
    ):
        assert answer["against"] == dumps["against"]
        assert answer["against_ops"] == dumps["against_ops"]
        assert answer["against_notes"] == []
    assert main(["forecast", str(kept[0]), "--against", str(kept[1])]) == 0
    text = capsys.readouterr().out
    assert "from old.txt on v6e-4 to new.txt on v6e-4" in text
    assert max(map(len, text.splitlines())) <= 80
    assert systolic.forecast(files[0], on="v6e-4", against=json.loads(kept[1].read_text())).against


def test_the_ops_of_a_forecast_survive_its_json(sides: dict[str, Side]) -> None:
    kept = json.loads(json.dumps({"ops": table_of(groups(sides[OLD]))}))
    assert len(json.dumps(kept)) < 100_000
    rows = changes_between(groups_in(kept["ops"], "old"), groups(sides[NEW]))
    assert rows == changes_of(sides[OLD], sides[NEW])


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"slice": "v6e-8"}, "the slices differ: seconds and bytes are of a device of v6e-8 and of v6e-4"),
        ({"tokens_per_second": 5.0}, "the first counts tokens, the second calls: "),
        ({"ops": None}, "ops are not compared: the first of the forecasts keeps none; write it again"),
        ({"calibration": {"name": "mine"}}, "the first is corrected by mine, the second by none"),
        ({"compiler": {"libtpu": "0.0.52"}, "fits": False}, "the first does not fit, and has no time"),
    ],
)  # fmt: skip
def test_what_makes_two_forecasts_unlike_is_said(
    change: dict, note: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    after, before = tmp_path / "after.json", tmp_path / "before.json"
    record = systolic.forecast(files[0], on="v6e-4").to_json()
    after.write_text(json.dumps(record))
    before.write_text(json.dumps({**record, **change}))
    changes = compare_forecasts(after, against=before)
    (line,) = changes.notes
    assert line.startswith(note)
    assert bool(changes.ops) == ("ops" not in change)


def test_a_forecast_without_a_time_has_no_seconds_of_resources(
    files: tuple[Path, Path],
) -> None:
    after = systolic.forecast(files[0], on="v6e-4").to_json()
    before = {**after, "fits": False, "step_seconds": None, "time_by_resource": {}}
    rows = [
        row for row in ForecastChanges.of(before, after).figures if row.group == "time by resource"
    ]
    assert rows
    assert {row.before for row in rows} == {None}
    assert {row.ratio for row in rows} == {None}


def test_a_saved_forecast_is_refused_in_one_line(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, damaged, broken = (tmp_path / f"{name}.json" for name in ("kept", "damaged", "broken"))
    record = systolic.forecast(files[0], on="v6e-4").to_json()
    kept.write_text(json.dumps(record))
    broken.write_text(json.dumps({**record, "hbm": []}))
    damaged.write_text(json.dumps({**record, "ops": {"rows": [[1]], "parts": []}}))
    for words, message in (
        ([], "needs an earlier forecast; add --against EARLIER.json"),
        (["--against", str(kept), "--on", "v6e-8"], "kept.json is a forecast on v6e-4 and --on v6e-8 is given; leave --on out"),
        (["--against", str(damaged)], "the ops of the saved forecast of new.txt are damaged"),
        (["--against", str(broken)], "the saved forecast of new.txt is damaged (Expected `object`, got `array` - at `$.hbm`); write it again"),
        (["--against", str(tmp_path / "none.json")], "none.json cannot be read"),
    ):  # fmt: skip
        assert main(["forecast", str(kept), *words]) != 0
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_dump_for_another_number_of_devices_is_one_line(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match=r"old\.txt runs on 4 devices but v6e-8 has 8; choose a sl"):
        compare_texts(*files, slice("v6e-8"))
