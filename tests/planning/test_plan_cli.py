"""``systolic plan`` as a person types it; one tiny program is compiled, the rest is numbers."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.cli.main import main
from systolic.job import Layout
from systolic.planning import command
from systolic.planning.plan import Plan, SearchStop
from systolic.planning.search import Search, SearchProgress, SearchStage
from systolic.runs.plan_choice import read
from tests.planning import fabricated

TINY = f"{Path(__file__).parents[1] / 'cli' / 'tiny.py'}:job"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs slices; add --on"),
        (["--on", "v5e-4", "--free", "layers"], "it takes batch, precision"),
        (["--on", "v5e-4", "--programs", "0"], "--programs is 0; it must be at least 1"),
        (["--on", "v5e-4", "--deadline", "soon"], "'soon' is not a time"),
        (["--on", "v5e-4", "--tokens", "-1"], "--tokens is -1.0; it must be above 0"),
        (["--on", "v5e-4", "--tokens", "1", "--examples", "1"], "give one of them"),
        (["--on", "v5e-4", "--goal", "fast"], "see systolic plan"),
        (["--on", "v5e-4", "--token", "1"], "did you mean --tokens?"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["plan", TINY, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_tokens_of_a_job_without_any(
    planned: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "digits", "--on", "v5e-4", "--tokens", "1e9"]) == 2
    assert "digits has no tokens; give --examples" in capsys.readouterr().err


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with a search that answers the fabricated plan, result by result."""

    def run(words: list[str], stopped: SearchStop | None = None, **goal: Any) -> int:
        def searched(search: Search, *_: Any) -> Plan:
            made = fabricated.plan(replace(fabricated.GOAL, **goal), stopped)
            for number, one in enumerate(made.tried, 1):
                so_far = replace(made, tried=made.tried[:number])
                search.watch(
                    SearchProgress(
                        stage=SearchStage.compiling,
                        compiled=number,
                        of=24,
                        running=["v5e-64 fsdp 64 remat full"],
                        best=so_far.best,
                        seconds=10.0 * number,
                        latest=one,
                        answer=lambda so_far=so_far: so_far,
                    )
                )
            return made

        monkeypatch.setattr(command, "searched", searched)
        return main(["plan", "lm", *words, "--tokens", "20e9"])

    return run


def test_an_answer(
    planned: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned(["--on", "v5e-64,v6e-16", "--html", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert "v6e-16 fsdp 16 remat minimal attention block 1024: 13.9 hours, $600" in out
    assert "run       systolic train lm --plan plan.json\n" in out
    assert "report    page.html\n" in out
    assert len(err.splitlines()) == len(fabricated.plan().tried)
    assert "[ 6/24, 1 m 00 s] v5e-16 fsdp 16 remat none: needs 20.30 GiB of 16.00 GiB" in err
    assert "<- best so far" in err
    plain = json.loads((tmp_path / "plan.json").read_text())
    assert plain["recipe"] == "lm"
    assert plain["options"]["sequence"] == 1024
    assert plain["best"]["slice"] == "v6e-16"
    assert read(tmp_path / "plan.json").slice == "v6e-16"
    assert "no other is faster and cheaper" in (tmp_path / "page.html").read_text()


def test_a_killed_search_leaves_the_best_so_far(
    planned: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []

    def write(path: Path, value: Any) -> None:
        seen.append(value)
        if len(seen) == 2:
            raise SystemExit("killed")

    monkeypatch.setattr(command, "write_json", write)
    with pytest.raises(SystemExit):
        planned(["--on", "v5e-64", "--goal", "pareto"])
    # The first result is the first best, the fifth the next.
    assert [(one["best"]["slice"], one["compiled"]) for one in seen] == [
        ("v5e-64", 1),
        ("v6e-16", 5),
    ]
    assert seen[0]["recipe"] == "lm"


def test_ctrl_c_answers_with_the_best_so_far(
    planned: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned(["--on", "v5e-64", "--json"], SearchStop.interrupted) == 130
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["stopped"] == "interrupted"
    assert told["command"] == "systolic train lm --plan plan.json"
    assert err.endswith("systolic: interrupted, finished compiles are kept; rerun to continue\n")


def test_no_answer_says_what_came_nearest(
    planned: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned(["--on", "v5e-64", "--budget", "100"], budget_usd=100.0) == 1
    out, _ = capsys.readouterr()
    assert "none meets the goal" in out
    assert "nearest is v6e-16 fsdp 16 remat minimal attention block 1024, which costs $600" in (
        " ".join(out.split())
    )
    assert "to try: " in out
    assert "systolic train" not in out


def test_a_real_search_of_a_tiny_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", TINY, "--on", "v5e-4", "--programs", "1", "--finalists", "0", "--json"]
    assert main([*words, "--out", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["compiled"] == 1
    assert told["searched"] > 10
    best = told["best"]
    assert best["slice"] == "v5e-4"
    assert set(best["layout"]) == {field.name for field in dataclasses.fields(Layout)}
    assert best["compile"] == "schedule"
    assert best["hbm"]["peak_bytes"] > 0
    assert best["total"]["steps"] == 5
    assert best["total"]["usd"] > 0
    assert json.loads(path.read_text())["best"] == best
    chosen = read(path)
    assert chosen.settings["batch"] == 16
    assert chosen.steps == 5
    assert main(["explain", str(path), "--remedies", "0", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert (explained["target"], explained["slice"]) == (TINY, "v5e-4")
    assert explained["step_seconds"] == best["step_seconds"]


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_place_that_can_not_be_written_is_said_before_any_compile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    assert main(["plan", TINY, "--on", "v5e-4", option, str(tmp_path)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a directory" in line
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "plan.json")
    assert main(["plan", TINY, "--on", "v5e-4", option, below]) != 0
    assert "is a file, so" in capsys.readouterr().err
    # Nobody can write here, root neither.
    assert main(["plan", TINY, "--on", "v5e-4", option, "/proc/plan.json"]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "/proc is not writable" in err
