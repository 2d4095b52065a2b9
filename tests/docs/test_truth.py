"""The pages on how Systolic works, how true it is, what it lacks and how it refuses: their commands run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
CODE = re.compile(r"Exit\s+code: (\d+)")
SAVED = re.compile(r"Save it as\s+`(\S+)`")


@pytest.fixture
def extension(monkeypatch):
    """``docs/_extensions/truth.py`` as Sphinx imports it."""
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    import truth

    return truth


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a page with the lines that it shows below."""
    found: list[tuple[str, list[str]]] = []
    for kind, block in BLOCK.findall(text):
        if kind != "console":
            continue
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def ran(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line of a page, with ``systolic`` and ``python`` of this checkout and interpreter."""
    programs = folder.parent / "bin"
    if not programs.exists():
        programs.mkdir()
        (programs / "systolic").write_text(f'#!/bin/sh\nexec {sys.executable} -m systolic "$@"\n')
        (programs / "systolic").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    where = ROOT if command.startswith("python benchmarks/") else folder
    return subprocess.run(
        ["bash", "-c", command],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def check(command: str, shown: list[str], folder: Path, exit_code: int = 0) -> None:
    """Runs a command and compares its exit code, and the words of each line shown, with the page."""
    result = ran(command, folder)
    said = result.stdout + result.stderr
    assert result.returncode == exit_code, f"{command}\n{said}"
    there = set(said.split())
    for line in shown:
        missing = [word for word in line.split() if word not in there and not word.startswith("…")]
        # A path is shown without its folder, which differs.
        missing = [
            word for word in missing if not any(other.endswith(f"/{word}") for other in there)
        ]
        assert not missing, f"{command}: {line!r} has {missing}\n{said}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["how-it-works", "accuracy"])
def test_commands(page, tmp_path):
    text = (DOCS / f"{page}.md").read_text()
    folder = tmp_path / "example"
    folder.mkdir()
    saved = SAVED.search(text)
    if saved:
        (folder / saved[1]).write_text(
            next(block for kind, block in BLOCK.findall(text) if kind == "python")
        )
    found = commands(text)
    assert found
    for command, shown in found:
        check(command, shown, folder)


@pytest.mark.slow
def test_refusals(tmp_path):
    folder = tmp_path / "example"
    folder.mkdir()
    (folder / "empty.txt").touch()
    text = (DOCS / "errors.md").read_text()
    names = SECTION.split(text)
    num_run = 0
    for title, section in zip(names[1::2], names[2::2], strict=True):
        code = CODE.search(section)
        assert code, title
        found = commands(section)
        for command, shown in found:
            check(command, shown, folder, int(code[1]) if shown else 0)
            num_run += 1
    assert num_run == 11


def test_limits_refusal(tmp_path):
    folder = tmp_path / "example"
    folder.mkdir()
    ((command, shown),) = commands((DOCS / "limits.md").read_text())
    check(command, shown, folder, 2)


def test_errors_page_has_every_class():
    from systolic.core import errors

    text = (DOCS / "errors.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.SystolicError):
            assert f"`{name}`" in text or f"systolic.{name}" in text, name
            if name != "SystolicError":
                section = next(part for part in text.split("\n## ") if f"`{name}`" in part)
                assert int(CODE.search(section)[1]) == value.exit_code, name
                assert f"`[{value.short_name}]`, `{name}`" in section, name


def test_rows_are_complete(extension):
    rows = extension.published()
    front, report, _ = extension.modules()
    assert {row.id for row in rows} == {row["id"] for row in front.lines(front.REBUILT, "id")}
    assert {row.id for row in rows if row.own} == {
        row["id"] for row in front.lines(front.OWN, "id", "on", "seconds")
    }
    table = extension.rows_table()
    for row in rows:
        assert f"| {row.id} |" in table
        for forecast in (row.own, row.rebuilt):
            if forecast and (forecast.error is None or abs(forecast.error) > report.LARGE):
                assert forecast.known, row.id


def test_rows_agree_with_front(extension):
    """The judge half of the table gives the means that ``front.py`` prints."""
    front, *_ = extension.modules()
    assert all(row.own is None or row.own.half == row.rebuilt.half for row in extension.published())
    for kind, errors in (("own", front.own_programs()), ("rebuilt", front.rebuilt())):
        for generation, values in errors.items():
            mine = [
                abs(forecast.error)
                for row in extension.published()
                if row.generation == generation
                and (forecast := getattr(row, kind))
                and forecast.half == "judge"
                and forecast.error is not None
            ]
            assert sorted(mine) == pytest.approx(sorted(values)), (kind, generation)


def test_no_constant_rests_on_a_judge_row(extension):
    """Families that a source of the simulator's fitted constants names are no rows of the judge half."""
    front, report, _ = extension.modules()
    judged = [row for row in extension.published() if row.rebuilt.half == "judge"]
    records = {
        one["id"]: one for one in report.json.loads(extension.modules()[2].PUBLISHED.read_text())
    }
    assert not [row.id for row in judged if records[row.id]["model"] in front.slices.FITTED]
    assert not [row.id for row in judged if "qwen3-8b-v6e8" in row.id]
    assert not [row.id for row in judged if row.id.startswith(report.LOOKED_INTO)]
    page = " ".join((DOCS / "accuracy.md").read_text().split())
    rested = [row for row in extension.published() if row.id.startswith(report.RESTED_ON)]
    assert f"Their {len(rested)} rows count as `fit`" in page


def test_figures_of_the_pages_are_those_of_the_results(extension):
    """README and the pages have what ``python benchmarks/accuracy/front.py --write`` writes."""
    front, *_ = extension.modules()
    assert [name for name, before, text in front.pages() if text != before] == []
    assert front.table() in (ROOT / "README.md").read_text()


def test_figures_by_another_way(extension):
    """Counts of the page on accuracy, from the rows that its tables show."""
    rows = extension.published()
    own = [row.own for row in rows if row.own]
    made = [row.rebuilt for row in rows]
    large = [sum(e.error is not None and abs(e.error) > 0.15 for e in one) for one in (own, made)]
    front, *_ = extension.modules()
    figures = front.figures()
    unfit = sum(one.known.startswith("does not fit") for one in made)
    expected = {
        "published": len(rows),
        "own_forecast": sum(one.error is not None for one in own),
        "own_tried": len(own),
        "rebuilt_forecast": sum(one.error is not None for one in made),
        "not_expressed": sum(one.error is None for one in made) - unfit,
        "unfit": unfit,
        "large": sum(large),
        "large_own": large[0],
        "large_rebuilt": large[1],
    }
    assert {name: figures[name] for name in expected} == {k: str(v) for k, v in expected.items()}


def test_a_figure_is_put_where_its_sentence_is(extension):
    front, *_ = extension.modules()
    page = "Rows: 80. Of them 12.5 % in the\nmean, 3 at worst; and 12.5 % in the middle."
    sentence = "Of them {mean} % in the mean, {worst} at worst;"
    values = {"mean": "7.0", "worst": "10"}
    text = front.filled(page, sentence, values)
    assert text == "Rows: 80. Of them 7.0 % in the\nmean, 10 at worst; and 12.5 % in the middle."
    assert front.filled(text, sentence, values) == text
    for damaged in (page.replace("Of them", "Of those"), page + page):
        with pytest.raises(ValueError, match="times, not once: Of them"):
            front.filled(damaged, sentence, values)


def test_kinds_and_halves_by_hand(extension, monkeypatch):
    front, *_ = extension.modules()
    rows = {
        "own": [("v4", "judge", 0.1), ("v4", "judge", -0.3), ("v6e", "fit", 0.05)],
        "rebuilt": [("v2", "fit", -0.5)],
        "function": [],
        "decode": [("v5e", "judge", 0.2)],
    }
    keys = ("generation", "half", "error")
    monkeypatch.setattr(
        front, "rows_of", lambda kind: [dict(zip(keys, r, strict=True)) for r in rows[kind]]
    )
    lines = front.kinds().splitlines()
    assert "| own program | v4 | 2 | 20.0% | 20.0% | 30.0% | - | - | - | - |" in lines
    assert "| own program | all | 2 | 20.0% | 20.0% | 30.0% | 1 | 5.0% | 5.0% | 5.0% |" in lines
    assert "| rebuilt | v2 | - | - | - | - | 1 | 50.0% | 50.0% | 50.0% |" in lines
    assert "| rebuilt decode step | v5e | 1 | 20.0% | 20.0% | 20.0% | - | - | - | - |" in lines


def test_plot_has_a_mark_for_each_forecast(extension):
    drawn = extension.plot()
    rows = extension.published()
    forecasts = [
        one for row in rows for one in (row.own, row.rebuilt) if one and one.error is not None
    ]
    assert drawn.count("<title>") == len(forecasts)
    assert "currentColor" in drawn


def test_by_hand():
    """The figures of the page on how it works, from the catalogue and the estimates."""
    import tomllib

    from systolic.chips import slice
    from systolic.sim.rates import rates_of

    rates = rates_of(slice("v5e-16"))
    estimates = tomllib.loads((ROOT / "src/systolic/sim/estimates.toml").read_text())
    of = estimates["all"] | estimates["v5e"]
    gather = 3 * 2048 * 8192 * 2 / rates.link + 3 * rates.hop_seconds + rates.collective_seconds
    memory = 3 * 8192 * 8192 * 2 / rates.hbm
    matmul = (
        2 * 8192**3 / rates.peaks["bf16"] * of["matrix"] + memory * of["memory"] * of["unhidden"]
    )
    text = (DOCS / "how-it-works.md").read_text()
    for seconds in (gather, memory, matmul, gather + matmul):
        assert f"{seconds * 1e3:.3f} ms" in text


def test_each_constant_says_what_it_is_and_where_it_is_from():
    """Constants that hold for all generations, and those of one that no search fitted; the page on limits counts the first."""
    import tomllib
    from collections import Counter

    folder = ROOT / "src/systolic/sim"
    named, fitted = (
        tomllib.loads((folder / name).read_text()) for name in ("constants.toml", "estimates.toml")
    )
    # Four of each generation have their source above them: they are what benchmarks/operations/fit.py prints.
    searched = {"matrix", "memory", "vector", "unhidden"}
    shares = {k: v for row in fitted.values() for k, v in row.items() if k not in searched}
    entries = [
        entry
        for table in (*named.values(), shares)
        for held in table.values()
        for entry in ([held] if "value" in held else held.values())
    ]
    assert len(entries) > 50
    for entry in entries:
        assert set(entry) == {"value", "origin", "what", "source"}, entry
        assert entry["origin"] in ("fitted", "measured", "assumed")
    origins = Counter(entry["origin"] for table in named.values() for entry in table.values())
    counted = (
        f"{origins['measured']} measured, {origins['fitted']} fitted, {origins['assumed']} assumed"
    )
    assert counted in (DOCS / "limits.md").read_text()


def test_the_page_on_hardware_has_the_blind_rows_beside_the_others(extension):
    text = (DOCS / "start" / "choose-hardware.md").read_text()
    assert "<!-- truth: expected -->" in text
    assert not re.search(
        r"^\|.*\d\.\d %.*\|.*\d\.\d %.*\|$",
        text.split("## What a TPU's")[1].split("## What a GPU's")[0],
        re.M,
    )
    *_, whole, worst = extension.expected_table().splitlines()
    front, *_ = extension.modules()
    figures = front.figures()
    assert whole.startswith(f"| all | {figures['own_mean']} % of {figures['own_judged']} |")
    assert whole.endswith("| 14.8 % of 80 |")
    assert worst.startswith(f"| the worst row | {figures['own_worst']} % |")


def test_pages_state_the_error_of_served_models():
    result = (ROOT / "benchmarks" / "results" / "2026-11-28-serve-published.md").read_text()
    assert "servers, all: 11 rows, mean |error| 22.3%" in result
    assert "static batches, all: 13 rows, mean |error| 5.7%" in result
    assert "rebuilt are 13.9 % off" in result
    stored = ROOT / "benchmarks" / "results" / "2026-11-28-serve-published.jsonl"
    rows = [json.loads(line) for line in stored.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "measured_engine"]
    rebuilt = [abs(row["rebuilt_seconds"] / row["measured_seconds"] - 1) for row in steps]
    own = [abs(row["error"]) for row in steps if row["own_seconds"]]
    assert (len(rebuilt), round(100 * sum(rebuilt) / len(rebuilt))) == (13, 14)
    assert (len(own), round(100 * sum(own) / len(own))) == (10, 3)
    for page in ("limits", "start/serve-a-model"):
        text = " ".join((DOCS / f"{page}.md").read_text().split())
        assert "22 %, mostly too fast" in text, page
        assert re.search(
            "14 % rebuilt, as .*; (for )?ten of them in the code that was measured,? 3 %", text
        ), page


def test_slices_are_named_by_what_the_page_says():
    """Names of slices count chips or cores, by the catalogue."""
    from systolic.chips import slice

    text = " ".join((DOCS / "start" / "choose-hardware.md").read_text().split())
    by_chips, by_cores = re.search(
        r"Slices of (.+?) are named by their chips\. Those of (.+?) count cores, two to a chip",
        text,
    ).groups()
    for names, chips in ((by_chips, 8), (by_cores, 4)):
        for name in re.findall(r"\w+\d\w*", names):
            assert slice(f"{name.lower()}-8").num_chips == chips, name


def test_operations_count_once_and_those_left_out_are_stated(extension, monkeypatch):
    front, *_ = extension.modules()
    names = [row["id"] for row in front.rows_of("function")]
    assert len(names) == len(set(names))
    keys = ("generation", "kind", "half", "mode", "priced", "error")
    rows = [
        ("tpu7x", "traced reduce", "judge", "quick", "2026-11-28", 0.1),
        ("tpu7x", "traced reduce", "judge", "quick", "2026-11-28", -0.5),
        ("tpu7x", "traced reduce", "fit", "quick", "2026-11-28", 9.0),
        ("v5e", "matmul", "judge", "quick", "2026-11-22", 0.2),
        ("v5p", "grouped_matmul", "judge", "quick", "2026-11-22", 0.2),
        ("v5p", "grouped_matmul kernel", "judge", "quick", "2026-11-22", 0.2),
        ("v5p", "grouped_matmul", "judge", "full", "2026-11-22", 0.2),
    ]
    made = [dict(zip(keys, row, strict=True)) for row in rows]
    monkeypatch.setattr(front.intervals, "operations", lambda: made)
    text = front.left_out()
    assert text.startswith("Left out: 1 operations on v5e, ")
    assert "; 1 grouped matmuls outside a kernel" in text
    assert "and 3 single ops out of profiles of TPU7x" in text
    assert "The 2 of these in the judge half are off by 30.0% in the mean, 30.0% in the" in text
    monkeypatch.setattr(front, "rows_of", lambda kind: made[5:6] if kind == "function" else [])
    assert "of steps: 1 at prices of 2026-11-22." in front.stale()


def test_the_figures_end_quietly_where_nobody_reads_on():
    import subprocess
    import sys

    command = f"{sys.executable} benchmarks/accuracy/front.py | true"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_errors_of_gpus_steps_are_those_of_the_results(extension):
    """The page on hardware has the ends of the rows that it names, the results' page the whole table."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
    import steps

    front, *_ = extension.modules()
    rows = front.lines(front.newest("gpu-steps"))
    page = front.newest("gpu-steps").with_suffix(".md").read_text()
    assert "\n".join(steps.table(rows)) in page
    text = (DOCS / "start" / "choose-hardware.md").read_text()
    table = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", text.partition("| published |")[2], re.M)
    ids = ["maxtext-a3", "gpu-recipes-h200", "gpu-recipes-b200-llama3.1-405b"]
    ids += [r"dgxc-maxtext-llama2-70b-\d", "dgxc-maxtext-llama2-70b-fp8"]
    assert len(table[:5]) == len(ids)
    for name, (_, *cells) in zip(ids, table, strict=False):
        for by, cell in zip(("compiler", "roofline"), cells, strict=True):
            errors = [r["error"] for r in rows if re.match(name, r["id"]) and r["by"] == by]
            ends = dict.fromkeys(f"{error * 100:+.0f}" for error in (min(errors), max(errors)))
            assert cell == f"{' to '.join(ends)} %", name
