"""Luck or gain: what several seeds say of the best settings and the defaults."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.cli.tune import tuning_of
from systolic.job import Mode
from systolic.report.tune.page import render
from systolic.session.tuning_processes import Processes, repeated
from systolic.tuning import sampling
from systolic.tuning.luck import Repeated
from systolic.tuning.objective import Aim
from systolic.tuning.results import StudyResult, TrialRow
from systolic.tuning.worker import this_worker

ACCURACY, LOSS = Aim(name="accuracy", mode=Mode.max), Aim(name="loss", mode=Mode.min)


def test_a_gain_is_told_from_luck() -> None:
    clear = Repeated(
        trial=3, seeds=3, aim=ACCURACY, best=(0.97, 0.98, 0.975), default=(0.9, 0.91, 0.905)
    )
    assert clear.gain == pytest.approx(0.07)
    assert "larger than the luck" in clear.sentence
    noisy = Repeated(
        trial=3, seeds=3, aim=ACCURACY, best=(0.97, 0.80, 0.9), default=(0.9, 0.91, 0.85)
    )
    assert "no larger than the luck" in noisy.sentence
    worse = Repeated(trial=3, seeds=2, aim=LOSS, best=(2.0, 2.01), default=(1.0, 1.01))
    assert worse.gain == pytest.approx(-1.0)
    assert "the default settings are better" in worse.sentence
    same = Repeated(trial=3, seeds=2, aim=LOSS, best=(1.0, 1.0), default=(1.0, 1.0))
    assert (same.gain, same.chance) == (0.0, 1.0)
    assert clear.to_json()["best"]["mean"] == pytest.approx(0.975)


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
    none = repeated(found, results(None, None, None, None))
    assert "2 of 2 seeds of the best settings and 2 of" in none.sentence
    assert none.to_json()["best"]["mean"] is None


def test_repeats_that_are_left_out_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget ended the search after the first of two trials."""
    words = ["digits", "--search=batch=16,32", "--sampler=grid", f"--study={tmp_path / 's'}"]
    made = tuning_of([*words, "--repeats=2"])[0]
    shared = made.open()
    record = shared.claim(made.trials, this_worker())
    sampler = sampling.build(made.sampler, made.searched, 0, 0)
    trial = shared.drawn(record, sampler, None)
    made.values(trial)
    assert shared.finish(trial, this_worker(), [0.9], "")
    monkeypatch.setattr(Processes, "run", Processes.result)
    assert main(["tune", *words, "--repeats=2"]) == 0
    told = "--repeats is left out, since the search ended after 1 of 2 trials"
    assert told in capsys.readouterr().err
