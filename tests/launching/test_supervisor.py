"""Processes of a local launch: started together, restarted when one dies, and stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from systolic.launching.local import SETTINGS
from systolic.launching.supervisor import (
    LOGS,
    STATE,
    Remaining,
    Supervisor,
    identity,
    lives,
    unsaved,
)
from systolic.launching.supervisor import main as supervisor

PATIENCE_SECONDS = 60


def supervise(folder: Path, code: str, *, processes: int = 2, restarts: int = 2) -> Any:
    """Starts a supervisor as a process; its processes run ``code`` with the folder as argument."""
    settings = {
        "made_by": ["systolic", "launch"],
        "command": [sys.executable, "-c", code, str(folder)],
        "directory": str(folder),
        "processes": processes,
        "devices": 3,
        "restarts": restarts,
    }
    (folder / SETTINGS).write_text(json.dumps(settings))
    return subprocess.Popen([sys.executable, "-m", "systolic.launching.supervisor", str(folder)])


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())


def wait(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


TELL = """
import json, os, sys
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "XLA_FLAGS")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""

ONCE = """
import os, pathlib, sys, time
number = os.environ["JAX_PROCESS_ID"]
mark = pathlib.Path(sys.argv[1]) / ("began" + number)
again = mark.exists()
mark.touch()
if not again and number == "1":
    os.kill(os.getpid(), 9)
if not again:
    time.sleep(600)  # as one waits for a dead peer
print("done")
"""

BROKEN = """
import os, time
number, count = os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"]
if (number, count) == ("3", "6"):
    os.kill(os.getpid(), 9)
if count == "6":
    time.sleep(600)
print(number, "of", count)
"""
"""A host of the second of three slices is down."""

WAIT = """
import os, pathlib, signal, sys, time
def save(*_):
    print("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(pathlib.Path(sys.argv[1]) / ("ready" + os.environ.get("JAX_PROCESS_ID", "0"))).touch()
time.sleep(600)
"""


def test_every_process_is_told_its_peers_and_devices(tmp_path: Path) -> None:
    assert supervise(tmp_path, TELL).wait(PATIENCE_SECONDS) == 0
    told = [json.loads((tmp_path / LOGS / f"{n}.log").read_text()) for n in range(2)]
    assert [one["JAX_PROCESS_ID"] for one in told] == ["0", "1"]
    assert {one["JAX_NUM_PROCESSES"] for one in told} == {"2"}
    assert len({one["JAX_COORDINATOR_ADDRESS"] for one in told}) == 1
    assert all(one["XLA_FLAGS"].endswith("device_count=3") for one in told)
    assert state(tmp_path)["phase"] == "done"


def test_one_process_is_no_job_of_several(tmp_path: Path) -> None:
    assert supervise(tmp_path, TELL, processes=1).wait(PATIENCE_SECONDS) == 0
    assert json.loads((tmp_path / LOGS / "0.log").read_text())["JAX_NUM_PROCESSES"] is None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Supervisors in this process, which do not wait for the others after a failure."""
    monkeypatch.setattr("systolic.launching.supervisor.LEFT_SECONDS", 0.2)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def supervised(
    folder: Path, code: str, processes: int = 2, remaining: Remaining | None = None
) -> int:
    """Runs a supervisor in this process; returns its exit code."""
    (folder / SETTINGS).touch()
    return Supervisor(
        folder=folder,
        command=[sys.executable, "-c", code, str(folder)],
        directory=str(folder),
        processes=processes,
        devices=1,
        restarts=2,
        remaining=remaining or Remaining(),
    ).run()


@pytest.mark.usefixtures("impatient")
def test_a_killed_process_starts_all_again(tmp_path: Path) -> None:
    assert supervised(tmp_path, ONCE) == 0
    assert state(tmp_path)["attempt"] == 1
    log = (tmp_path / LOGS / "0.log").read_text()
    killed = "systolic: process 1 was killed by SIGKILL\n"
    assert log == f"{killed}systolic: restart 1 of 2\ndone\n"


@pytest.mark.usefixtures("impatient")
def test_a_slice_that_does_not_come_back_is_left_out(tmp_path: Path) -> None:
    assert supervised(tmp_path, BROKEN, 6, Remaining(slices=3, min_slices=2)) == 0
    told = state(tmp_path)
    assert (told["processes"], told["left_out"], told["codes"]) == (4, [1], [0] * 4)
    log = (tmp_path / LOGS / "0.log").read_text()
    gone = "slice 1 has not come back in 0 s; the run continues with 2 of 3 slices"
    assert log == f"systolic: process 3 was killed by SIGKILL\nsystolic: {gone}\n0 of 4\n"


ALTERNATELY = """
import os, pathlib, re, sys, time
folder = pathlib.Path(sys.argv[1])
gone = re.findall("slice (.) has not come back", (folder / "logs" / "0.log").read_text())
present = [number for number in (0, 1, 2) if str(number) not in gone]
mine = present[int(os.environ.get("JAX_PROCESS_ID", "0"))]
if len(present) == 1:
    sys.exit()
starts = folder / ("starts" + str(mine))
with starts.open("a") as out:
    out.write("x")
if mine != 1:
    first = (mine == 0) == bool(len(starts.read_text()) % 2)
    time.sleep(0 if first else 0.5)
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
"""The first and the last of three slices are down; in each start the other one fails first."""


@pytest.mark.usefixtures("impatient")
def test_two_slices_that_are_down_are_both_left_out(tmp_path: Path) -> None:
    remaining = Remaining(slices=3, min_slices=1, rejoin_seconds=1.5)
    assert supervised(tmp_path, ALTERNATELY, 3, remaining) == 0
    told = state(tmp_path)
    assert (told["processes"], sorted(told["left_out"])) == (1, [0, 2])
    assert told["attempt"] > 4
    log = (tmp_path / LOGS / "0.log").read_text()
    assert log.count("systolic: restart ") == 2


@pytest.mark.usefixtures("impatient")
def test_no_more_slices_are_left_out_than_is_allowed(tmp_path: Path) -> None:
    assert supervised(tmp_path, BROKEN, 6, Remaining(slices=3, min_slices=3)) == 1
    told = state(tmp_path)
    assert (told["phase"], told["attempt"], told["left_out"]) == ("failed", 2, [])


@pytest.mark.usefixtures("impatient")
def test_a_slice_that_comes_back_stays(tmp_path: Path) -> None:
    patient = Remaining(slices=2, min_slices=1, rejoin_seconds=60)
    assert supervised(tmp_path, ONCE, 2, patient) == 0
    told = state(tmp_path)
    assert (told["processes"], told["attempt"], told["left_out"]) == (2, 1, [])


@pytest.mark.usefixtures("impatient")
def test_a_process_that_fails_by_itself_is_no_lost_slice(tmp_path: Path) -> None:
    fails = "import sys; sys.exit(1)"
    assert supervised(tmp_path, fails, 2, Remaining(slices=2, min_slices=1)) == 1
    told = state(tmp_path)
    assert (told["processes"], told["attempt"], told["left_out"]) == (2, 2, [])


@pytest.mark.parametrize(("code", "attempts"), [(1, 2), (2, 0)])
def test_a_wrong_command_is_not_repeated(tmp_path: Path, code: int, attempts: int) -> None:
    fails = f"import sys; sys.exit({code})"
    assert supervise(tmp_path, fails, processes=1).wait(PATIENCE_SECONDS) == 1
    told = state(tmp_path)
    assert (told["phase"], told["attempt"], told["codes"]) == ("failed", attempts, [code])


def test_a_stop_lets_all_processes_save(tmp_path: Path) -> None:
    started = supervise(tmp_path, WAIT)
    wait(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    started.terminate()
    assert started.wait(PATIENCE_SECONDS) == 0
    assert state(tmp_path)["phase"] == "stopped"
    assert [(tmp_path / LOGS / f"{n}.log").read_text() for n in range(2)] == ["saved\n"] * 2


STUBBORN = """
import os, pathlib, signal, sys, time
number = os.environ["JAX_PROCESS_ID"]
signal.signal(signal.SIGTERM, signal.SIG_IGN if number == "1" else lambda *_: sys.exit(143))
(pathlib.Path(sys.argv[1]) / ("ready" + number)).touch()
time.sleep(600)
"""


@pytest.mark.usefixtures("impatient")
def test_a_stop_that_kills_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("systolic.launching.supervisor.SAVE_SECONDS", 0.5)

    def stop() -> None:
        wait(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    asked = threading.Thread(target=stop)
    asked.start()
    assert supervised(tmp_path, STUBBORN) == 1
    asked.join()
    told = state(tmp_path)
    assert (told["phase"], told["codes"]) == ("stopped", [143, -9])
    assert unsaved(told["codes"]) == "1 of 2 processes were killed before they had saved"


def test_which_processes_had_saved() -> None:
    assert not unsaved([0, 143, 130, -15])
    assert unsaved([143, 1, 75, 1]) == "3 of 4 processes failed (exit code 1, 75)"


def test_processes_of_a_killed_supervisor_are_ended_by_the_next(tmp_path: Path) -> None:
    first = supervise(tmp_path, WAIT)
    wait(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    wait(lambda: (tmp_path / STATE).exists())
    left = [one["pid"] for one in state(tmp_path)["running"]]
    first.kill()
    first.wait()
    assert all(psutil.pid_exists(pid) for pid in left)
    assert supervise(tmp_path, "pass").wait(PATIENCE_SECONDS) == 0
    wait(lambda: not any(lives(identity(pid)) for pid in left if psutil.pid_exists(pid)))


def test_a_process_is_known_by_its_start_too() -> None:
    mine = identity(os.getpid())
    assert lives(mine)
    assert not lives(msgspec.structs.replace(mine, started=mine.started - 100))


def test_damaged_settings_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, reason in {
        "{": "cut short",
        "{}": "damaged (Object missing required field `made_by`)",
    }.items():
        (tmp_path / SETTINGS).write_text(text)
        assert supervisor(tmp_path) == 1
        line = f"systolic: {tmp_path / SETTINGS} is {reason}; launch it again [data]\n"
        assert capsys.readouterr().err == line
    (tmp_path / SETTINGS).unlink()
    assert supervisor(tmp_path) == 2
    assert capsys.readouterr().err.endswith("local.json is missing; launch it again [not-found]\n")
