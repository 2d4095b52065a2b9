"""``systolic plan`` as a person types it; one tiny program is compiled, the rest is numbers."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.artifact.chosen import read
from systolic.chips import slice
from systolic.cli import plan as cli
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError
from systolic.job import Batch, Layout
from systolic.planning import Freedom, Goal, Objective, PriceTerm, Search, SearchStage, SearchStop
from systolic.planning.search import SearchProgress
from tests.planning import fabricated

TINY = f"{Path(__file__).parents[1] / 'cli' / 'tiny.py'}:job"
VERB = {
    "tokens": None,
    "examples": None,
    "goal": None,
    "deadline": None,
    "budget": None,
    "price": PriceTerm.on_demand,
    "free": "",
}


def named(text: str, max_chips: int = 256) -> list[str]:
    return [on.name for on in cli.slices_of(text, max_chips, PriceTerm.on_demand)]


def test_slices_by_name_by_chip_and_all() -> None:
    assert named("v5p-8, v5e-4,v5e-4") == ["v5p-8", "v5e-4"]
    assert named("v5e", max_chips=8) == ["v5e-1", "v5e-4", "v5e-8"]
    assert named("2xv5e-256", max_chips=8) == ["2xv5e-256"]
    assert named("v5e-4,8xh100") == ["v5e-4", "8xh100"]
    everything = [slice(name) for name in named("any", max_chips=16)]
    assert {"v5e-16", "v5p-8", "v6e-4"} <= {on.name for on in everything}
    for on in everything:
        assert on.platform == "tpu"
        assert on.num_chips <= 16
        assert on.usd_per_hour.on_demand is not None


@pytest.mark.parametrize(
    ("text", "max_chips", "error", "said"),
    [
        ("v5e-17", 256, NotFoundError, "did you mean v5e-16"),
        (",", 256, OptionError, "--on names no slice"),
        ("8xcpu", 256, OptionError, "plan is for TPU and GPU slices"),
        ("v5p", 1, OptionError, "no slice of v5p has 1 chips or fewer"),
    ],
)
def test_slices_that_are_none(text: str, max_chips: int, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        named(text, max_chips)


def goal(**verb: Any) -> tuple[Goal, list[str]]:
    slices = [slice("v5e-4"), slice("v5e-16")]
    return cli.goal_of(fabricated.facts(), slices, {**VERB, **verb})


def test_the_goal_is_the_jobs_own_work_unless_told() -> None:
    own, notes = goal()
    assert own.units == 1000 * 256 * 2048
    assert own.objective is Objective.pareto
    assert "the job's own 1,000 steps of 256 examples" in notes[0]
    told, notes = goal(tokens=20e9, deadline="3d")
    assert (told.units, told.deadline_seconds) == (20e9, 259200)
    assert told.objective is Objective.cost
    assert not notes
    assert goal(examples=10.0)[0].units == 10 * 2048
    assert goal(budget=1000.0)[0].objective is Objective.time


def test_a_batch_per_device_is_said_to_differ() -> None:
    job = replace(fabricated.facts().job, batch=Batch(per_device=8))
    facts = replace(fabricated.facts(), job=job)
    slices = [slice("v5e-4"), slice("v5e-16")]
    _, notes = cli.goal_of(facts, slices, {**VERB, "tokens": 1e9})
    assert "differs by slice (32 to 128 examples a step)" in notes[0]
    assert "--batch fixes it" in notes[0]


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


def test_tokens_of_a_job_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits", "--on", "v5e-4", "--tokens", "1e9"]) == 2
    assert "digits has no tokens; give --examples" in capsys.readouterr().err


def test_freedom() -> None:
    assert cli.freed("") == Freedom()
    assert cli.freed("batch, precision") == Freedom(batch=True, precision=True)


def played(monkeypatch: pytest.MonkeyPatch, stopped: SearchStop | None, **goal: Any) -> None:
    """Searches answer the fabricated plan, result by result."""

    def run(self: Search) -> Any:
        made = fabricated.plan(replace(fabricated.GOAL, **goal), stopped)
        for number, one in enumerate(made.tried, 1):
            self.tried.append(one)
            self.watch(
                SearchProgress(
                    stage=SearchStage.compiling,
                    compiled=number,
                    of=24,
                    running=["v5e-64 fsdp 64 remat full"],
                    best=self.best(),
                    seconds=10.0 * number,
                    latest=one,
                )
            )
        return made

    monkeypatch.setattr(Search, "run", run)
    monkeypatch.setattr(cli, "facts_of", lambda job: fabricated.facts())


def test_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    played(monkeypatch, None)
    words = ["plan", "lm", "--on", "v5e-64,v6e-16", "--tokens", "20e9", "--html", "page.html"]
    assert main(words) == 0
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    played(monkeypatch, None)
    seen = []

    def write(path: Path, value: Any) -> None:
        seen.append(value)
        if len(seen) == 2:
            raise SystemExit("killed")

    monkeypatch.setattr(cli, "write_json", write)
    with pytest.raises(SystemExit):
        main(["plan", "lm", "--on", "v5e-64", "--tokens", "20e9", "--goal", "pareto"])
    # The first result is the first best, the fifth the next.
    assert [(one["best"]["slice"], one["compiled"]) for one in seen] == [
        ("v5e-64", 1),
        ("v6e-16", 5),
    ]
    assert seen[0]["recipe"] == "lm"


def test_ctrl_c_answers_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    played(monkeypatch, SearchStop.interrupted)
    assert main(["plan", "lm", "--on", "v5e-64", "--tokens", "20e9", "--json"]) == 130
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["stopped"] == "interrupted"
    assert told["command"] == "systolic train lm --plan plan.json"
    assert "the same command goes on from here" in err


def test_no_answer_says_what_came_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    played(monkeypatch, None, budget_usd=100.0)
    assert main(["plan", "lm", "--on", "v5e-64", "--tokens", "20e9", "--budget", "100"]) == 1
    out, _ = capsys.readouterr()
    assert "none keeps the goal" in out
    assert "nearest is v6e-16 fsdp 16 remat minimal attention block 1024, which costs $600" in (
        " ".join(out.split())
    )
    assert "what may help" in out
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
    assert explained["slice"] == "v5e-4"
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
