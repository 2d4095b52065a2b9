"""Which ops changed between two dumps: one train step by two compilers and under one flag, and texts that differ by hand."""

import json
import re
from pathlib import Path

import pytest

import systolic
from systolic.chips import slice
from systolic.cli.main import main
from systolic.core.errors import DataError, OptionError
from systolic.forecasting import compare_texts
from systolic.forecasting.costs import core
from systolic.forecasting.display import op_table
from systolic.forecasting.op_changes import OpChange, OpFate, changes_of
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
    assert {"mlp", "attention", "head"} <= {row.place.split("/")[0] for row in rows}


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
    assert page.read_text().count("<tr title=") == min(len(ops), op_table.PAGE_ROWS)


def test_a_dump_is_compared_with_a_dump(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = files
    with pytest.raises(
        OptionError, match="is a dump, which another dump is compared with: systolic f"
    ):
        systolic.forecast("lm", against=old, on="v6e-4")
    assert main(["forecast", "lm", "--against", str(old), "--on", "v6e-4"]) == 2
    assert "is a dump, which another dump is" in capsys.readouterr().err
    assert main(["forecast", str(old), "--on", "v6e-4", "--json"]) == 0
    before = tmp_path / "before.txt"  # JSON, whatever its name
    before.write_text(capsys.readouterr().out)
    assert main(["forecast", str(new), "--against", str(before), "--on", "v6e-4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["against"]
    assert "against_ops" not in record


def test_a_dump_for_another_number_of_devices_is_one_line(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match=r"old\.txt runs on 4 devices but v6e-8 has 8; choose a sl"):
        compare_texts(*files, slice("v6e-8"))
