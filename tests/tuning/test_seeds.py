"""Luck or gain: the best and the default settings compared over several seeds."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.cli.main import main
from systolic.core.errors import RunError
from systolic.job import Mode
from systolic.tuning import sampling
from systolic.tuning.answer import Repeated, repeated
from systolic.tuning.claims import this_worker
from systolic.tuning.display.page import render
from systolic.tuning.objective import Aim
from systolic.tuning.processes import Processes
from systolic.tuning.results import StudyResult, TrialRow
from tests.tuning.searches import tuning_of

ACCURACY, LOSS = Aim(name="accuracy", mode=Mode.max), Aim(name="loss", mode=Mode.min)


def told(aim: Aim, best: Sequence[float], default: Sequence[float]) -> Repeated:
    return Repeated(trial=3, seeds=len(best), aim=aim, best=best, default=default)


def test_a_gain_is_told_from_luck() -> None:
    # By hand: gains 0.06, 0.08, 0.07 have mean 0.07 and deviation 0.01, so that t is 12.12 with 2 degrees of freedom.
    clear = told(ACCURACY, (0.97, 0.98, 0.975), (0.91, 0.90, 0.905))
    assert clear.gain == pytest.approx(0.07)
    assert clear.chance == pytest.approx(0.00674, abs=1e-5)
    assert "larger than the variation" in clear.sentence
    assert clear.to_json()["best"]["mean"] == pytest.approx(0.975)
    noisy = told(ACCURACY, (0.97, 0.80, 0.9), (0.9, 0.91, 0.85))
    assert noisy.sentence.startswith("no verdict: the best settings are better")
    assert "not significant with 3 seeds (p 0.96); use --repeats 6 or more" in noisy.sentence
    worse = told(LOSS, (2.0, 2.01, 2.02), (1.0, 1.02, 1.01))
    assert worse.gain == pytest.approx(-1.0)
    assert "the default settings are better" in worse.sentence


def test_both_settings_have_the_same_seeds() -> None:
    """Seeds make a larger difference than settings; t is 7 by hand, and 0.29 for an unpaired test."""
    paired = told(ACCURACY, (0.70, 0.80, 0.90), (0.68, 0.77, 0.88))
    assert paired.chance == pytest.approx(0.0198, abs=1e-4)
    assert "larger than the variation" in paired.sentence


def test_the_same_difference_with_each_seed_is_judged_by_its_sign() -> None:
    same = told(LOSS, (1.0, 1.0), (1.0, 1.0))
    assert (same.gain, same.chance) == (0.0, 1.0)
    assert (
        same.sentence == "no gain: the default settings have the same result with each of 2 seeds"
    )
    # Differences of one example in 179, equal up to rounding.
    even = told(ACCURACY, (171 / 179, 173 / 179, 170 / 179), (170 / 179, 172 / 179, 169 / 179))
    assert even.chance == 0.25
    assert even.sentence.startswith("no verdict")
    more = told(ACCURACY, (0.92,) * 6, (0.9,) * 6)
    assert more.chance == pytest.approx(2 / 64)
    assert "larger than the variation" in more.sentence
    # As often better as worse: the mean difference is 0.
    both = told(LOSS, (1.0, 1.2), (1.2, 1.0))
    assert both.chance == pytest.approx(1.0)
    assert both.sentence.startswith("no verdict")


def results(*losses: float | None) -> StudyResult:
    reason = "failed: the loss of step 3 is not a number"
    rows = [
        TrialRow(number=number, state="failed", values={}, figures={}, reason=reason)
        if loss is None
        else TrialRow(number=number, state="done", values={}, figures={"loss": loss})
        for number, loss in enumerate(losses)
    ]
    return StudyResult(
        name="s",
        recipe="digits",
        rows=rows,
        total=len(rows),
        searched=(),
        aims=(LOSS,),
        importance={},
    )


def test_seeds_that_failed_are_told_and_leave_no_verdict(tmp_path: Path) -> None:
    found = results(0.49)
    told = repeated(found, results(0.5, 0.6, None, 0.61, None, 0.62, None, 0.61, 0.51, 0.6))
    assert told.sentence == (
        "no verdict: 3 of 5 seeds of the best settings and 0 of the default ones have no result"
        " (trial 2: failed: the loss of step 3 is not a number)"
    )
    plain = json.loads(json.dumps(told.to_json()))
    assert (plain["gain"], plain["p"], plain["best"]["values"]) == (None, None, [0.5, 0.51])
    assert told.sentence in render(replace(found, repeats=plain), tmp_path)
    # A smaller --repeats after one that was interrupted within a pair.
    odd = repeated(found, results(0.5, 0.6, 0.52, 0.61, 0.51, 0.62, 0.53))
    assert (odd.seeds, len(odd.best), len(odd.default), odd.is_whole) == (3, 3, 3, True)
    none = repeated(found, results(None, None, None, None))
    assert "2 of 2 seeds of the best settings and 2 of" in none.sentence
    assert none.to_json()["best"]["mean"] is None


def ended(words: Sequence[str], *values: Sequence[float]) -> None:
    """Ends the first trials of a study with these results."""
    made = tuning_of(words)
    with closing(made.open()) as shared:
        for each in values:
            record = shared.claim(made.trials, this_worker())
            sampler = sampling.build(made.sampler, made.searched, 0, record.number)
            trial = shared.drawn(record, sampler, None)
            made.values(trial)
            assert shared.finish(trial, this_worker(), each, "")


def test_repeats_that_are_left_out_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget ended the search after the first of two trials."""
    words = ["digits", "--search=batch=16,32", "--sampler=grid", f"--study={tmp_path / 's'}"]
    words.append("--repeats=2")
    ended(words, [0.9])
    monkeypatch.setattr(Processes, "run", Processes.result)
    assert main(["tune", *words]) == 0
    told = "--repeats is skipped, since the search ended after 1 of 2 trials"
    assert told in capsys.readouterr().err


def test_repeats_judge_by_a_metric_and_cost_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cost is the first objective, and repeats ignore it; they fail, and the search's results are still written."""
    folder = tmp_path / "s"
    words = ["digits", "--search=batch=16,32", "--sampler=grid", f"--study={folder}", "--on=v5e-1"]
    words += ["--objective=dollars", "--objective=accuracy", "--repeats=2"]
    ended(words, [0.9, 1.0], [0.95, 2.0])
    asked: list[Any] = []

    def run(processes: Processes) -> StudyResult:
        if processes.tuning.repeats is None:
            return processes.result()
        asked.append(processes.tuning)
        raise RunError("3 trials in a row had no result")

    monkeypatch.setattr(Processes, "run", run)
    assert main(["tune", *words]) == 1
    assert [aim.text for one in asked for aim in one.aims] == ["max:accuracy"]
    found = json.loads((folder / "study.json").read_text())
    assert found["best"]["figures"] == {"accuracy": 0.95, "dollars": 2.0}
    assert (folder / "report.html").is_file()
