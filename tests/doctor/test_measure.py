"""The measuring child process: its results and its failures."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from systolic.doctor.machine import Death, Measured, Unmeasured, last_line, measure, outcome
from tests.doctor.machines import LAPTOP

RESULT = '{"platform": "cpu", "device_kind": "cpu", "num_devices": 1, "num_local_devices": 1}'


def _child(code: str, limit_seconds: float = 60) -> Measured | Unmeasured:
    return measure(LAPTOP, limit_seconds, (sys.executable, "-c", code))


def test_a_result_is_read_past_noise() -> None:
    found = _child(f"import sys; print('hello'); print('{RESULT}'); sys.stderr.write('W: noise')")
    assert isinstance(found, Measured)
    assert (found.platform, found.num_devices, found.complaint) == ("cpu", 1, "W: noise")


def test_a_child_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    begun = "subprocess.Popen(['sleep', '600'])"
    hang = f"import pathlib, subprocess, time; pathlib.Path('{told}').write_text(str({begun}.pid)); time.sleep(600)"
    limit = 0.25
    while not told.exists() or not told.read_text():  # a busy machine starts children slowly
        limit *= 2
        found = _child(hang, limit_seconds=limit)
        assert isinstance(found, Unmeasured)
        assert found.death is Death.timed_out
    number = int(told.read_text())
    wait_until(lambda: not runs(number))


def runs(number: int) -> bool:
    """Whether a process has not ended; who has inherited it may ask for its code later."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_that_aborts_or_raises() -> None:
    found = _child("import os; os.abort()")
    assert isinstance(found, Unmeasured)
    assert (found.death, found.exit_code) == (Death.killed, -6)
    found = _child("raise RuntimeError('TPU is in use by pid 7')")
    assert isinstance(found, Unmeasured)
    assert (found.death, found.exit_code) == (Death.failed, 1)
    assert found.complaint == "RuntimeError: TPU is in use by pid 7"


def test_a_child_that_cannot_start() -> None:
    found = measure(LAPTOP, 5, ("/nowhere/python",))
    assert isinstance(found, Unmeasured)
    assert found.exit_code == 127


@pytest.mark.parametrize("out", ["", "no json", "[1]", '{"platform": "cpu"}', '{"x": 1}'])
def test_garbage_is_a_failure_not_a_traceback(out: str) -> None:
    found = outcome(0, out, "", 1.0)
    assert isinstance(found, Unmeasured)
    assert found.death is Death.failed


def test_last_line_drops_prefixes_and_traceback_frames() -> None:
    log = "W0101 12:00:00.000001  1234 cpu_client.cc:42] An NVIDIA GPU may be present\n\n"
    assert last_line(log) == "An NVIDIA GPU may be present"
    assert (
        last_line('Traceback (most recent call last):\n  File "x"\nValueError: no\n')
        == "ValueError: no"
    )
    assert last_line("") == ""
    assert len(last_line("x" * 10_000)) == 300


def test_the_real_child_measures_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = measure(LAPTOP)
    assert isinstance(found, Measured), found
    assert found.platform == "cpu"
    rates = (found.bf16_flops_per_second, found.f32_flops_per_second, found.copy_bytes_per_second)
    for rate in rates:
        assert rate is not None
        assert 1e7 < rate < 1e15
