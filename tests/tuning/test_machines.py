"""What a search checks of its machine: devices, precision and disk space."""

import resource
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from systolic.core.errors import OptionError, RunError
from systolic.tuning.answer import wall_time
from systolic.tuning.results import rows_of
from tests.tuning.test_trials import RATES, tuning, work


def test_an_unknown_metric_is_told_before_any_trial(tmp_path: Path) -> None:
    made = tuning(tmp_path / "study", RATES, "--objective=max:acuracy")
    with pytest.raises(OptionError, match="did you mean accuracy"):
        work(made)
    assert not (tmp_path / "study" / "trials").exists()


def test_machines_that_compute_otherwise_share_no_study(tmp_path: Path) -> None:
    made = tuning(tmp_path / "study", RATES)
    with closing(made.open()) as shared:
        shared.agree_on({"precision": "bf16"})
    with pytest.raises(OptionError, match="has the precision bf16, not f32"):
        work(made)


def test_seconds_beside_other_trials_are_told(tmp_path: Path) -> None:
    words = ["--objective=loss", "--objective=seconds"]
    alone = tuning(tmp_path / "study", RATES, *words)
    assert wall_time(alone, 1) == wall_time(tuning(tmp_path / "study", RATES), 4) == ""
    told = "--objective seconds is wall time: the 4 workers share this machine"
    assert wall_time(alone, 4).startswith(told)
    shared = tuning(tmp_path / "study", RATES, *words, f"--storage=sqlite:///{tmp_path / 'a.db'}")
    assert wall_time(shared, 1).endswith(
        "wall time: machines that share the study may differ in speed"
    )
    assert wall_time(shared, 2).count(", and machines that share the study") == 1


def test_a_batch_per_device_is_the_slices_own(tmp_path: Path) -> None:
    """This process and the slice differ in their number of devices: the price would be for another batch."""
    rates = "--search=optimizer.learning-rate=log:1e-4..1e-2"
    for words in ([rates, "--batch-per-device=8"], ["--search=batch-per-device=8,16"]):
        made = tuning(tmp_path / str(len(words)), *words, "--on=v5e-16", recipe="digits")
        with pytest.raises(OptionError, match="v5e-16 has 16 devices and this machine"):
            work(made)
        assert not made.runs.exists()


def test_machines_with_other_devices_share_no_batch_per_device(tmp_path: Path) -> None:
    words = ["--search=optimizer.learning-rate=log:1e-4..1e-2", "--batch-per-device=8"]
    made = tuning(tmp_path / "study", *words, recipe="digits")
    with closing(made.open()) as shared:
        shared.agree_on({"devices": 1000})
    with pytest.raises(
        OptionError, match=r"has the devices 1000, not .*; continue it with the same"
    ):
        work(made)


@pytest.mark.slow
def test_a_trial_that_a_full_disk_stops_waits_and_goes_on(tmp_path: Path) -> None:
    """Files are limited to 400 kB: the study fits, a checkpoint doesn't."""
    folder, before = tmp_path / "study", resource.getrlimit(resource.RLIMIT_FSIZE)
    made = tuning(folder, RATES, "--trials=1", "--width=32768", "--steps=2")
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    try:
        with pytest.raises(RunError) as caught:
            work(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == (
        f"trial 0 could not be saved (File too large); free space in {folder} and rerun to continue it"
    )
    shared = made.open()
    (row,) = rows_of(shared, 1, made.searched, made.aims, made.runs)
    assert row.state == "waiting"
    again = work(made)
    assert [one.state for one in again.rows] == ["done"]
    assert again.rows[0].values == row.values
