"""Causes of a run's time, from records whose shares are known."""

from pathlib import Path

import pytest

from systolic.explaining import runs
from systolic.explaining.settings import Settings, inspecting
from systolic.runs.job_record import JobRecord
from systolic.runs.metrics import ProbeRecord
from systolic.runs.record import RunRecord


def history(**more: object) -> RunRecord:
    return RunRecord(path=Path("run"), job=JobRecord(job={"steps": 1000}), **more)


def test_probes_become_as_rare_as_a_hundredth_of_the_time() -> None:
    """Two probes of 15 s, ten steps apart, take 30 of 100 s: one in 300 steps would take 1 s."""
    run = history(diagnoses=[ProbeRecord(step=10), ProbeRecord(step=20)])
    found = runs.probes(run, {"diagnose": 30.0, "step": 70.0}, 100.0)
    assert found is not None
    assert (found.seconds, found.share) == (30.0, pytest.approx(0.3))
    assert list(found.evidence) == ["2 probes, 15.0 s each"]
    assert list(found.advice) == ["--diagnose 300"]
    rare = runs.probes(run, {"diagnose": 99.0}, 100.0)
    assert rare is not None
    assert list(rare.advice) == ["--diagnose 990"]
    none = runs.probes(history(diagnoses=run.diagnoses * 2), {"diagnose": 30.0}, 30.0)
    assert none is not None
    assert list(none.advice) == ["--diagnose 0"]  # not within this run of 1,000 steps
    assert runs.probes(run, {"diagnose": 1.9}, 100.0) is None
    assert runs.probes(history(diagnoses=[ProbeRecord(step=10)]), {"diagnose": 30.0}, 100.0) is None


def test_a_start_that_takes_a_third_is_told() -> None:
    found = runs.other(history(), {"start": 20.0, "other": 11.0}, 100.0)
    assert found is not None
    assert found.seconds == 31.0
    assert "31.0 s of 1 m 40 s" in found.evidence[0]
    assert runs.other(history(), {"start": 29.9}, 100.0) is None


def test_a_batch_changes_through_the_option_that_the_run_was_made_with() -> None:
    assert Settings({"batch": 32}).batch(64, now=32) == "--batch 64"
    assert Settings({"batch": None, "batch_per_device": 4}).batch(64, now=32) == (
        "--batch-per-device 8"
    )
    assert Settings({"batch": 64}).batch(64, now=32) == ""


def test_the_command_that_shows_the_data_has_switches_as_typed() -> None:
    """The data's options that differ from the recipe's, and none of its training."""
    given = {"steps": 5, "path": "texts", "packed": False, "shuffle": True, "names": ["a", "b c"]}
    run = RunRecord(path=Path("run"), job=JobRecord(recipe="mine.py:own", options=given))
    assert inspecting(run) == (
        "systolic data inspect mine.py:own --path texts --no-packed --shuffle --names a 'b c'"
    )
